"""A translation in progress: settings of another trainer that are still to be read, and the lines
that they become here."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from megatron_vlm.commands.import_config.source_settings import Setting, SourceSettings
from megatron_vlm.config.schema import leaves, setting_types
from megatron_vlm.errors import NOT_GIVEN, ConfigError, show_value
from megatron_vlm.io.printable import escape_controls

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NOTHING = ("", "none", "null")
_SHOWN = 48  # characters of a value in a comment
_LARGEST = 1e18  # no setting is a number beyond it
_VERL = "actor_rollout_ref."  # names of actor, rollout, ref and model begin so


@dataclass(frozen=True)
class OutputLine:
    """A key of this package with its value, and the comment after it."""

    value: Any
    comment: str
    line: int  # the line of the setting that it came from; 0 for a default


@dataclass(frozen=True)
class Trainer:
    """A trainer whose settings are translated."""

    title: str  # its name as its users write it
    own_names: str  # names of settings that the other trainers do not have
    defaults: Mapping[str, Any]  # by its own names, where this package has others
    # Its own names for what the rules call otherwise. They call a setting as transformers or TRL.
    names: Mapping[str, str]
    rules: "Sequence[Callable[[Translation], None]]"
    # Our keys, and the names of settings with equal values.
    same: Mapping[str, str] = field(default_factory=dict)
    task: str = ""  # what is trained where neither the command nor a setting says it


@dataclass
class Translation:
    """Settings that are left to read, and the result so far."""

    source: SourceSettings
    trainer: Trainer
    gpus: int | None = None
    task: str = ""  # the trainer's command, such as dpo; "" if it is not known
    method: str = "sft"  # what is trained: sft, grpo, or an objective over preferences
    has_lora: bool = False
    lines: dict[str, OutputLine] = field(default_factory=dict)
    recipes: dict[str, OutputLine] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)  # sentences
    read: set[str] = field(default_factory=set)  # names of settings that were read

    def __post_init__(self) -> None:
        common = {
            foreign: name for name, each in self.trainer.names.items() for foreign in each.split()
        }
        self._names: dict[str, str] = {}  # the name that a rule asks for: the name in the source
        for name, setting in self.source.settings.items():
            plain = name.removeprefix(_VERL).lower().replace("-", "_")
            known = common.get(plain, plain)
            if known not in self._names or setting.value is not None:
                self._names.setdefault(known, name)
        self._defaults = {
            common.get(name, name): Setting(name, value, is_default=True)
            for name, value in self.trainer.defaults.items()
        }

    @property
    def has_held_out(self) -> bool:
        """True if data is held out, by files of its own or by a split."""
        return "data.eval" in self.lines or "data.split" in self.lines

    @property
    def is_rl(self) -> bool:
        """True if the run learns from rewards."""
        return self.method in ("grpo", "rloo")

    def variable(self, name: str) -> Setting | None:
        """Return a variable of the environment that the command would have read."""
        value = self.source.environment.get(name)
        return None if is_off(value) else Setting(name, value)

    def given(self, *names: str) -> Setting | None:
        """Return the first of these settings that the file has with a value, marked as read."""
        for name in names:
            written = self._names.get(name)
            if written is None:
                continue
            setting = self.source.settings[written]
            self.read.add(written)
            if not is_nothing(setting.value):
                return self._known(setting)
        return None

    def named(self, name: str) -> Setting | None:
        """Return a setting for which `none` is a choice and not the lack of one."""
        self.given(name)
        setting = self.source.settings.get(self._names.get(name, ""))
        return None if setting is None or setting.value is None else self._known(setting)

    def skip(self, *names: str) -> None:
        """Mark settings as read for which nothing is set."""
        for name in names:
            self.given(name)

    def _known(self, setting: Setting) -> Setting:
        """Refuse a setting with a reference that nothing in the file resolves."""
        if setting.unknown:
            raise self.source.error(
                setting, "has a reference that the file does not resolve", remedy="write the value"
            )
        return setting

    def take(self, name: str) -> Setting | None:
        """Return a setting, or else the trainer's default of it. A setting that is `none` has no
        value, and null stands for the default."""
        if (found := self.given(name)) is not None:
            return found
        written = self._names.get(name)
        is_none = written is not None and self.source.settings[written].value is not None
        default = self._defaults.get(name)
        return None if is_none or default is None or default.value is None else default

    def set_defaults(self, **defaults: Any) -> None:
        """Set the trainer's defaults for this method, with None for what it does not have."""
        for name, value in defaults.items():
            self._defaults[name] = Setting(name, value, is_default=True)

    def switched_on(self, name: str) -> Setting | None:
        """Return a setting if it is given and true."""
        setting = self.given(name)
        return setting if self.flag(setting) else None

    def positive(self, name: str) -> Setting | None:
        """Return a setting if it is given and more than 0."""
        setting = self.given(name)
        return setting if setting is not None and self.number(setting) > 0 else None

    def put(self, key: str, value: Any, *settings: Setting | None, note: str = "") -> None:
        """Set a key of this package, with the settings that the value came from."""
        origins = [each for each in settings if each is not None]
        shown = ", ".join(self._shown(origin, value) for origin in origins)
        comment = "; ".join(filter(None, (shown, note)))
        mapping, _, name = key.rpartition(".")
        if mapping in leaves():  # data.video.fps is a part of data.video
            others = self.lines.get(mapping, OutputLine({}, "", 0))
            key, value = mapping, others.value | {name: value}
            comment = ", ".join(filter(None, (others.comment, comment)))
        self.lines[key] = OutputLine(value, comment, max((o.line for o in origins), default=0))

    def origin(self, *settings: Setting | None) -> str:
        """Return the settings with their values and lines, for a comment."""
        return ", ".join(self._shown(each) for each in settings if each is not None)

    def _shown(self, setting: Setting, result: Any = NOT_GIVEN) -> str:
        """Return a setting with its value, unless the result is the same."""
        text = escape_controls(setting.name)
        if not _is_same(setting.value, result):
            value = show_value(setting.value, setting.name).replace("\n", " ")
            value = escape_controls(value)
            text += f"={value if len(value) <= _SHOWN else f'{value[: _SHOWN - 3]}...'}"
        if setting.is_default:
            return f"{text} (the default of {self.trainer.title})"
        return f"{text} (line {setting.line})" if setting.line else text

    def differ(self, sentence: str, *settings: Setting | None) -> None:
        """Add a sentence on what is not the same here."""
        origin = self.origin(*settings)
        self.different.append(f"{origin}: {sentence}" if origin else sentence)

    def number(self, setting: Setting) -> float:
        """Return a number, whole where it is written so."""
        value = setting.value
        if isinstance(value, str):
            try:
                value = float(value) if re.search(r"[.eE]|inf|nan", value) else int(value)
            except ValueError:
                value = None
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise self.source.error(setting, allowed="a number")
        return value  # type: ignore[no-any-return]

    def whole(self, setting: Setting) -> int:
        """Return a whole number."""
        value = self.number(setting)
        if value != int(value):
            raise self.source.error(setting, allowed="a whole number")
        return int(value)

    def flag(self, setting: Setting | None) -> bool:
        """Return true or false; false for a setting that is absent."""
        if setting is None:
            return False
        text = str(setting.value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise self.source.error(setting, allowed="true or false")
        return text in _TRUE

    def words(self, setting: Setting) -> list[str]:
        """Return a list of texts; a text is split at commas."""
        values = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
        texts = [str(value).strip() for value in values]
        return [text for text in texts if text]

    def choose(self, setting: Setting, table: dict[str, Any], remedy: str = "") -> Any:
        """Return the value that the table has for a setting; others are refused."""
        name = str(setting.value).lower()
        if name not in table:
            raise self.source.error(
                setting, "has no counterpart here", allowed=sorted(table), remedy=remedy
            )
        return table[name]

    def mapping(self, setting: Setting) -> dict[str, Any]:
        """Return a mapping, which a command has as JSON."""
        value = setting.value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict):
            raise self.source.error(setting, allowed="a JSON object")
        return value

    def copy(self, key: str, name: str) -> Setting | None:
        """Set a key to the value of a setting that means the same, or of its default."""
        self.copy_setting(key, setting := self.take(name))
        return setting

    def copy_setting(self, key: str, setting: Setting | None) -> None:
        """Set a key to the value of this setting, if there is one."""
        if setting is not None:
            self.put(key, self._converter(key)(self._known(setting)), setting)

    def _converter(self, key: str) -> Callable[[Setting], Any]:
        """Return the function that reads a value of the key's type."""
        kind = setting_types()[key]
        parts = {kind, *get_args(kind)}
        if bool in parts and str not in parts:
            return self.flag
        if int in parts:
            return self.whole
        if float in parts:
            return self.number
        if any(get_origin(part) in (tuple, list, dict) for part in parts):
            return lambda setting: setting.value
        return lambda setting: str(setting.value)

    def error(self, problem: str, **fields: Any) -> ConfigError:
        """Make an error about the whole file or command."""
        return ConfigError(problem, place=self.source.command or self.source.file, **fields)


def _is_same(value: Any, result: Any) -> bool:
    if str(value).lower() == str(result).lower():
        return True
    try:
        return float(value) == float(result)
    except (TypeError, ValueError, OverflowError):
        return False


def is_nothing(value: Any) -> bool:
    """Return whether a value says that a setting has none."""
    return value is None or value in ([], {}) or str(value).lower() in _NOTHING


def is_off(value: Any) -> bool:
    """Return whether a value says that something is not used."""
    if isinstance(value, str):
        return value.lower() in (*_NOTHING, "false", "no", "off", "disable", "disabled", "0", "0.0")
    return value is None or value is False or value == 0 or value in ([], {})
