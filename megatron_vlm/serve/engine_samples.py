"""Sampling with an engine, while the ranks run other calls.

journal -> EngineSampling, in the loop of the engines' thread -> engine -> EngineSampling -> journal
                                                                         \\-> `drawn`, for the ranks

A call goes to the engine as soon as it arrives, and joins the calls in progress. Complete answers
go from here to the journal. The ranks compute log-probs of prompts, most likely tokens, and
log-probs at other temperatures: such calls go to the service's loop with their answers.

Attempts of a call are not counted while the engine draws. The engine is a separate process, and if
the service dies meanwhile, these calls, which may be hundreds, are not at fault. They are still
pending afterwards, and the same seeds draw the same answers.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from pydantic import ValidationError

from megatron_vlm.data.tokens.completions import Pieces
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Adapter
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.serve.engine_admission import Admission
from megatron_vlm.serve.engine_weights import EngineWeights, SampleWeights
from megatron_vlm.serve.failures import ended_session, failure_of
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

SESSIONS = 10_000  # maximum number of sessions whose weights are remembered


class EngineSampling:
    """Engine sampling on rank 0. The service's loop calls `start`, `check` and `close` and reads
    `drawn` and `samples`; the rest runs in the engines' loop."""

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
        self.read = 0  # the number of the last call that was read from the journal
        self.tasks: dict[str, asyncio.Task[None]] = {}  # tasks of the calls in the engine
        self.finished: list[Finished] = []  # results on their way to the journal
        self.writing: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self.weights_of = lru_cache(SESSIONS)(self._read_weights)
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

    # -- any thread

    def _hear(self, completed: Sequence[CompletedCall]) -> None:
        """Handle a ring of the journal. Calls have results from here, from the ranks, or by
        cancellation."""
        ids = [each.request_id for each in completed if each.kind == SAMPLE]
        with suppress(RuntimeError):  # the loop has ended, so no task needs the notice
            self.engines.loop.call_soon_threadsafe(self._look_again, ids)

    # -- the engines' loop

    async def _run(self) -> None:
        self.news.set()
        while True:
            await self.news.wait()
            self.news.clear()
            for call, weights in await asyncio.to_thread(self._look):
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
            if ask.settings.json_schema is not None and isinstance(error, DataError):
                failure = Failure(f"response_format: {error}", "user")
            self._finish(call, failure)
            return
        ask = replace(ask, answers=tuple(answers))
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
                await asyncio.to_thread(self.journal.finish_all, batch)
        except Exception as error:
            self._record_break(error)
        finally:
            self.writing = None

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
