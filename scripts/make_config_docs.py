"""The tables of docs/configuration.md, from the comments of schema.py and the files in configs/.

    python scripts/make_config_docs.py

It rewrites the parts of that page between its marks.
tests/package/test_docs.py fails if they are outdated.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_vlm.config.key_docs import RecipeDoc, group_docs, key_docs, recipe_docs

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
_PATH = "Set model.path to the folder of its checkpoint."
BEGIN, END = "<!-- {} begin -->\n", "<!-- {} end -->\n"


def with_tables(page: str) -> str:
    """Return the page with new tables."""
    for mark, text in (("keys", key_tables()), ("recipes", recipe_table())):
        before, begin, rest = page.partition(BEGIN.format(mark))
        _, end, after = rest.partition(END.format(mark))
        assert begin and end, mark
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def key_tables() -> str:
    """Return a table of keys for each group, below the docstring of its class."""
    tables = []
    for name, group in group_docs().items():
        title = f"`{name}`" if name else "Outside the groups"
        about = f"{group.about}\n\n" if name else ""
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for doc in group.keys:
            cells = (f"`{doc.key}`", doc.type, doc.default, doc.meaning)
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        tables.append(f"### {title}\n\n{about}" + "\n".join(rows) + "\n")
    return "\n".join(tables)


def recipe_table() -> str:
    """Return a table of the recipes: the first comment of each, and the keys that it changes."""
    changed = {recipe.choice: _changes(recipe) for recipe in recipe_docs()}
    released = [set(values.items()) for name, values in changed.items() if _is_released(name)]
    shared = set.intersection(*released)
    lines = [f"Each `model=qwen...` sets {_settings(shared)}. {_PATH}", ""]
    lines += ["| recipe | | sets |", "|---|---|---|"]
    for recipe in recipe_docs():
        own = changed[recipe.choice].items() - (shared if _is_released(recipe.choice) else set())
        about = recipe.about.replace(f" {_PATH}", "")
        lines.append(f"| `{recipe.choice}` | {about} | {_settings(own)} |")
    return "\n".join(lines) + "\n"


def _is_released(choice: str) -> bool:
    return choice.startswith("model=qwen")


def _changes(recipe: RecipeDoc) -> dict[str, str]:
    """Return the keys of a recipe whose values are not the defaults."""
    defaults = {key: _value(doc.default) for key, doc in key_docs().items()}
    return {key: text for key, text in recipe.values.items() if _value(text) != defaults[key]}


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _settings(items: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in sorted(items))


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
