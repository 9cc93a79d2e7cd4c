"""Streams of the emulated device. All work runs in order here. The emulator tracks which stream
would know of the work of another: a stream must wait for a tensor that another stream makes, and
the tensor's memory must be kept until its user is done with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.device.findings import Findings, Kind


class Stream:
    """A queue of work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.length = 0  # number of pieces of work so far
        # The length of another stream's work that is done before this stream's next work.
        self.known: dict[Stream, int] = {}

    def record_event(self, _: Any = None) -> "Event":
        return Event(self, self.length)

    def wait_event(self, event: "Event") -> None:
        if event.stream is not None:
            self.known[event.stream] = max(event.length, self.known.get(event.stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """A position in a stream. An event that was not recorded has no position."""

    def __init__(self, stream: Any = None, length: int = 0, **_: Any) -> None:
        self.stream = stream if isinstance(stream, Stream) else None
        self.length = length

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Streams:
    """The streams, and the current one."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.default = self.current = Stream()

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one; this replaces `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def made(self, storage: Any) -> None:
        """Mark a storage that the current stream has made."""
        if self.current is not self.default:
            self.current.length += 1
            storage.emulated_maker = (self.current, self.current.length)
            storage.emulated_users = {self.current}

    def written(self, storage: Any) -> None:
        """Mark a storage that the current stream has written."""
        self.current.length += 1
        storage.emulated_maker = (self.current, self.current.length)

    def kept_for(self, stream: Stream, storage: Any) -> None:
        """Mark a stream as a user of a storage; this replaces `Tensor.record_stream`."""
        if hasattr(storage, "emulated_users"):
            storage.emulated_users.add(stream)

    def used(self, storage: Any) -> None:
        """Check that the current stream may use a storage."""
        maker, length = getattr(storage, "emulated_maker", (self.current, 0))
        if maker is self.current:
            return
        if self.current.known.get(maker, 0) < length:
            self.findings.add(Kind.race, "what another stream makes is not waited for")
        if self.current not in getattr(storage, "emulated_users", {self.current}):
            self.findings.add(Kind.race, "memory of another stream is used without record_stream")
