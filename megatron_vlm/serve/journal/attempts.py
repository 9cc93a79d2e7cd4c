"""Which calls are being read, in files without content: rows of the journal would cost a
transaction for each. A process that dies of what it reads has made an attempt."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "reading"


class Reads:
    """RUN/reading."""

    def __init__(self, run: Path):
        self.folder = run / FOLDER

    def left(self) -> list[str]:
        """The calls that were being read when the process before this one died."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir())

    def forget(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """While this one is read. A disk that is full is no reason not to."""
        path = self.folder / request_id
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
