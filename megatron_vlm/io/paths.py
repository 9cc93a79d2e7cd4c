"""Paths that users and their data name: only regular files are opened.

Whoever opens a named pipe waits for somebody to write into it, and a device may never end.
"""

import os
import stat
from pathlib import Path

from megatron_vlm.errors import DataError

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def what_is_at(path: str | Path) -> str:
    """`a file`, `a folder`, `a named pipe`, `nothing`; links are followed. OSError and ValueError
    where the path itself cannot be."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "something else")
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"


def real_path(path: str | Path) -> Path:
    """The absolute path without links. Of links in a circle it is one of them, and to open it is an
    OSError; Path.resolve has a RuntimeError for them."""
    return Path(os.path.realpath(path))


def home_path(path: str | Path) -> Path:
    """The path with a leading ~ replaced. One of a user who does not exist stays as it is, where
    Path.expanduser has a RuntimeError."""
    return Path(os.path.expanduser(path))


def require_file(path: str | Path) -> Path:
    """Return the path of a regular file; anything else is refused before it is opened."""
    try:
        found = what_is_at(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", place=str(path)) from error
    if found == "nothing":
        lost = ": it is a link that leads nowhere" if os.path.islink(path) else ""
        raise DataError(f"does not exist{lost}", place=str(path))
    if found != "a file":
        raise DataError(
            f"is {found}, and only files are read", place=str(path), remedy="give a file"
        )
    return Path(path)


def require_files_in(folder: str | Path) -> None:
    """Refuse a folder that holds anything but files and folders, however deep."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            try:
                found = what_is_at(path)
            except OSError as error:  # a loop of links
                raise DataError(
                    f"cannot be read: {error.strerror}", place=str(path), remedy="remove it"
                ) from error
            if found not in ("a file", "a folder", "nothing"):
                raise DataError(
                    f"is {found}, and only files are read", place=str(path), remedy="remove it"
                )
