"""Descriptions of keys, groups and recipes, from the comments of the dataclasses and the files in
configs/: for docs/configuration.md, for the help in the terminal, and for completion."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import MISSING

from megatron_vlm.config import schema
from megatron_vlm.config.bounds import ranges_of
from megatron_vlm.config.data_sources import EvalSource, SourceSpec
from megatron_vlm.config.load import config_dir


@dataclass(frozen=True)
class KeyDoc:
    """Description of one key."""

    key: str
    type: str  # as docs/configuration.md names it
    default: str  # as it is typed after KEY=
    meaning: str
    ranges: tuple[str, ...]  # bounds of its numbers
    choices: tuple[str, ...]  # values of a Literal, or true and false


@dataclass(frozen=True)
class GroupDoc:
    """Description of one group of keys. The name "" stands for the keys outside the groups."""

    name: str
    about: str
    keys: tuple[KeyDoc, ...]


@dataclass(frozen=True)
class RecipeDoc:
    """Description of one file in configs/."""

    group: str
    name: str
    about: str
    values: dict[str, str]  # what it sets, by key

    @property
    def choice(self) -> str:
        """The recipe as it is chosen: model=qwen3_vl_2b."""
        return f"{self.group}={self.name}"


@cache
def group_docs() -> dict[str, GroupDoc]:
    """Return every group by its name, in the order of schema.py."""
    groups: dict[str, type] = {"": schema.Config}
    for item in fields(schema.Config):
        if isinstance(item.type, type) and is_dataclass(item.type):
            groups[item.name] = item.type
    sources = {sys.modules[cls.__module__] for cls in groups.values()}
    comments = {k: v for each in sources for k, v in comments_of(inspect.getsource(each)).items()}
    return {name: _group_doc(name, cls, comments) for name, cls in groups.items()}


@cache
def key_docs() -> dict[str, KeyDoc]:
    """Return the description of every key that has a value."""
    return {doc.key: doc for group in group_docs().values() for doc in group.keys}


@cache
def recipe_docs() -> tuple[RecipeDoc, ...]:
    """Return the recipes, without the files that only stand for the defaults of schema.py."""
    recipes = []
    for file in sorted(config_dir().glob("*/*.yaml")):
        text = file.read_text()
        if not (values := yaml.safe_load(text)):
            continue
        lines = [line[2:] for line in text.splitlines() if line.startswith("# ")]
        is_global = bool(lines) and lines[0] == "@package _global_"
        prefix = "" if is_global else f"{file.parent.name}."
        shown = {key: show_setting(value) for key, value in _leaves(values, prefix)}
        about = " ".join(lines[is_global:])
        recipes.append(RecipeDoc(file.parent.name, file.stem, about, shown))
    return tuple(recipes)


def comments_of(source: str) -> dict[tuple[str, str], str]:
    """Return the comment after each field, by the names of class and field."""
    lines = source.splitlines()
    comments = {}
    for cls in ast.parse(source).body:
        if isinstance(cls, ast.ClassDef):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    assert node.end_lineno is not None
                    rest = lines[node.end_lineno - 1][node.end_col_offset :]
                    comment = rest.strip().removeprefix("#").strip()
                    comments[cls.name, node.target.id] = comment
    return comments


def _group_doc(name: str, cls: Any, comments: dict[tuple[str, str], str]) -> GroupDoc:
    defaults, prefix = cls(), f"{name}." if name else ""
    bounded = get_type_hints(cls, include_extras=True)
    keys = [
        KeyDoc(
            prefix + item,
            _type_name(kind),
            show_setting(getattr(defaults, item)),
            comments[cls.__name__, item] + _settings_in(kind, comments),
            tuple(dict.fromkeys(map(str, ranges_of(bounded[item])))),
            tuple(dict.fromkeys(_choices(kind))),
        )
        for item, kind in get_type_hints(cls).items()
        if name or not is_dataclass(kind)
    ]
    return GroupDoc(name, inspect.getdoc(cls) or "", tuple(keys))


def _settings_in(kind: Any, comments: dict[tuple[str, str], str]) -> str:
    if kind not in schema.MAPPINGS.values():
        return ""
    parts = (
        f"{each.name}={show_setting(each.default)} ({comments[kind.__name__, each.name]})"
        for each in fields(kind)
    )
    return f": {', '.join(parts)}"


def _type_name(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(parts)
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, parts))
    if origin is dict or (is_dataclass(kind) and kind not in (SourceSpec, EvalSource)):
        return "object"
    if origin in (list, tuple):
        return f"list[{_type_name(parts[0])}]"
    names = {NoneType: "null", SourceSpec: "source", EvalSource: "set"}
    return names.get(kind, kind.__name__)


def _choices(kind: Any) -> Iterator[str]:
    """Yield the values that can be named one by one. Those inside a list are not values of the
    key."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _choices(part)
    elif kind in (bool, NoneType):
        yield from {bool: ("true", "false"), NoneType: ("null",)}[kind]


def show_setting(value: Any) -> str:
    """Return a value as it is typed after KEY=."""
    if value == MISSING:
        return "must be given"
    if value == ():
        return "null"
    if is_dataclass(value):
        return "{}"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(show_setting, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if 1e-4 <= abs(value) < 1e6 or not value else f"{value:.0e}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return (
        f'"{value}"' if isinstance(value, str) and value.strip() != (value or None) else str(value)
    )


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
