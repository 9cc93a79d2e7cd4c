"""The tables of docs/configuration.md, from the comments of schema.py and the files in configs/.

    python scripts/make_config_docs.py

It rewrites the parts of that page between its marks. tests/test_docs.py fails if they are outdated.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import MISSING

from megatron_vlm.config import config_dir, schema
from megatron_vlm.config.data_sources import EvalSource, SourceSpec

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
    comments = comments_of(inspect.getsource(schema))
    groups: list[tuple[str, type]] = [("", schema.Config)]
    for item in fields(schema.Config):
        if isinstance(item.type, type) and is_dataclass(item.type):
            groups.append((f"{item.name}.", item.type))
    tables = []
    for prefix, cls in groups:
        title = f"`{prefix[:-1]}`" if prefix else "Outside the groups"
        about = "" if not prefix else f"{inspect.getdoc(cls)}\n\n"
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        defaults = cls()
        for name, kind in get_type_hints(cls).items():
            if not is_dataclass(kind):
                default, comment = getattr(defaults, name), comments[cls.__name__, name]
                cells = (f"`{prefix}{name}`", _type(kind), _value(default), comment)
                rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        tables.append(f"### {title}\n\n{about}" + "\n".join(rows) + "\n")
    return "\n".join(tables)


def recipe_table() -> str:
    """Return a table of the files of configs/ except the defaults, with the first comment of each
    and the keys that it sets."""
    rows = ["| recipe | | sets |", "|---|---|---|"]
    for file in sorted(config_dir().glob("*/*.yaml")):
        text = file.read_text()
        if not yaml.safe_load(text):  # defaults of the schema itself
            continue
        lines = [line[2:] for line in text.splitlines() if line.startswith("# ")]
        is_global = bool(lines) and lines[0] == "@package _global_"
        about = " ".join(lines[is_global:])
        prefix = "" if is_global else f"{file.parent.name}."
        leaves = _leaves(yaml.safe_load(text), prefix)
        keys = ", ".join(f"`{key}={_value(value)}`" for key, value in leaves)
        rows.append(f"| `{file.parent.name}={file.stem}` | {about} | {keys} |")
    return "\n".join(rows) + "\n"


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


def _type(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(parts)
    if origin in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if origin is dict:
        return "object"
    if origin in (list, tuple):
        return f"list[{_type(parts[0])}]"
    names = {NoneType: "null", SourceSpec: "source", EvalSource: "set"}
    return names.get(kind, kind.__name__)


def _value(value: Any) -> str:
    """Format a value as it is typed after KEY=."""
    if value == MISSING:
        return "must be given"
    if value == ():
        return "null"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_value, value))}]"
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


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
