"""Main loop of the service on rank 0. It takes calls from the journal, one turn after the other.

HTTP server (a thread)  ->  journal  ->  this loop  ->  commands to all ranks
                            journal  <-  results
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from megatron_vlm.config.schema import Config
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.distributed.rank0 import HEARTBEAT_S
from megatron_vlm.serve.call_batching import GATHER_S, CallBatcher
from megatron_vlm.serve.failures import (
    ENDS_SERVICE,
    REFUSALS,
    bare,
    catch_error,
    ended_session,
    failure_of,
)
from megatron_vlm.serve.fair_queue import PER_SWAP, FairQueue
from megatron_vlm.serve.full_disk import FullDisk
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    TRAINING,
    Call,
    Changes,
    Failure,
    Finished,
    Outcome,
    SamplingSession,
)
from megatron_vlm.serve.model_cache import LoadedModel, ModelCache
from megatron_vlm.serve.model_commands import ModelCommands
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.sample_calls import SampleAsk, at_temperature, complete
from megatron_vlm.serve.sample_turns import SampleTurns
from megatron_vlm.serve.status_line import ProgressLine
from megatron_vlm.serve.training_calls import ModelCalls
from megatron_vlm.serve.vllm_samples import EngineSampling

TIDY_S = 15.0
PREFETCHED_CALLS = 4  # calls per model that are read while other calls run


class Service:
    """Service loop on rank 0, which schedules the calls and writes their results."""

    def __init__(
        self,
        cfg: Config,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        engine_sampling: EngineSampling | None = None,
    ):
        """`engine_sampling` draws samples with an engine. Without it the ranks draw them."""
        self.engine_sampling, self.samples = engine_sampling, 0
        self.cfg, self.commands, self.journal, self.prefetcher = cfg, commands, journal, prefetcher
        self.model_cache = ModelCache(cfg.serve, commands, journal, self._redo)
        self.training = ModelCalls(commands, self.model_cache, journal)
        self.batcher = CallBatcher(
            cfg, commands.models.base.dims, prefetcher, self._tenant, self.model_cache.is_loaded
        )
        self.disk = FullDisk()
        self.sample_turns = SampleTurns(
            commands,
            journal,
            prefetcher,
            self._answer_each,
            self._finish,
            cfg.serve.sampling_seconds,
        )
        self.turns, self.progress = FairQueue(), ProgressLine()
        self.tenants: dict[str, str] = {}  # by sampling session, whose weights never change
        self.gauges = {"samples_total": 0.0}  # for /metrics
        self.tidy_at = 0.0

    def run(self) -> None:
        """Run until a signal raises Stopped."""
        while True:
            self.commands.wait()
            try:
                self._tidy_if_due()
                self._look_around()
            except sqlite3.Error as error:  # no call has started
                self.disk.wait(error)

    def _look_around(self) -> None:
        """Run a turn if calls are pending, and otherwise pause."""
        calls = self._next()
        self.progress.update(self.gauges, len(calls))
        self.prefetcher.begin(calls)
        ready = [call for call in calls if self._is_first(call, calls)]
        if not ready:
            self.journal.wait(HEARTBEAT_S / 2)
            return
        call = self.turns.next(ready, self._tenant, self._delay)
        if self.engine_sampling is None and self.batcher.expects_more(call, ready):
            self.journal.wait(GATHER_S)
            return
        self.turn(call, ready)

    def _tidy_if_due(self) -> None:
        """Free memory and disk space that no call needs, between turns, when nothing is written."""
        if time.monotonic() < self.tidy_at:
            return
        self.tidy_at = time.monotonic() + TIDY_S
        self.model_cache.delete_orphan_folders()
        with catch_error(  # the model stays in memory
            lambda error: print_to_user(
                f"a model that waits for its client could not be moved to disk: {bare(error)}"
            )
        ):
            self.model_cache.put_away_silent()

    def _next(self) -> Sequence[Call]:
        """Return the calls for the ranks. Where an engine draws the samples, only those that it
        leaves to the ranks are among them."""
        if self.engine_sampling is None:
            return self.journal.next_calls(PREFETCHED_CALLS)
        self.engine_sampling.check()
        self._count()
        drawn = list(self.engine_sampling.drawn.values())
        for call, ask in drawn:
            self.prefetcher.put(call, ask)
        return [
            *self.journal.next_calls(PREFETCHED_CALLS, samples=False),
            *(call for call, _ in drawn),
        ]

    def turn(self, call: Call, ready: Sequence[Call]) -> None:
        """Run a call, together with the calls that are best batched with it."""
        together = self.batcher.batch_with(call, ready)
        sizes = self.batcher.sizes(together)
        started = time.monotonic()
        together = self._do(together)
        seconds = time.monotonic() - started
        sizes |= self.sample_turns.sizes(together)
        self.progress.record_work(
            sum(not self.sample_turns.is_in_progress(each) for each in together), seconds
        )
        self._count()
        size = sum(sizes[each.request_id] for each in together)
        for member in together:
            share = seconds * sizes[member.request_id] / size
            if not self.sample_turns.is_in_progress(member):
                self.prefetcher.drop(member)
            self.turns.record_work(member, self._tenant(member), share)
            if member.changes_state:
                self._keep_if_due(member.owner, share)

    def _keep_if_due(self, model: str, seconds: float) -> None:
        """Save the model after enough unsaved work, so that a killed service repeats little."""
        resident = self.model_cache.models.get(model)
        if resident is None:
            return
        resident.unsaved_s += seconds
        if resident.unsaved_s > self.cfg.serve.save_seconds:

            def report(error: Exception) -> None:  # no client waits for this save
                resident.unsaved_s = 0.0
                print_to_user(
                    f"the state of {model} could not be saved, and the journal grows: {bare(error)}"
                )

            with catch_error(report):
                self.model_cache.keep(resident)

    def _do(self, together: Sequence[Call]) -> list[Call]:
        """Run the calls. Return those that have ended, with or without success, and the samples
        that have made progress."""
        try:
            # This happens before the calls are marked as started: a model may take long to load,
            # and a service that is stopped meanwhile does not show that a call is at fault.
            self._bring(together[0])
        except (*ENDS_SERVICE, sqlite3.Error):
            raise
        except Exception as error:
            self._fail(together, error)
            return list(together)
        started = set(self.journal.begin_calls(*(each.request_id for each in together)))
        together = [each for each in together if each.request_id in started]
        try:
            if together:
                together = self._run_calls(together)
        except BrokenError:
            raise  # the state of the other ranks is unknown: only a new process can go on
        except Stopped:
            with suppress(sqlite3.Error):
                self.journal.undo_attempts(*started)
            raise
        except Exception as error:  # it concerns these calls only: the service goes on
            if together[0].kind == SAMPLE and isinstance(error, sqlite3.Error):
                raise  # the samples go on once the disk has room
            if not isinstance(error, REFUSALS):  # the changes of the call are discarded
                for failed_call in together:
                    self.model_cache.forget(failed_call.owner)
            self._fail(together, error)
        return together

    def _run_calls(self, together: list[Call]) -> list[Call]:
        call = together[0]
        if call.kind == SAMPLE:
            return self._draw(together)
        if call.kind == "forward_backward":
            self._learn(together)
        else:
            outcome, changes = self._run_call(call)
            self._finish([Finished(call.request_id, outcome, changes)], together)
        return together

    def _finish(self, finished: Sequence[Finished], together: Sequence[Call]) -> None:
        """Write the results of these calls. Where the disk is full, wait for room, because the
        calls must not run twice."""
        while True:
            try:
                self.journal.finish_all(finished)
                return
            except sqlite3.Error as error:
                self.disk.wait(error)
            try:
                self.commands.wait()
            except Stopped:  # the journal does not have the results: the calls will run again
                for call in together:
                    self.model_cache.models.pop(call.owner, None)
                raise

    def _bring(self, call: Call) -> None:
        """Load the model or the weights of the call into memory."""
        if call.kind == SAMPLE:
            if (sampler := self.journal.sampler(call.owner)) is not None:
                self.model_cache.weights(sampler)
        elif call.kind in TRAINING:
            self.model_cache.model(call.owner)

    def _fail(self, together: Sequence[Call], error: Exception) -> None:
        failure = failure_of(bare(error))
        self._finish([Finished(each.request_id, failure) for each in together], together)

    def _run_call(self, call: Call) -> Any:
        if call.kind in ("optim_step", "load_weights"):
            self.sample_turns.move(call.owner, self._snapshot)
        method: Callable[..., Any] = getattr(self.training, call.kind)
        return method(call, self.journal.body(call.request_id))

    def _redo(self, resident: LoadedModel, call: Call) -> None:
        body, batch = self.journal.body(call.request_id), None
        if call.kind == "forward_backward":
            batch = self.prefetcher.batch(body)
        self.training.redo(resident, call, batch, body)

    # -- gradients

    def _learn(self, together: Sequence[Call]) -> None:
        read, finished = [], []
        for call in together:
            try:
                read.append((call, self.prefetcher.take(call)))
            except REFUSALS as error:
                finished.append(Finished(call.request_id, failure_of(error)))
        if read:
            finished += run_each(self.training.forward_backward, read)
        self._finish(finished, together)

    # -- samples

    def _draw(self, together: Sequence[Call]) -> list[Call]:
        """Draw samples with the same weights. Return the calls that were drawn or completed."""
        self.sample_turns.forget_lost()
        named: list[tuple[Call, str]] = []
        finished = []
        for call in together:
            sampler, weights = self.journal.sampler(call.owner), self.sample_turns.weights_of(call)
            if weights is None and sampler is None:
                finished.append(Finished(call.request_id, ended_session()))
            else:
                weights = weights or self.model_cache.weights(cast(SamplingSession, sampler))
                named.append((call, weights))
        self._finish(finished, together)
        if not named:
            return list(together)
        weights = named[0][1]
        calls = [call for call, name in named if name == weights]
        # Their sessions have the same weights under another name, because the model that these
        # weights were taken from has changed since.
        self.journal.undo_attempts(*(call.request_id for call, name in named if name != weights))
        if self.engine_sampling is not None:
            self._complete(weights, calls)
            return list(together)
        self.sample_turns.turn(
            weights, calls, partial(self._arriving_samples, self._tenant(calls[0]))
        )
        return [call for call, _ in self.sample_turns.used.values()]

    def _snapshot(self, call: Call) -> str | None:
        """Load a copy of the weights, for a sample that is drawn with the model's own, and return
        its name; None where the session has ended."""
        sampler = self.journal.sampler(call.owner)
        return None if sampler is None else self.model_cache.snapshot(sampler)

    def _arriving_samples(self, tenant: str) -> list[Call]:
        """Return the samples that may join those in progress."""
        calls = self.journal.next_calls(PREFETCHED_CALLS)
        self.prefetcher.begin(calls)
        samples = [call for call in calls if call.kind == SAMPLE and not call.attempts]
        return [call for call in samples if self._tenant(call) == tenant]

    def _complete(self, weights: str, calls: Sequence[Call]) -> None:
        """Complete samples that an engine has drawn."""
        requests = [(call, self.prefetcher.take(call)) for call in calls]

        def tempered(pairs: Sequence[tuple[Call, SampleAsk]]) -> list[tuple[Outcome, Changes]]:
            asks = at_temperature(self.commands, weights, [ask for _, ask in pairs])
            named = [(call, ask) for (call, _), ask in zip(pairs, asks, strict=True)]
            return self._answers(weights, named)

        self._finish(run_each(tempered, requests), calls)

    def _answer_each(self, weights: str, pairs: Sequence[tuple[Call, SampleAsk]]) -> list[Finished]:
        return run_each(partial(self._answers, weights), pairs)

    def _answers(
        self, weights: str, pairs: Sequence[tuple[Call, SampleAsk]]
    ) -> list[tuple[Outcome, Changes]]:
        answers = complete(self.commands, weights, [ask for _, ask in pairs])
        self.samples += sum(ask.n for _, ask in pairs)
        return [(Outcome(answer, "protobuf"), Changes()) for answer in answers]

    def _tenant(self, call: Call) -> str:
        """Return the name of the model that a call is for, or of the weights that it samples
        from."""
        if call.kind != SAMPLE:
            return call.owner
        if call.owner not in self.tenants:
            if len(self.tenants) > 10_000:
                self.tenants.clear()
            sampler = self.journal.sampler(call.owner)
            self.tenants[call.owner] = "gone" if sampler is None else f"{sampler.folder}"
        return self.tenants[call.owner]

    def _delay(self, call: Call) -> float:
        """Return the delay of a call in seconds. Models in memory have none, so that most of the
        time is not spent on swapping."""
        in_memory = call.kind not in (SAMPLE, *TRAINING) or self.model_cache.is_loaded(
            self._tenant(call)
        )
        return 0.0 if in_memory else PER_SWAP * self.model_cache.swap_s

    def _is_first(self, call: Call, calls: Sequence[Call]) -> bool:
        """Return whether no earlier call of the same model is pending; `calls` are in order."""
        if call.kind == SAMPLE:
            return True
        return next(each for each in calls if each.owner == call.owner) is call

    def close(self) -> None:
        """Save the models in memory. Pending calls run when the service starts again."""
        if self.engine_sampling is not None:
            self.engine_sampling.close()
        self.prefetcher.close()
        self.model_cache.keep_all()

    def _count(self) -> None:
        self.gauges["samples_total"] = float(self.samples)
        if self.engine_sampling is not None:
            self.gauges["samples_total"] += self.engine_sampling.samples
            self.gauges["samples_under_way"] = float(len(self.engine_sampling.admission.inside))
        self.gauges.update(self.training.gauges)
        self.gauges["models_in_memory"] = float(len(self.model_cache.models))
        self.gauges["snapshots_in_memory"] = float(len(self.model_cache.snapshots))


def run_each(
    do: Callable[[Sequence[tuple[Call, Any]]], list[tuple[Outcome, Changes]]],
    calls: Sequence[tuple[Call, Any]],
) -> list[Finished]:
    """Run calls together, each with its request, and return their results. Where one of several
    calls fails, run each alone."""
    failures: list[Failure] = []
    with catch_error(lambda error: failures.append(failure_of(bare(error)))):
        results = do(calls)
    if not failures:
        pairs = zip(calls, results, strict=True)
        return [
            Finished(call.request_id, *outcome_and_changes)
            for (call, _), outcome_and_changes in pairs
        ]
    if len(calls) == 1:
        return [Finished(calls[0][0].request_id, failures[0])]
    return [finished for each in calls for finished in run_each(do, [each])]
