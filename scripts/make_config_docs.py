"""The tables of docs/configuration.md, from the comments of schema.py and the files in configs/.

    python scripts/make_config_docs.py

It rewrites the parts of that page between its marks.
tests/package/test_docs.py fails if they are outdated.
"""

import sys
from pathlib import Path

from megatron_vlm.config.key_docs import group_docs, recipe_docs

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
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
    """Return a table of the recipes, with the first comment of each and the keys that it sets."""
    rows = ["| recipe | | sets |", "|---|---|---|"]
    for recipe in recipe_docs():
        keys = ", ".join(f"`{key}={value}`" for key, value in recipe.values.items())
        rows.append(f"| `{recipe.choice}` | {recipe.about} | {keys} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
