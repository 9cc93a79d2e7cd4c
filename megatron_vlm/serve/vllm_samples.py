"""Samples by an engine beside the trainer, while the ranks do other calls.

journal -> EngineSampling, in the loop of the engines' thread -> vLLM -> EngineSampling -> journal
                                                                       \\-> `drawn`, for the ranks

A call is asked of the engine as soon as it has come, and joins those that are under way. Where its
answers lack nothing they go to the journal from here. Log-probs of prompts, likeliest tokens and
those at other temperatures are the ranks' to say: such calls come to the service's loop with their
answers.

No attempt of a call is counted while the engine draws: it is a process of its own, and if the
service dies meanwhile, none of these calls is to blame, of which there may be hundreds. They are
still to be done then, and the same seeds draw the same answers.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from megatron_vlm.distributed.process import say
from megatron_vlm.engines.engine_thread import Engines
from megatron_vlm.engines.sampler import Adapter
from megatron_vlm.errors import MegatronVLMError
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
from megatron_vlm.serve.sample_calls import SampleAsk, written
from megatron_vlm.serve.vllm_admission import Admission
from megatron_vlm.serve.vllm_weights import EngineWeights, SampleWeights

LEAST_TEMPERATURE = 0.01  # above 0: with less, vLLM draws as with this
SESSIONS = 10_000  # of which it is remembered what they sample from


class EngineSampling:
    """On rank 0. The service's loop calls `start`, `check` and `close` and reads `drawn` and
    `samples`; the rest runs in the engines' loop."""

    def __init__(
        self, engines: Engines, journal: Journal, readings: RequestPrefetcher, adapters: int
    ):
        """`adapters`: how many different ones the engine draws with at a time."""
        self.engines, self.journal, self.readings = engines, journal, readings
        self.weights = EngineWeights(engines, journal.run)
        self.admission = Admission(adapters, len(engines.sampler.replicas))
        self.drawn: dict[str, tuple[Call, SampleAsk]] = {}  # with answers
        self.samples = 0  # of calls that were finished from here
        self.read = 0  # the number of the last call that was read from the journal
        self.tasks: dict[str, asyncio.Task[None]] = {}  # of calls that the engine is asked
        self.finished: list[Finished] = []  # results on their way to the journal
        self.writing: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self.sessions: dict[str, SampleWeights | None] = {}
        self.broken: BaseException | None = None
        self.said: Failure | None = None
        self.news = asyncio.Event()
        self.running: Any = None

    # -- the service's thread

    def start(self) -> None:
        """Begin with what waits."""
        self.running = self.engines.submit(self._run())
        self.journal.when_rung(lambda: self._tell(self.news.set))
        self.journal.listen(self._hear)

    def check(self) -> None:
        """Raise what has gone wrong here: the service would wait for ever."""
        if self.broken is not None:
            raise self.broken
        if self.running.done():
            self.running.result()

    def close(self) -> None:
        """What is under way is left, to be drawn again when the service starts again."""
        self.running.cancel()
        self.engines.submit(self._end()).result()

    # -- any thread

    def _hear(self, kept: Sequence[CompletedCall]) -> None:
        """Calls have results: from here, from the ranks, or since they were cancelled."""
        ids = [each.request_id for each in kept if each.kind == SAMPLE]
        if ids:
            self._tell(self._over, ids)

    def _tell(self, what: Any, *values: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever would listen
            self.engines.loop.call_soon_threadsafe(what, *values)

    # -- the engines' loop

    async def _run(self) -> None:
        self.news.set()
        while True:
            await self.news.wait()
            self.news.clear()
            for call, wanted in await asyncio.to_thread(self._look):
                if wanted is None:
                    self._finish(call, ended_session())
                else:
                    self.admission.wait(call, wanted)
            self._begin()

    def _look(self) -> list[tuple[Call, SampleWeights | None]]:
        """Samples that came since the last look, and what they are drawn with."""
        calls = self.journal.samples(self.read)
        self.read = max([self.read, *(call.number for call in calls)])
        if len(self.sessions) > SESSIONS:
            self.sessions.clear()
        for owner in {call.owner for call in calls} - self.sessions.keys():
            sampler = self.journal.sampler(owner)
            self.sessions[owner] = None if sampler is None else SampleWeights.of(sampler)
        return [(call, self.sessions[call.owner]) for call in calls]

    def _begin(self) -> None:
        """Ask of the engine what it has room for."""
        self.admission.count()
        while self.switching is None:
            asked = self.admission.next(self.weights.whole, self.weights.swap_s)
            if asked is None:
                return
            call, wanted = asked
            if wanted.whole != self.weights.whole:
                self.switching = asyncio.create_task(self._switch(wanted))
                self.switching.add_done_callback(self._switched)
                return
            self.admission.enter(call, wanted)
            task = asyncio.create_task(self._draw(call, wanted))
            self.tasks[call.request_id] = task
            task.add_done_callback(partial(self._left, call))

    async def _draw(self, call: Call, wanted: SampleWeights) -> None:
        try:
            ask = await asyncio.to_thread(self.readings.sample, call)
        except (MegatronVLMError, ValidationError) as error:
            self._finish(call, failure_of(error))
            return
        try:
            adapter = None
            if wanted.adapter is not None:
                adapter = Adapter(await self.weights.folder(wanted.adapter, True))
            seeds = range(ask.seed, ask.seed + ask.n)
            sampler = self.engines.sampler
            answers = await sampler.sample(ask.prompt, ask.settings, seeds, adapter)
        except Exception as error:  # also of an engine that was given up: the service goes on
            self._finish(call, self._failure(error))
            return
        ask = replace(ask, answers=tuple(answers))
        if ask.needs_ranks:
            self.drawn[call.request_id] = call, ask
            self.journal.ring()
            return
        self.samples += ask.n
        self._finish(call, Outcome(written(ask), "protobuf"))

    async def _switch(self, wanted: SampleWeights) -> None:
        """Give the engine other whole weights; nothing is under way."""
        try:
            await self.weights.switch(wanted.whole)
        except Exception as error:
            failure = self._failure(error)
            for call in self.admission.all_of(wanted):
                self.admission.forget(call.request_id)
                self._finish(call, failure)

    def _switched(self, task: "asyncio.Task[None]") -> None:
        self.switching = None
        if not task.cancelled():
            self._begin()

    def _left(self, call: Call, task: "asyncio.Task[None]") -> None:
        del self.tasks[call.request_id]
        self.admission.leave(call)
        if not task.cancelled() and (error := task.exception()) is not None:
            found = self.journal.result(call.request_id)
            if found is not None and found.outcome is None:  # else it was cancelled meanwhile
                self._broke(error)
        self._begin()

    def _broke(self, error: BaseException) -> None:
        self.broken = error
        self.journal.ring()

    def _failure(self, error: Exception) -> Failure:
        """None of it is the client's mistake: what it may ask for was checked before."""
        known = isinstance(error, MegatronVLMError)
        failure = Failure(str(error) if known else f"{type(error).__name__}: {error}", "server")
        if failure != self.said:  # of an engine that was given up all samples fail alike
            say(f"samples have failed: {failure.text}")
            self.said = failure
        return failure

    def _finish(self, call: Call, outcome: Outcome | Failure) -> None:
        """Those that come while others are written go to the disk together."""
        self.finished.append(Finished(call.request_id, outcome))
        if self.writing is None:
            self.writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self.finished:
                some, self.finished = self.finished, []
                await asyncio.to_thread(self.journal.finish_all, some)
        except Exception as error:
            self._broke(error)
        finally:
            self.writing = None

    def _over(self, ids: Sequence[str]) -> None:
        """They have results, so there is nothing to do for them any longer."""
        for request_id in ids:
            self.drawn.pop(request_id, None)
            self.admission.forget(request_id)
            if (task := self.tasks.get(request_id)) is not None:
                task.cancel()

    async def _end(self) -> None:
        self.admission.close()
        if self.writing is not None:
            await self.writing
        left = [task for task in (*self.tasks.values(), self.switching) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
