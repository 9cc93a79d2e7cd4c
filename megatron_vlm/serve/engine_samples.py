r"""Sampling with an engine, while the ranks run other calls.

journal -> EngineSampling, in the loop of the engines' thread -> engine -> EngineSampling -> journal
                                                                         \-> `drawn`, for the ranks

A call goes to the engine as soon as it arrives, and joins the calls in progress. Complete answers
go from here to the journal. The ranks compute log-probs of prompts, most likely tokens, and
log-probs at other temperatures: such calls go to the service's loop with their answers.

Attempts of a call are not counted while the engine draws. The engine is a separate process, and if
the service dies meanwhile, these calls, which may be hundreds, are not at fault. They are still
pending afterwards, and the same seeds draw the same answers.
"""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megatron_vlm.data.tokens.completions import Pieces
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Adapter, Capacity
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.serve.call_scheduler import PER_SWAP, FairQueue
from megatron_vlm.serve.engine_weights import EngineWeights, SampleWeights
from megatron_vlm.serve.failures import FullDisk, ended_session, failure_of
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    Call,
    CompletedCall,
    Failure,
    Finished,
    Outcome,
)
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.sample_calls import SampleAsk, answers_to_bytes

MAX_ADMITTED_BYTES = 256 * 2**20  # maximum bytes of their bodies; a single call may have more
ENTRY_S = 1e-3  # seconds that a call counts at its start, so that keys take turns

T = TypeVar("T")
Asked = tuple[Call, SampleWeights]
Queue = tuple[str, SampleWeights]  # a key, and the weights that its calls need


@dataclass
class InFlight:
    """Call in progress."""

    call: Call
    wanted: SampleWeights
    since: float  # time up to which its share of the engine's time is counted


