"""Explanations of keys, groups and recipes for the terminal: `megatron-vlm help optim.lr`."""

import re
import shutil
from collections.abc import Iterator, Sequence

from megatron_vlm.config.key_docs import (
    GroupDoc,
    KeyDoc,
    RecipeDoc,
    group_docs,
    key_docs,
    recipe_docs,
)
from megatron_vlm.config.key_hints import (
    hint_sentence,
    names_elsewhere,
    related_names,
    similar_keys,
)
from megatron_vlm.io.printable import wrap_words

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
