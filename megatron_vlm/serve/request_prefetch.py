"""Prefetch of requests: a thread reads them and decodes their pictures while the ranks compute."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_vlm.serve.failures import bare
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import SAMPLE, Call
from megatron_vlm.serve.requests_as_rows import Batch, NoRoomError, RowReader, read_batch
from megatron_vlm.serve.sample_calls import SampleAsk, SampleBounds, StopWords, read_ask

MAX_WAITING_PIXELS = 2**31  # maximum pixels of prefetched requests
MAX_PREFETCHED_CALLS = 256  # maximum number of prefetched calls
MAX_PREFETCH_BYTES = 256 * 2**20  # maximum bytes of their bodies
_READ = ("forward_backward", SAMPLE)  # kinds to prefetch; other requests are small


class RequestPrefetcher:
    """Parsed requests of calls, by request id. An error in a request is raised when it is taken."""

    def __init__(
        self,
        journal: Journal,
        reader: RowReader,
        stops: StopWords,
        bounds: SampleBounds,
        replicas: int,
        most_pixels: int = MAX_WAITING_PIXELS,
    ):
        self.journal, self.reader, self.stops = journal, reader, stops
        self.bounds, self.replicas, self.most_pixels = bounds, replicas, most_pixels
        self.pixels: dict[str, int] = {}  # {request id: pixels} of prefetched requests
        self.pool = ThreadPoolExecutor(1, "read")
        self.futures: dict[str, Future[Any]] = {}

    def begin(self, calls: Sequence[Call]) -> None:
        """Start to read the first of these calls, unless they are being read already."""
        if len(self.futures) > 2 * MAX_PREFETCHED_CALLS:  # some calls were cancelled meanwhile
            current = {call.request_id for call in calls}
            self._keep(lambda name, _: name in current)
        if not self.pixels:  # requests that were put off may have room now
            self._keep(lambda _, each: not (each.done() and _is_put_off(each)))
        size = 0
        for call in calls[:MAX_PREFETCHED_CALLS]:
            size += call.size
            if size > MAX_PREFETCH_BYTES:
                break
            # A call with attempts may have killed the process before: it is read in its own turn.
            ahead = call.kind in _READ and not call.attempts
            if ahead and call.request_id not in self.futures:
                self.futures[call.request_id] = self.pool.submit(self._read_ahead, call)

    def take(self, call: Call) -> Any:
        """Return the Batch or SampleAsk of a call, and forget it."""
        future = self.futures.get(call.request_id)
        # The call's turn has come, so it is read here and not behind the others.
        if future is not None and (future.cancel() or _is_put_off(future)):
            future = None
        self.drop(call)
        return self.read(call) if future is None else future.result()

    def look(self, call: Call) -> Any:
        """Return the Batch or SampleAsk of a call without forgetting it; None where it cannot be
        read, or has to wait for its turn."""
        future = self.futures.get(call.request_id)
        if future is None or future.cancel():
            future = _completed_future(lambda: self._read_ahead(call))
            self.futures[call.request_id] = future
        return None if future.exception() else future.result()

    def is_ready(self, call: Call) -> bool:
        """Return whether the reading has ended, so that `take` does not wait for other requests."""
        future = self.futures.get(call.request_id)
        return future is not None and future.done()

    def batch(self, call: Call) -> Batch:
        """Read the forward_backward of a call that runs again."""
        request = self.journal.forward_backward(call.request_id)
        return read_batch(request, self.reader, self.replicas)

    def drop(self, call: Call) -> None:
        """Forget a call that has ended."""
        self.futures.pop(call.request_id, None)
        self.pixels.pop(call.request_id, None)

    def _keep(self, is_needed: Callable[[str, "Future[Any]"], bool]) -> None:
        self.futures = {name: each for name, each in self.futures.items() if is_needed(name, each)}
        for name in self.pixels.keys() - self.futures.keys():
            self.pixels.pop(name, None)

    def close(self) -> None:
        """Stop reading."""
        self.pool.shutdown(cancel_futures=True)

    def put(self, call: Call, ask: SampleAsk) -> None:
        """Store the request of a sample that was read elsewhere."""
        if call.request_id not in self.futures:
            self.futures[call.request_id] = _completed_future(lambda: ask)

    def _read_ahead(self, call: Call) -> Batch | SampleAsk | None:
        """Read a request ahead, unless its pictures have to wait until other requests are done."""

        def room(pixels: int) -> None:
            if pixels and sum(list(self.pixels.values())) + pixels > self.most_pixels:
                raise NoRoomError(
                    "its pictures are read when its turn has come", place=call.request_id
                )
            if pixels:
                self.pixels[call.request_id] = pixels

        try:
            return self.read(call, room)
        except NoRoomError:
            return None

    def read(self, call: Call, room: Callable[[int], None] | None = None) -> Any:
        """Return the Batch or SampleAsk of a call. An error may be stored until the call's turn, so
        it is raised without its traceback, which would keep decoded pictures in memory."""
        reader = self.reader if room is None else self.reader.for_request(room)
        try:
            with self.journal.reads.record_attempt(call.request_id):
                return self._read_by(reader, call)
        except Exception as error:
            failure = bare(error)
        raise failure

    def _read_by(self, reader: RowReader, call: Call) -> Batch | SampleAsk:
        if call.kind == SAMPLE:
            body = self.journal.body(call.request_id)
            return read_ask(body, reader, self.stops, call.seed, self.bounds)
        return read_batch(self.journal.forward_backward(call.request_id), reader, self.replicas)


def _is_put_off(future: "Future[Any]") -> bool:
    return future.exception() is None and future.result() is None


def _completed_future(work: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
