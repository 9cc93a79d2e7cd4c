"""The streams of the emulated device. All work is done in order here; what is followed is which
stream would know of which: a tensor that one stream makes and another uses must be waited for, and
its memory kept until that other is through with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.device.findings import Findings, Kind


class Stream:
    """A queue of work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.length = 0  # of its work so far
        self.known: dict[Stream, int] = {}  # how much of another's is done before what comes next

    def record_event(self, _: Any = None) -> "Event":
        return Event(self, self.length)

    def wait_event(self, event: "Event") -> None:
        if event.stream is not None:
            self.known[event.stream] = max(event.length, self.known.get(event.stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """How far a stream has to be; one that was not recorded is no place at all."""

    def __init__(self, stream: Any = None, length: int = 0, **_: Any) -> None:
        self.stream = stream if isinstance(stream, Stream) else None
        self.length = length

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Streams:
    """All streams, and the one that work is given to."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.default = self.current = Stream()

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """In place of `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def made(self, storage: Any) -> None:
        """Of what the current stream has made."""
        if self.current is not self.default:
            self.current.length += 1
            storage.emulated_maker = (self.current, self.current.length)
            storage.emulated_users = {self.current}

    def kept_for(self, stream: Stream, storage: Any) -> None:
        """In place of `Tensor.record_stream`."""
        if hasattr(storage, "emulated_users"):
            storage.emulated_users.add(stream)

    def used(self, storage: Any) -> None:
        """By the current stream."""
        maker, length = getattr(storage, "emulated_maker", (self.current, 0))
        if maker is self.current:
            return
        if self.current.known.get(maker, 0) < length:
            self.findings.add(Kind.race, "what another stream makes is not waited for")
        if self.current not in storage.emulated_users:
            self.findings.add(Kind.race, "memory of another stream is used without record_stream")
