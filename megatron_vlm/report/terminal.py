"""How tables look in the terminal."""

from typing import Any

from rich import box
from rich.table import Table


def plain_table(**more: Any) -> Table:
    """A line under the head, and nothing else. `more` is rich's own."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **more)
