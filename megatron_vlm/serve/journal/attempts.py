"""Attempts to read a call, recorded as empty files, because rows in the journal would cost a
transaction each. If a call crashes the process while it is being read, that counts as an
attempt."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "reading"


class Reads:
    """The folder RUN/reading."""

    def __init__(self, run: Path):
        self.folder = run / FOLDER

    def interrupted_calls(self) -> list[str]:
        """Return the calls that were being read when the previous process died."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir())

    def forget(self) -> None:
        """Remove all records."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def record_attempt(self, request_id: str) -> Iterator[None]:
        """Record that this call is being read. A full disk does not prevent the reading."""
        path = self.folder / request_id
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
