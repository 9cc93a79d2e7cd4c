"""A translation in progress: settings of another trainer that are still to be read, and the lines
that they become here."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vlm.commands.import_config.source_settings import Setting, SourceSettings
from megatron_vlm.config.other_trainers.trainers import (
    MEGATRON_SWIFT,
    OTHER_TRAINERS,
    TrainerName,
)
from megatron_vlm.errors import NOT_GIVEN, ConfigError, show_value
from megatron_vlm.io.printable import escape_controls

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NOTHING = ("", "none", "null")
_SHOWN = 48  # characters of a value in a comment
_VERL = "actor_rollout_ref."  # names of actor, rollout, ref and model begin so


@dataclass(frozen=True)
class OutputLine:
    """A key of this package with its value, and the comment after it."""

    value: Any
    comment: str
    line: int  # the line of the setting that it came from; 0 for a default


@dataclass
class Translation:
    """Settings that are left to read, and the result so far."""

    source: SourceSettings
    trainer: TrainerName
    method: str = "sft"  # what is trained: sft, grpo, or an objective over preferences
    gpus: int | None = None
    has_lora: bool = False
    lines: dict[str, OutputLine] = field(default_factory=dict)
    recipes: dict[str, OutputLine] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)  # sentences
    read: set[str] = field(default_factory=set)  # names of settings that were read

    def __post_init__(self) -> None:
        self._names: dict[str, str] = {}
        for name in self.source.settings:
            self._names.setdefault(name.removeprefix(_VERL).lower().replace("-", "_"), name)
        self.defaults = OTHER_TRAINERS[self.trainer].defaults
        if self.is_megatron:
            self.defaults = MEGATRON_SWIFT

    @property
    def title(self) -> str:
        """Name of the trainer as its users write it."""
        return OTHER_TRAINERS[self.trainer].title

    @property
    def is_megatron(self) -> bool:
        """True for Megatron-SWIFT, whose settings are those of Megatron-LM."""
        if self.source.command:
            return self.source.command.startswith("megatron")
        return self.trainer == "ms-swift" and "micro_batch_size" in self._names

    @property
    def is_rl(self) -> bool:
        """True if the run learns from rewards."""
        return self.method in ("grpo", "rloo")

    def variable(self, name: str) -> Setting | None:
        """Return a variable that the script sets for its command."""
        setting = self.source.environment.get(name)
        if setting is None or is_off(setting.value):
            return None
        self.read.add(name)
        return self._known(setting)

    def given(self, *names: str) -> Setting | None:
        """Return the first of these settings that the file has with a value, and mark it as
        read."""
        for name in names:
            written = self._names.get(name)
            if written is None:
                continue
            setting = self.source.settings[written]
            self.read.add(written)
            if setting.value is not None and str(setting.value).lower() not in _NOTHING:
                return self._known(setting)
        return None

    def given_path(self, *names: str) -> Setting | None:
        """Return the first of these settings. It is a path, and $HOME is ~ in it."""
        for written in filter(None, map(self._names.get, names)):
            setting = self.source.settings[written]
            if setting.variable == "HOME":
                paths = setting.value if isinstance(setting.value, list) else [setting.value]
                paths = [re.sub(r"\$(HOME\b|\{HOME\})", "~", str(path)) for path in paths]
                value = paths if isinstance(setting.value, list) else paths[0]
                self.source.settings[written] = replace(setting, value=value, variable="")
        return self.given(*names)

    def _known(self, setting: Setting) -> Setting:
        """Refuse a setting with a variable that the file does not set."""
        if setting.variable:
            raise self.source.error(
                setting,
                f": the value of {setting.variable} is not known, since no variable of the "
                "environment is read and nothing is run",
                remedy=_remedy_of(setting.variable),
            )
        return setting

    def take(self, *names: str) -> Setting | None:
        """Return the first of these settings, or else the trainer's default of one of them. A
        setting that is `none` has no value, and null stands for the default."""
        if (found := self.given(*names)) is not None:
            return found
        if any(self._is_none(name) for name in names):
            return None
        return next(
            (Setting(name, self.defaults[name]) for name in names if name in self.defaults), None
        )

    def _is_none(self, name: str) -> bool:
        written = self._names.get(name)
        return written is not None and self.source.settings[written].value is not None

    def put(self, key: str, value: Any, *origins: Setting, note: str = "") -> None:
        """Set a key of this package, with the settings that the value came from."""
        shown = ", ".join(self._shown(origin, value) for origin in origins)
        comment = "; ".join(filter(None, (shown, note)))
        self.lines[key] = OutputLine(value, comment, max((o.line for o in origins), default=0))

    def origin(self, *settings: Setting) -> str:
        """Return the settings with their values and lines, for a comment."""
        return ", ".join(map(self._shown, settings))

    def _shown(self, setting: Setting, result: Any = NOT_GIVEN) -> str:
        """Return a setting with its value, unless the result is the same."""
        text = escape_controls(setting.name)
        if not _is_same(setting.value, result):
            text += f"={show_in_comment(setting.value)}"
        where = f"line {setting.line}" if setting.line else f"the default of {self.title}"
        return f"{text} ({where})"

    def differ(self, sentence: str, *settings: Setting) -> None:
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
        if type(value) not in (int, float):
            raise self.source.error(setting, allowed="a number")
        return value  # type: ignore[no-any-return]

    def whole(self, setting: Setting) -> int:
        """Return a whole number."""
        value = self.number(setting)
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
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

    def copy_number(self, key: str, *names: str) -> Setting | None:
        """Set a key to the number of a setting, or of its default."""
        setting = self.take(*names)
        if setting is not None:
            self.put(key, self.number(setting), setting)
        return setting

    def error(self, problem: str, **fields: Any) -> ConfigError:
        """Make an error about the whole file."""
        return ConfigError(problem, place=self.source.file, **fields)


def _is_same(value: Any, result: Any) -> bool:
    if str(value).lower() == str(result).lower():
        return True
    try:
        return float(value) == float(result)
    except (TypeError, ValueError):
        return False


def _remedy_of(variable: str) -> str:
    if not re.fullmatch(r"\w+", variable, re.ASCII):
        return "write the value"
    return f'write the value, or give it as --set {variable}="${variable}"'


def show_in_comment(value: Any) -> str:
    """Return a value as it may stand in a comment: one line, and not long."""
    text = escape_controls(show_value(value).replace("\n", " "))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def is_off(value: Any) -> bool:
    """Return whether a value says that something is not used."""
    if isinstance(value, str):
        return value.lower() in (*_NOTHING, "false", "no", "off", "disable", "disabled", "0", "0.0")
    return value is None or value is False or value == 0 or value in ([], {})
