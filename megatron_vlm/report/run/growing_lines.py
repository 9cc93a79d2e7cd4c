"""A file of lines that grows while it is read: each line is read once.

The last line counts when its end is written. A file that was truncated, or is another one by now,
is read again from its beginning.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile

_KEPT = 64  # bytes before the place of reading, by which the file is recognised


class GrowingLines:
    """The place up to which the lines of a file were read. Links are followed, and the last line
    counts without an end, only if the file `is_complete`."""

    def __init__(self, path: Path, max_line: int, is_complete: bool = False):
        self.path, self.max_line, self.is_complete = path, max_line, is_complete
        self.place = 0
        self._before = b""

    def has_begun_anew(self) -> bool:
        """Return whether the file is another one by now. The next lines are then its first ones."""
        with self._open() as file:
            file.seek(self.place - len(self._before))
            is_same = file.read(len(self._before)) == self._before
        if not is_same:
            self.place, self._before = 0, b""
        return not is_same

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the place and the content of each line that is complete by now. Of a longer line
        than `max_line` the beginning is given."""
        with self._open() as file:
            file.seek(self.place)
            while line := file.readline(self.max_line):
                begin, last = self.place, line
                while last and not last.endswith(b"\n") and len(last) == self.max_line:
                    last = file.readline(self.max_line)
                if not (last.endswith(b"\n") or self.is_complete):
                    return
                self.place = file.tell()
                self._before = last[-_KEPT:]
                yield begin, line

    def _open(self) -> BinaryIO:
        if self.is_complete:
            file = UntrustedFile(str(self.path))
            file.regular_path()
            with file.wrap_errors("cannot be read"):
                return self.path.open("rb")
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            is_link = self.path.is_symlink()
            problem = "is a link, which is not followed" if is_link else "cannot be read: "
            problem += "" if is_link else error.strerror or type(error).__name__
            raise DataError(problem, place=self.path.name) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise DataError("is not a file", place=self.path.name)
        return open(handle, "rb")
