"""A user's configuration file: `--config my.yaml`.

    defaults:                # recipes, as on the command line
      - model: qwen3_vl_2b
    model:
      path: Qwen3-VL-2B
    optim: {lr: 2e-5}

The process that the user starts reads the file once and passes the text to the others. All ranks,
and a restart, then have the same configuration even if the file changes in the meantime.

Only what JSON also has is read: no objects, no dates, no `yes` for true. Size, depth and the number
of values are bounded, so that aliases of aliases cannot fill the memory. A key may occur once.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import yaml  # type: ignore[import-untyped]

from megatron_vlm.config import key_hints
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import ConfigError, DataError, gather_errors, show_value, within
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.io.untrusted import UntrustedFile, home_path

_MAX_VALUES = 10_000
MAX_YAML_DEPTH = 32
_MAX_DIGITS = 300  # an integer with fewer is one that a float can hold
_TAG = "tag:yaml.org,2002:"
_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9]*)",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Loader with the values of YAML 1.2: 1e-5 is a number, yes and 010 are text."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        None: [(_TAG + kind, re.compile(f"(?:{form})$")) for kind, form in _PLAIN.items()]
    }


@dataclass
class YamlText:
    """Document with the number of values that may still be read."""

    name: str
    left: int = _MAX_VALUES
    keeps_variables: bool = False  # ${...} is text here, which the reader of the values resolves

    def root(self, text: str) -> Any:
        """Return the node of the whole document."""
        try:
            return _Loader(text).get_single_node()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = self.name if mark is None else f"{self.name}, line {mark.line + 1}"
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            # A secret may begin like an alias or a tag.
            problem = re.sub(r"(alias|anchor|handle|tag) '.*", r"\1", problem)
            raise ConfigError(
                f"is not YAML: {problem}", place=where, remedy="correct the file"
            ) from error
        except RecursionError as error:
            raise self._depth_error() from error

    def pairs(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the nodes of the keys and of the values of a mapping."""
        key_lines: dict[str, int] = {}
        for key_node, value in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise self.error(key_node, "a key must be plain text")
            if key in key_lines:
                raise self.error(
                    key_node,
                    f"is set in line {key_lines[key]} already",
                    key=show_value(key),
                    remedy="remove one of them",
                )
            key_lines[key] = line
            yield key_node, value

    def value(self, node: Any, as_text: bool = False, depth: int = 0) -> Any:
        """Return a node as plain values. With `as_text`, a scalar stays as it is written, so that a
        name such as 1.50 keeps its zero."""
        self.left -= 1
        if self.left < 0:
            raise ConfigError(
                f"has more than {_MAX_VALUES} values, counting each alias, so it is no "
                "configuration",
                place=self.name,
            )
        if depth > MAX_YAML_DEPTH:
            raise self._depth_error()
        if node.tag == _TAG + "map":
            pairs = self.pairs(node)
            return {key.value: self.value(each, False, depth + 1) for key, each in pairs}
        if node.tag == _TAG + "seq":
            return [self.value(each, as_text, depth + 1) for each in node.value]
        return self._scalar(node, as_text)

    def error(self, node: Any, problem: str = "", **fields: Any) -> ConfigError:
        """Make an error with the file and the line as its place."""
        return ConfigError(problem, place=self.place(node), **fields)

    def place(self, node: Any) -> str:
        """Return the file and the line of a node."""
        return f"{self.name}, line {node.start_mark.line + 1}"

    def _scalar(self, node: Any, as_text: bool) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = node.value if isinstance(node.value, str) else "something"
        if "${" in text and not self.keeps_variables:
            raise self.error(
                node,
                f"{text[:80]!r}: ${{...}} is not replaced in a file",
                remedy="write the value, or give the key on the command line, where the shell "
                "replaces it",
            )
        if kind == "null":
            return None
        if kind == "str" or (as_text and kind in _PLAIN):
            return text
        try:
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text) if len(text) < _MAX_DIGITS else float(text)  # infinite
            if kind == "float":
                return float(re.sub(r"\.(?=[a-zA-Z])", "", text))
        except (ValueError, KeyError):
            pass
        raise self.error(
            node,
            "a value with a tag of its own is not read",
            remedy="write text, a number, true, false, null, a list or a mapping",
        )

    def _depth_error(self) -> ConfigError:
        return ConfigError(
            f"is nested deeper than {MAX_YAML_DEPTH} levels, so it is no configuration",
            place=self.name,
        )


