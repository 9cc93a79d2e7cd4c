"""The metadata of a package that registers an object under a name, as pip would install it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


def write_entry_point(folder: Path, group: str, name: str, value: str) -> None:
    """Write the metadata of a package with this entry point."""
    metadata = folder / f"{name}_package-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@contextmanager
def registered(folder: Path, group: str, name: str, value: str) -> Iterator[None]:
    """Put a package with this entry point where Python finds it."""
    write_entry_point(folder, group, name, value)
    with patch.object(sys, "path", [str(folder), *sys.path]):
        yield
