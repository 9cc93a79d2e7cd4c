"""Untrusted YAML as nodes with their lines and as plain values.

Only what JSON also has is read: no objects, no dates, no `yes` for true. Size, depth and the number
of values are bounded, so that aliases of aliases cannot fill the memory. A key may occur once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from megatron_vlm.errors import ConfigError, show_value

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