MAX_CONFIG_BYTES = 2**16
_MAX_LINE = 2**16  # bytes of the first line of a log


@dataclass(frozen=True)
class ConfigFile:
    """Recipes by group, and values by key."""

    name: str
    text: str = field(repr=False)
    recipes: Mapping[str, str]
    values: Mapping[str, Any]
    lines: Mapping[str, int]  # line of each key in `values`, from 1

    @staticmethod
    def read(path: str) -> "ConfigFile":
        """Read the file at this path."""
        with within("--config"):
            text = UntrustedFile(str(home_path(path)), ConfigError).text(MAX_CONFIG_BYTES)
        return ConfigFile.parse(text, path)

    @staticmethod
    def parse(text: str, name: str) -> "ConfigFile":
        """Parse the content of the file with this name."""
        document = YamlText(name)
        root = document.root(text)
        if root is None or not root.tag.endswith(":map"):
            raise ConfigError(
                "is empty" if root is None else "is not a mapping",
                place=name,
                remedy="write a mapping, such as `optim: {lr: 1e-5}`",
            )
        recipes: dict[str, str] = {}
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        refused: list[ConfigError] = []
        found: list[tuple[str, Any, Any]] = []
        for key, node in document.pairs(root):
            if key.value == "defaults":
                recipes = _recipes(document, node)
            else:
                found += _leaves(document, key.value, key, node, refused)
        if refused:
            is_of_run = Path(name).name == "config.yaml" and read_mark(Path(name).parent)
            raise _version_error(Path(name), refused) if is_of_run else gather_errors(refused)
        for full, place, leaf in found:
            if full in values:
                raise document.error(
                    place,
                    f"is set in line {lines[full]} already",
                    key=full,
                    remedy="remove one of them",
                )
            values[full] = document.value(leaf, _is_text(full))
            lines[full] = place.start_mark.line + 1
        return ConfigFile(name, text, recipes, values, lines)

    @property
    def is_complete(self) -> bool:
        """True if the file has every key, as the config.yaml of a run does."""
        return set(leaves()) <= set(self.values)

    @property
    def words(self) -> list[str]:
        """Arguments that give another process the same file."""
        return [f"--config={self.name}", f"--config-text={self.text}"]

    def values_by_group(self) -> dict[str, Any]:
        """Return the values in their groups."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *groups, name = key.split(".")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[name] = value
        return tree

    def blame(self, error: ConfigError, overrides: Sequence[str]) -> ConfigError:
        """Return the error, with file and line where this file set its key."""
        if error.key in self.recipes and error.found == self.recipes[error.key]:
            return error.within(f"{self.name}, defaults")
        overridden = {override.lstrip("+~").split("=")[0] for override in overrides}
        for key, line in self.lines.items():
            is_at_fault = error.key == key or error.key.startswith((f"{key}.", f"{key}["))
            if is_at_fault and key not in overridden:
                return error.within(f"{self.name}, line {line}")
        return error


def _version_error(file: Path, refused: Sequence[ConfigError]) -> ConfigError:
    """Return the error on the config.yaml of a run that has keys of another version."""
    problem = "are keys of another version" if len(refused) > 1 else "is a key of another version"
    keys, remedy = ", ".join(error.key for error in refused), version_remedy(file.parent)
    return ConfigError(problem, place=str(file), key=keys, remedy=remedy)


def version_remedy(folder: Path) -> str:
    """Return what to do about a run that this version cannot continue. The version that began it
    is in the log of the run, of which `folder` may be a checkpoint."""
    run = folder.parents[1] if folder.parent.name == "checkpoints" else folder
    log, version = UntrustedFile(str(run / "metrics.jsonl")), "the version that began it"
    with suppress(DataError), log.wrap_errors("not as it was written"):
        start = log.parse(log.read_beginning(_MAX_LINE).splitlines()[0])
        number, day = start["versions"]["megatron_vlm"], start["time"]
        version = f"megatron_vlm {number:.20}, which began it on {day:.10}"
    return f"finish the run with {version}, or give another folder"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add --config to a command that takes KEY=VALUE."""
    text = "a YAML file with keys and recipes (docs/configuration.md); KEY=VALUE wins over it"
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_argument("--config-text", help=argparse.SUPPRESS)  # see ConfigFile.words


