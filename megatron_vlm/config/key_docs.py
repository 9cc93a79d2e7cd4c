"""Descriptions of keys, groups and recipes, from the comments of the dataclasses and the files in
configs/: for docs/configuration.md, for `megatron-vlm help` and --help, and for completion."""

import ast
import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import MISSING

from megatron_vlm.config import schema
from megatron_vlm.config.bounds import ranges_of
from megatron_vlm.config.command_checks import UNREAD_GROUPS
from megatron_vlm.config.data_sources import EvalSource, SourceSpec
from megatron_vlm.config.key_hints import (
    config_dir,
    group_names,
    hint_sentence,
    names_elsewhere,
    related_names,
    similar_keys,
)
from megatron_vlm.config.schema import leaves
from megatron_vlm.io.printable import wrap_words


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


_LABEL = 11  # columns of the labels before the facts of a key
_MAX_WIDTH = 100
_SHOWN_RECIPES = 2  # recipes that are named for each value of a key


def explain_topic(topic: str) -> str | None:
    """Return the explanation of a key, a group, a recipe, or a key of another trainer. Without one
    of that name, list the keys whose last part or meaning has the words. Return None if there are
    none."""
    keys, groups = key_docs(), group_docs()
    group = topic.removesuffix(".").removesuffix("=")
    recipes = {recipe.choice: recipe for recipe in recipe_docs()}
    if topic in keys:
        return _key_text(keys[topic])
    if group and group in groups:
        return _group_text(groups[group])
    if topic in recipes:
        return _recipe_text(recipes[topic])
    if (key := topic.partition("=")[0]) in keys:
        return _key_text(keys[key])
    same = [doc for doc in keys.values() if topic.replace("-", "_") in names_elsewhere(doc.key)]
    if len(same) == 1:
        return f"{topic} of other trainers is {same[0].key} here.\n\n{_key_text(same[0])}"
    return _search_text(topic)


def _search_text(topic: str) -> str | None:
    sentence = hint_sentence(topic)
    found = matching_keys(topic)
    if not found and sentence is None:
        found = [key_docs()[key] for key in similar_keys(topic) if key in key_docs()]
    if not found:
        return None if sentence is None else _filled(f"{topic}: {sentence}.")
    if len(found) == 1 and sentence is None:
        return _key_text(found[0])
    lead = [] if sentence is None else [_filled(f"{topic}: {sentence}."), ""]
    return "\n".join([*lead, f"Keys that match {topic}:", "", *_short_list(found)])


def matching_keys(topic: str) -> list[KeyDoc]:
    """Return the keys whose last part, whole or in parts, or whose meaning has the topic. Those
    whose name has it come first."""
    word = topic.lower().replace("-", "_").replace(" ", "_")
    text = re.compile(rf"\b{re.escape(word.replace('_', ' '))}\b", re.IGNORECASE)

    def rank(doc: KeyDoc) -> int:
        last = doc.key.rpartition(".")[2]
        tests = (last == word, f"_{word}_" in f"_{last}_", text.search(doc.meaning) is not None)
        return tests.index(True) if any(tests) else len(tests)

    ranked = [(rank(doc), doc) for doc in key_docs().values()]
    return [doc for place, doc in sorted(ranked, key=lambda pair: pair[0]) if place < 3]


def _key_text(doc: KeyDoc) -> str:
    facts = [("type", doc.type), ("default", doc.default)]
    facts += [("range", text) for text in doc.ranges]
    if set_by := _recipes_of(doc.key):
        facts.append(("recipes", set_by))
    others = {"elsewhere": names_elsewhere(doc.key), "related": related_names(doc.key)}
    facts += [(label, ", ".join(names)) for label, names in others.items() if names]
    lines = [_filled(f"{doc.key}: {doc.meaning}"), ""]
    for label, text in facts:
        lines.append(_filled(text, f"  {label:{_LABEL}}", " " * (_LABEL + 2)))
    return "\n".join(lines)


def _recipes_of(key: str) -> str:
    """Return what the recipes set a key to, with the recipes of each value together."""
    by_value: dict[str, list[str]] = {}
    for recipe in recipe_docs():
        if key in recipe.values:
            by_value.setdefault(recipe.values[key], []).append(recipe.choice)
    return "; ".join(f"{value} by {_first(names)}" for value, names in by_value.items())


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_RECIPES
    return ", ".join(names[:_SHOWN_RECIPES]) + (f" and {more} more" if more > 0 else "")


def _group_text(group: GroupDoc) -> str:
    lines = [_filled(f"{group.name}: {group.about}"), ""]
    if recipes := [recipe for recipe in recipe_docs() if recipe.group == group.name]:
        for recipe in recipes:
            lines.append(f"  {recipe.choice}")
            lines.append(_filled(recipe.about or _settings(recipe), " " * 6, " " * 6))
        lines.append("")
    return "\n".join([*lines, *_short_list(group.keys)])


def _recipe_text(recipe: RecipeDoc) -> str:
    head = f"{recipe.choice}: {recipe.about}" if recipe.about else f"{recipe.choice} sets:"
    return "\n".join([_filled(head), "", *(f"  {k}={v}" for k, v in recipe.values.items())])


def _settings(recipe: RecipeDoc) -> str:
    return " ".join(f"{key}={value}" for key, value in recipe.values.items())


def _short_list(docs: Sequence[KeyDoc]) -> Iterator[str]:
    """Yield two lines for each key: with its default and type, and with its meaning."""
    for doc in docs:
        default = "" if doc.default == "must be given" else f"={doc.default}"
        yield f"  {doc.key}{default}   ({doc.type})"
        yield _filled(doc.meaning, " " * 6, " " * 6)


def _filled(text: str, first: str = "", rest: str = "") -> str:
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 1
    return "\n".join(wrap_words(text, width, first, rest))


_WIDTH = 78


def listing(command: str) -> str:
    """Return the recipes and keys that a command takes, a paragraph for each group."""
    groups = [name for name in group_names() if name not in UNREAD_GROUPS[command]]
    lines = ["  recipes:"]
    for group in groups:
        if names := recipe_names(group):
            lines += _paragraph(f"{group}=", names)
    lines += ["  keys:", *_paragraph("", [key for key in leaves() if "." not in key])]
    for group in groups:
        names = [key.partition(".")[2] for key in leaves() if key.startswith(f"{group}.")]
        lines += _paragraph(f"{group}.", names)
    return "\n".join([*lines, "  megatron-vlm help KEY explains a key, help GROUP. a group."])


def recipe_names(group: str) -> list[str]:
    """Return the recipes of a group. A `default` that sets nothing is no choice."""
    files = sorted((config_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if file.stem != "default" or _sets_something(file)]


def _sets_something(file: Path) -> bool:
    """Return whether a recipe has a key. YAML is too slow for every --help."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return any(line not in ("", "{}") for line in lines)


def _paragraph(prefix: str, names: Sequence[str]) -> list[str]:
    return wrap_words(f"{prefix:13}{' '.join(names)}", _WIDTH, " " * 4, " " * 17)
