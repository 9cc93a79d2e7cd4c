"""Requests are read, and their pictures decoded, beside the work of the ranks."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_vlm.serve.failures import bare
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import SAMPLE, Call
from megatron_vlm.serve.requests_as_rows import Batch, NoRoomError, RowReader, read_batch
from megatron_vlm.serve.sample_calls import SampleAsk, SampleBounds, StopWords, read_ask

MOST_WAITING = 2**31  # pixels of requests that were read and wait
MOST_CALLS = 256  # that are read ahead
MOST_BYTES = 256 * 2**20  # of their bodies
_READ = ("forward_backward", SAMPLE)  # the others are small


class RequestPrefetcher:
    """What calls ask for, by their request. An error of a request is raised where it is taken."""

    def __init__(
        self,
        journal: Journal,
        reader: RowReader,
        stops: StopWords,
        bounds: SampleBounds,
        replicas: int,
        most_pixels: int = MOST_WAITING,
    ):
        self.journal, self.reader, self.stops = journal, reader, stops
        self.bounds, self.replicas, self.most_pixels = bounds, replicas, most_pixels
        self.pixels: dict[str, int] = {}  # of requests that were read and wait
        self.pool = ThreadPoolExecutor(1, "read")
        self.futures: dict[str, Future[Any]] = {}

    def begin(self, calls: Sequence[Call]) -> None:
        """Read the first of these, unless that was begun before."""
        if len(self.futures) > 2 * MOST_CALLS:  # some were cancelled meanwhile
            there = {call.request_id for call in calls}
            self._keep(lambda name, _: name in there)
        if not self.pixels:  # what had no room may have some now
            self._keep(lambda _, each: not (each.done() and _is_put_off(each)))
        size = 0
        for call in calls[:MOST_CALLS]:
            size += call.size
            if size > MOST_BYTES:
                break
            # One with attempts may be what the process died of: it is read in its own turn.
            ahead = call.kind in _READ and not call.attempts
            if ahead and call.request_id not in self.futures:
                self.futures[call.request_id] = self.pool.submit(self._ahead, call)

    def take(self, call: Call) -> Any:
        """A Batch or a SampleAsk, which is not kept."""
        future = self._wanted(call)
        self.drop(call)
        return future.result()

    def look(self, call: Call) -> Any:
        """The same, which is kept; None where it cannot be read, or has to wait for its turn."""
        future = self.futures.get(call.request_id)
        if future is None or future.cancel():
            future = self.futures[call.request_id] = _settled(lambda: self._ahead(call))
        return None if future.exception() else future.result()

    def is_ready(self, call: Call) -> bool:
        """Whether nobody has to wait for it."""
        future = self.futures.get(call.request_id)
        return future is not None and future.done()

    def batch(self, body: bytes) -> Batch:
        """A forward_backward that was done before."""
        return read_batch(body, self.reader, self.replicas)

    def drop(self, call: Call) -> None:
        """It is done."""
        self.futures.pop(call.request_id, None)
        self.pixels.pop(call.request_id, None)

    def _keep(self, wanted: Callable[[str, "Future[Any]"], bool]) -> None:
        self.futures = {name: each for name, each in self.futures.items() if wanted(name, each)}
        for name in self.pixels.keys() - self.futures.keys():
            self.pixels.pop(name, None)

    def close(self) -> None:
        """Read nothing more."""
        self.pool.shutdown(cancel_futures=True)

    def _wanted(self, call: Call) -> "Future[Any]":
        future = self.futures.get(call.request_id)
        # Its turn has come: it does not wait for others.
        if future is None or future.cancel() or _is_put_off(future):
            future = self.futures[call.request_id] = _settled(lambda: self._read(call))
        return future

    def sample(self, call: Call) -> SampleAsk:
        """What a sample asks for, read here and now; in any thread."""
        ask = self._read(call)
        assert isinstance(ask, SampleAsk)
        return ask

    def put(self, call: Call, ask: SampleAsk) -> None:
        """What a sample asks for was read elsewhere."""
        if call.request_id not in self.futures:
            self.futures[call.request_id] = _settled(lambda: ask)

    def _ahead(self, call: Call) -> Batch | SampleAsk | None:
        """What it asks for; None where its pictures have to wait until others are done."""

        def room(pixels: int) -> None:
            if pixels and sum(list(self.pixels.values())) + pixels > self.most_pixels:
                raise NoRoomError(
                    "its pictures are read when its turn has come", place=call.request_id
                )
            if pixels:
                self.pixels[call.request_id] = pixels

        try:
            return self._read(call, room)
        except NoRoomError:
            return None

    def _read(self, call: Call, room: Callable[[int], None] | None = None) -> Batch | SampleAsk:
        """An error may wait long for its turn: it keeps nothing of what was decoded."""
        reader = self.reader if room is None else self.reader.within(room)
        try:
            with self.journal.reads.of(call.request_id):
                return self._read_by(reader, call)
        except Exception as error:
            failure = bare(error)
        raise failure

    def _read_by(self, reader: RowReader, call: Call) -> Batch | SampleAsk:
        body = self.journal.body(call.request_id)
        if call.kind == SAMPLE:
            return read_ask(body, reader, self.stops, call.seed, self.bounds)
        return read_batch(body, reader, self.replicas)


def _is_put_off(future: "Future[Any]") -> bool:
    return future.exception() is None and future.result() is None


def _settled(work: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
