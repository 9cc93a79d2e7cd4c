"""Requests that are being read, which may end the process."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Reads:
    """The folder RUN/reading, with a file for each call that is being read."""

    def __init__(self, run: Path):
        self.folder = run / "reading"

    def interrupted_calls(self) -> list[str]:
        """Return the calls that were being read when the previous process died."""
        return sorted(path.name for path in self.folder.glob("*"))

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