class Admission:
    """Counter of the calls in progress and of the engine's time for each key and its weights."""

    def __init__(self, capacity: Capacity, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.clock = capacity, clock
        self.turns = FairQueue(clock)
        self.wants: dict[str, SampleWeights] = {}  # {request id: weights} of waiting calls
        self.queues: dict[Queue, dict[str, Call]] = {}  # waiting calls, in their order
        self.inside: dict[str, InFlight] = {}
        self.closed = False

    def wait(self, call: Call, weights: SampleWeights) -> None:
        """Add a call to the queue. Calls must be added in their order."""
        self.wants[call.request_id] = weights
        self.queues.setdefault((call.key, weights), {})[call.request_id] = call

    def forget(self, request_id: str) -> None:
        """Remove a call from the queue, if it is there."""
        if (weights := self.wants.pop(request_id, None)) is None:
            return
        for queue in [(key, other) for key, other in self.queues if other == weights]:
            self.queues[queue].pop(request_id, None)
            if not self.queues[queue]:
                del self.queues[queue]

    def all_of(self, weights: SampleWeights) -> list[Call]:
        """Return the calls that wait for these weights."""
        queues = [calls for (_, other), calls in self.queues.items() if other == weights]
        return [call for calls in queues for call in calls.values()]

    def next(self, whole: Path | None, swap_s: float) -> Asked | None:
        """Return the call whose turn it is, if it fits with the calls in progress. A call that
        needs other full weights than `whole`, the engine's current ones, is returned only when no
        call is in progress. `swap_s`: seconds that a change of the full weights takes."""
        if not self.queues or self.closed:
            return None

        def delay(call: Call) -> float:
            return 0.0 if self.wants[call.request_id].whole == whole else PER_SWAP * swap_s

        def tenant(call: Call) -> str:
            return f"{self.wants[call.request_id]}"

        heads = [next(iter(queue.values())) for queue in self.queues.values()]
        call = self.turns.next(heads, tenant, delay)
        weights = self.wants[call.request_id]
        return (call, weights) if self._has_room(call, weights, whole) else None

    def enter(self, call: Call, weights: SampleWeights) -> None:
        """Move a call from the queue to the calls in progress."""
        self.forget(call.request_id)
        self.inside[call.request_id] = InFlight(call, weights, self.clock())
        self.turns.record_work(call, f"{weights}", ENTRY_S)

    def leave(self, call: Call) -> None:
        """Remove a call from the calls in progress."""
        self._charge(self.inside[call.request_id], self.clock())
        del self.inside[call.request_id]

    def _has_room(self, call: Call, weights: SampleWeights, whole: Path | None) -> bool:
        if not self.inside:
            return True
        calls, adapters = len(self.inside) + 1, {weights.adapter}
        size = call.size
        for flight in self.inside.values():
            adapters.add(flight.wanted.adapter)
            size += flight.call.size
        return (
            weights.whole == whole
            and calls <= self.capacity.samples
            and size <= MAX_ADMITTED_BYTES
            and len(adapters - {None}) <= self.capacity.adapters
        )

    def count(self) -> None:
        """Charge the engine's time until now to the calls in progress."""
        now = self.clock()
        for flight in self.inside.values():
            self._charge(flight, now)

    def _charge(self, one: InFlight, now: float) -> None:
        """Charge a call its share, which all calls have, of the time since the last charge."""
        self.turns.record_work(one.call, f"{one.wanted}", (now - one.since) / len(self.inside))
        one.since = now


SESSIONS = 10_000  # maximum number of sessions whose weights are remembered


class EngineSampling:
    """Engine sampling on rank 0. The service's loop calls the methods without an underscore and
    reads `samples`; the rest runs in the engines' loop."""

    def __init__(
        self, engines: EngineThread, journal: Journal, prefetcher: RequestPrefetcher, base: str
    ):
        """`base`: folder of the base model, with which the engine has started."""
        self.engines, self.journal, self.prefetcher = engines, journal, prefetcher
        self.weights = EngineWeights(engines, base, journal.run)
        self.admission = Admission(engines.engine.capacity)
        self.drawn: dict[str, tuple[Call, SampleAsk]] = {}  # calls with answers
        self.hear: Callable[[Call, Pieces], None] = lambda call, pieces: None  # streamed tokens
        self.samples = 0  # number of samples in calls that were finished here
        self.accepted = Counter[int]()  # rounds of these samples by the drafts that they accepted
        self.read = 0  # the number of the last call that was read from the journal
        self.tasks: dict[str, asyncio.Task[None]] = {}  # tasks of the calls in the engine
        self.finished: list[Finished] = []  # results on their way to the journal
        self.writing: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self.weights_of = lru_cache(SESSIONS)(self._read_weights)
        self.disk = FullDisk()
        self.broken: BaseException | None = None
        self.last_failure: Failure | None = None
        self.news = asyncio.Event()
        self.running: Any = None

    # -- the service's thread

    def start(self) -> None:
        """Start to draw the pending samples."""
        self.running = self.engines.submit(self._run())
        self.journal.listen(self._hear)

    def check(self) -> None:
        """Raise the error that has stopped the sampling, since the service would wait forever."""
        if self.broken is not None:
            raise self.broken
        if self.running.done():
            self.running.result()

    def close(self) -> None:
        """Stop sampling. Unfinished samples are drawn again when the service starts again."""
        self.running.cancel()
        self.engines.submit(self._end()).result()

    def next_calls(self, ahead: int) -> list[Call]:
        """Return the calls for the ranks: see Journal.next_calls. Of the samples, these are the
        ones that the ranks must complete."""
        drawn = list(self.drawn.values())
        for call, ask in drawn:
            self.prefetcher.put(call, ask)
        calls = self.journal.next_calls(ahead, samples=False)
        return [*calls, *(call for call, _ in drawn)]

    @property
    def left(self) -> int:
        """Number of calls in progress."""
        return len(self.admission.inside)

    # -- any thread

    def _hear(self, completed: Sequence[CompletedCall]) -> None:
        """Handle a ring of the journal. Calls have results from here, from the ranks, or by
        cancellation."""
        ids = [each.request_id for each in completed if each.kind == SAMPLE]
        for request_id in ids:  # at once: the ranks may ask for the next calls
            self.drawn.pop(request_id, None)
        with suppress(RuntimeError):  # the loop has ended, so no task needs the notice
            self.engines.loop.call_soon_threadsafe(self._look_again, ids)

    # -- the engines' loop

    async def _run(self) -> None:
        self.news.set()
        while True:
            await self.news.wait()
            self.news.clear()
            for call, weights in await self._of_journal(self._look):
                if weights is None:
                    self._finish(call, ended_session())
                else:
                    self.admission.wait(call, weights)
            self._begin()

    def _look(self) -> list[tuple[Call, SampleWeights | None]]:
        """Return the samples that have arrived since the last call, and their weights."""
        calls = self.journal.samples(self.read)
        self.read = max([self.read, *(call.number for call in calls)])
        return [(call, self.weights_of(call.owner)) for call in calls]

    def _read_weights(self, owner: str) -> SampleWeights | None:
        sampler = self.journal.sampler(owner)
        return None if sampler is None else SampleWeights.from_sampler(sampler)

    def _begin(self) -> None:
        """Start as many calls as the engine has room for."""
        self.admission.count()
        while self.switching is None:
            admitted = self.admission.next(self.weights.whole, self.weights.swap_s)
            if admitted is None:
                return
            call, weights = admitted
            if weights.whole != self.weights.whole:
                self.switching = asyncio.create_task(self._switch(weights))
                self.switching.add_done_callback(self._end_switch)
                return
            self.admission.enter(call, weights)
            task = asyncio.create_task(self._draw(call, weights))
            self.tasks[call.request_id] = task
            task.add_done_callback(partial(self._end_task, call))

    async def _draw(self, call: Call, weights: SampleWeights) -> None:
        try:
            ask: SampleAsk = await asyncio.to_thread(self.prefetcher.read, call)
        except (MegatronVLMError, ValidationError) as error:
            self._finish(call, failure_of(error))
            return
        ask = replace(ask, settings=replace(ask.settings, tempered=False))
        try:
            adapter = None
            if weights.adapter is not None:
                adapter = Adapter(await self.weights.folder(weights.adapter, True))
            seeds = range(ask.seed, ask.seed + ask.n)
            hear = partial(self.hear, call) if ask.streamed else None
            drawing = ask.prompt, ask.settings, seeds, adapter, hear
            answers = await self.engines.engine.sample(*drawing)
        except Exception as error:  # also if the engine has failed for good: the service goes on
            failure = self._failure(error)
            asked = ask.settings
            is_asked = asked.grammar is not None or asked.min_p or asked.logit_bias
            if is_asked and isinstance(error, DataError):
                failure = Failure(str(error), "user")
            self._finish(call, failure)
            return
        ask = replace(ask, answers=tuple(answers))
        for answer in answers:
            self.accepted.update(dict(enumerate(answer.accepted)))
        if ask.needs_ranks:
            self.drawn[call.request_id] = call, ask
            self.journal.ring()
            return
        self.samples += ask.n
        self._finish(call, Outcome(answers_to_bytes(ask), "protobuf"))

    async def _switch(self, weights: SampleWeights) -> None:
        """Give the engine other full weights. No call is in progress."""
        try:
            await self.weights.switch(weights.whole)
        except Exception as error:
            failure = self._failure(error)
            for call in self.admission.all_of(weights):
                self.admission.forget(call.request_id)
                self._finish(call, failure)

    def _end_switch(self, task: "asyncio.Task[None]") -> None:
        self.switching = None
        if not task.cancelled():
            self._begin()

    def _end_task(self, call: Call, task: "asyncio.Task[None]") -> None:
        del self.tasks[call.request_id]
        self.admission.leave(call)
        if not task.cancelled() and (error := task.exception()) is not None:
            record = self.journal.result(call.request_id)
            # A call without a result was not cancelled, so the error is this program's.
            if record is not None and record.outcome is None:
                self._record_break(error)
        self._begin()

    def _record_break(self, error: BaseException) -> None:
        self.broken = error
        self.journal.ring()

    def _failure(self, error: Exception) -> Failure:
        """Return the failure of an error, and print it unless it repeats the last one: all samples
        fail alike once the engine has failed for good. It counts as the server's, because the
        client's request was checked before."""
        expected = isinstance(error, MegatronVLMError)
        failure = Failure(str(error) if expected else f"{type(error).__name__}: {error}", "server")
        if failure != self.last_failure:
            print_to_user(f"samples have failed: {failure.text}")
            self.last_failure = failure
        return failure

    def _finish(self, call: Call, outcome: Outcome | Failure) -> None:
        """Queue a result for the journal. Those that arrive during a write are written together."""
        self.finished.append(Finished(call.request_id, outcome))
        if self.writing is None:
            self.writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self.finished:
                batch, self.finished = self.finished, []
                await self._of_journal(self.journal.finish_all, batch)
        except Exception as error:
            self._record_break(error)
        finally:
            self.writing = None

    async def _of_journal(self, work: Callable[..., T], *args: Any) -> T:
        """Do the journal's work in a thread. If the disk is full, wait: no sample may be lost."""
        while True:
            try:
                return await asyncio.to_thread(work, *args)
            except sqlite3.Error as error:
                if self.admission.closed:  # the next service draws it again
                    raise
                await asyncio.to_thread(self.disk.wait, error)

    def _look_again(self, completed: Sequence[str]) -> None:
        """Drop the calls that have results, and look for new ones."""
        self.news.set()
        for request_id in completed:
            self.drawn.pop(request_id, None)
            self.admission.forget(request_id)
            if (task := self.tasks.get(request_id)) is not None:
                task.cancel()

    async def _end(self) -> None:
        self.admission.closed = True
        if self.writing is not None:
            await self.writing
        tasks = [task for task in (*self.tasks.values(), self.switching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
