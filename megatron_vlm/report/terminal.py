"""The style of tables in the terminal."""

from typing import Any

from rich import box
from rich.table import Table


def plain_table(**more: Any) -> Table:
    """Return a table with nothing but a line under its head. `more`: arguments of rich's Table."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)