def chosen_file(args: argparse.Namespace) -> ConfigFile | None:
    """Return the file of --config, or None if it is not set."""
    if args.config is None:
        return None
    if args.config_text is not None:
        return ConfigFile.parse(args.config_text, args.config)
    return ConfigFile.read(args.config)


def _recipes(document: YamlText, node: Any) -> dict[str, str]:
    groups = key_hints.group_names()
    recipes: dict[str, str] = {}
    for entry in node.value if node.tag.endswith(":seq") else [node]:
        pairs = list(document.pairs(entry)) if entry.tag.endswith(":map") else []
        if len(pairs) != 1 or not node.tag.endswith(":seq"):
            raise document.error(
                entry,
                "must be a list of recipes",
                key="defaults",
                remedy="write each as `- GROUP: NAME`, such as `- model: qwen3_vl_2b`",
            )
        group, name = pairs[0][0].value, document.value(pairs[0][1], as_text=True)
        if group not in groups:
            raise document.error(
                entry,
                ": there is no such group",
                key="defaults",
                found=group,
                remedy=f"choose from {', '.join(groups)}",
            )
        if group in recipes or not re.fullmatch(r"[\w-]+", str(name)):
            raise document.error(
                entry, key=f"defaults.{group}", found=name, remedy="give one recipe, by its name"
            )
        recipes[group] = name
    return recipes


def _leaves(
    document: YamlText, key: str, place: Any, node: Any, refused: list[ConfigError], depth: int = 0
) -> Iterator[tuple[str, Any, Any]]:
    """Yield every key with a value at or below this one, and the nodes of its name and of its
    value. A group may be empty. Errors on keys that do not exist are added to `refused`, so that a
    file of another trainer gets all answers at once."""
    kinds = key_types()
    is_map = node.tag.endswith(":map")
    is_group = is_dataclass(kinds.get(key))
    # A section of another trainer is answered by its name, or else key by key.
    is_name = re.fullmatch(r"[\w.-]+", key) is not None and key_hints.counterpart_of(key) is None
    is_section = key not in kinds and is_name and bool(node.value)
    if is_map and (is_group or is_section) and depth < MAX_YAML_DEPTH:
        for name, inner in document.pairs(node):
            full = f"{key}.{name.value}"
            yield from _leaves(document, full, name, inner, refused, depth + 1)
    elif key not in kinds:
        fields = key_hints.unknown_key_error(key).fields()
        refused.append(ConfigError(**fields | {"place": document.place(place)}))
    elif not is_group:
        yield key, place, node
    elif not node.tag.endswith(":null"):
        refused.append(_group_error(document, key, place, node))


def _group_error(document: YamlText, key: str, place: Any, node: Any) -> ConfigError:
    """Return the error on a group that has a value in place of keys, such as `model: ORG/NAME`."""
    problem = "is a group of keys"
    value = node.value if isinstance(node.value, str) else None
    is_recipe = value in key_hints.recipes_of(key)
    if value is not None and not is_recipe and (meant := key_hints.meant_by_value(key, value)):
        return document.error(place, problem, key=key, found=value, remedy=meant)
    remedy = f"write `{key}: {{KEY: VALUE}}`, or choose a recipe by `defaults: [{{{key}: NAME}}]`"
    return document.error(place, problem, key=key, remedy=remedy)


def _is_text(key: str) -> bool:
    """Return whether the key's value is text or a list of text, even if it looks like a number."""
    kind = key_types()[key]
    parts = {kind} if kind is str or get_origin(kind) is tuple else set(get_args(kind))
    lists = [get_args(part)[0] for part in parts if get_origin(part) is tuple]
    listed = any(item is str or get_origin(item) is Literal for item in lists)
    return listed or parts - {type(None)} == {str}
