"""Main loop of the service on rank 0, and its status line. It takes calls from the journal, one
turn after the other, and runs them on all ranks.

HTTP server (a thread)  ->  journal  ->  this loop  ->  commands to all ranks
                            journal  <-  results
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from megatron_vlm.config.schema import Config, ServeConfig
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.serve.call_scheduler import CallScheduler
from megatron_vlm.serve.engine_samples import EngineSampling
from megatron_vlm.serve.failures import (
    ENDS_SERVICE,
    REFUSALS,
    FullDisk,
    bare,
    catch_error,
    ended_session,
    failure_of,
)
from megatron_vlm.serve.http.schemas import CALL_FORMS
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    SAMPLE,
    TRAINING,
    Call,
    Changes,
    Done,
    Failure,
    Finished,
    Outcome,
    SamplingSession,
)
from megatron_vlm.serve.model_cache import LoadedModel, ModelCache
from megatron_vlm.serve.model_calls import ModelCalls
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.sample_calls import SampleAsk, complete
from megatron_vlm.serve.sample_turns import Arriving, SampleTurns
from megatron_vlm.serve.served_models import ModelCommands


class CallRunner:
    """Runner of calls."""

    def __init__(
        self,
        serve: ServeConfig,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        disk: FullDisk,
    ):
        self.commands, self.journal, self.prefetcher = commands, journal, prefetcher
        self.disk = disk
        self.model_cache = ModelCache(serve, commands, journal, self._redo)
        self.model_calls = ModelCalls(commands, self.model_cache, journal)
        self.sample_turns = SampleTurns(
            commands, journal, prefetcher, self._answer_each, self._finish, serve.sampling_seconds
        )

    def run(self, together: Sequence[Call], arriving: Arriving) -> list[Call]:
        """Run the calls. Return those that have ended, with or without success, and the samples
        that have made progress. `arriving` returns the samples that may join them."""
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
                together = self._run_calls(together, arriving)
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

    def _run_calls(self, together: list[Call], arriving: Arriving) -> list[Call]:
        call = together[0]
        if call.kind == SAMPLE:
            return self._draw(together, arriving)
        if call.kind == "forward_backward":
            self._learn(together)
        else:
            if call.kind in ("optim_step", "load_weights"):
                self.sample_turns.move(call.owner, self._snapshot)
            method: Callable[..., Done] = getattr(self.model_calls, call.kind)
            outcome, changes = method(call, self._form(call))
            self._finish([Finished(call.request_id, outcome, changes)], together)
        return together

    def _form(self, call: Call) -> Any:
        form_class, _ = CALL_FORMS[call.kind]
        return form_class.model_validate_json(self.journal.body(call.request_id))

    def _bring(self, call: Call) -> None:
        """Load the model or the weights of the call into memory."""
        if call.kind == SAMPLE:
            if (sampler := self.journal.sampler(call.owner)) is not None:
                self.model_cache.weights(sampler)
        elif call.kind in TRAINING:
            self.model_cache.model(call.owner)

    def _redo(self, loaded: LoadedModel, call: Call) -> None:
        if call.kind == "forward_backward":
            self.model_calls.redo(loaded, call, self.prefetcher.batch(call))
        elif call.kind == "optim_step":
            self.model_calls.redo(loaded, call, self._form(call))

    def _finish(self, finished: Sequence[Finished], together: Sequence[Call]) -> None:
        """Write the results of these calls. If the disk is full, wait: no call may run twice."""
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

    def _fail(self, together: Sequence[Call], error: Exception) -> None:
        failure = failure_of(bare(error))
        self._finish([Finished(each.request_id, failure) for each in together], together)

    # -- gradients

    def _learn(self, together: Sequence[Call]) -> None:
        read, finished = [], []
        for call in together:
            try:
                read.append((call, self.prefetcher.take(call)))
            except REFUSALS as error:
                finished.append(Finished(call.request_id, failure_of(error)))
        if read:
            finished += run_each(self.model_calls.forward_backward, read)
        self._finish(finished, together)

    # -- samples

    def _draw(self, together: Sequence[Call], arriving: Arriving) -> list[Call]:
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
        self.sample_turns.turn(weights, calls, arriving)
        return [call for call, _ in self.sample_turns.used.values()]

    def _snapshot(self, call: Call) -> str | None:
        """Load a copy of the weights, for a sample that is drawn with the model's own, and return
        its name; None where the session has ended."""
        sampler = self.journal.sampler(call.owner)
        return None if sampler is None else self.model_cache.snapshot(sampler)

    def _answer_each(self, weights: str, drawn: Sequence[tuple[Call, SampleAsk]]) -> list[Finished]:
        return run_each(partial(self._answers, weights), drawn)

    def _answers(self, weights: str, drawn: Sequence[tuple[Call, SampleAsk]]) -> list[Done]:
        asks = [ask for _, ask in drawn]
        answers = complete(self.commands, weights, asks)
        self.sample_turns.samples += sum(ask.n for ask in asks)
        return [(Outcome(answer, "protobuf"), Changes()) for answer in answers]


def run_each(
    do: Callable[[Sequence[tuple[Call, Any]]], list[Done]], calls: Sequence[tuple[Call, Any]]
) -> list[Finished]:
    """Run calls together, each with its request. Where one of several fails, run each alone."""
    failures: list[Failure] = []
    with catch_error(lambda error: failures.append(failure_of(bare(error)))):
        results = do(calls)
    if not failures:
        return [
            Finished(call.request_id, *done) for (call, _), done in zip(calls, results, strict=True)
        ]
    if len(calls) == 1:
        return [Finished(calls[0][0].request_id, failures[0])]
    return [finished for each in calls for finished in run_each(do, [each])]


TIDY_S = 15.0
STATUS_EVERY_S = 10.0


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
        self.cfg, self.commands, self.prefetcher = cfg, commands, prefetcher
        self.disk = FullDisk()
        self.runner = CallRunner(cfg.serve, commands, journal, prefetcher, self.disk)
        self.model_cache = self.runner.model_cache
        self.drawing = engine_sampling or self.runner.sample_turns
        self.accepted = {} if engine_sampling is None else engine_sampling.accepted
        self.scheduler = CallScheduler(
            cfg, commands, journal, prefetcher, self.model_cache, self.drawing.next_calls
        )
        self.progress = ProgressLine()
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
        """Run a turn if calls are pending; otherwise the scheduler pauses."""
        self.drawing.check()
        calls = self.scheduler.pending()
        self.runner.sample_turns.leave_cancelled({call.request_id for call in calls})
        self._count()
        self.progress.update(self.gauges, len(calls))
        if together := self.scheduler.next_turn(calls):
            self._turn(together)

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

    def _turn(self, together: Sequence[Call]) -> None:
        """Run these calls, and count the time that each has taken."""
        sizes = self.scheduler.batcher.sizes(together)
        tenant = self.scheduler.tenant_of(together[0])
        samples = self.runner.sample_turns
        started = time.monotonic()
        together = self.runner.run(together, partial(self.scheduler.arriving_samples, tenant))
        seconds = time.monotonic() - started
        sizes |= samples.sizes(together)
        self.progress.record_work(
            sum(not samples.is_in_progress(each) for each in together), seconds
        )
        self._count()
        size = sum(sizes[each.request_id] for each in together)
        for member in together:
            share = seconds * sizes[member.request_id] / size
            if not samples.is_in_progress(member):
                self.prefetcher.drop(member)
            self.scheduler.record_work(member, share)
            if member.changes_state:
                self._keep_if_due(member.owner, share)

    def _keep_if_due(self, model: str, seconds: float) -> None:
        """Save the model after enough unsaved work, so that a killed service repeats little."""
        loaded = self.model_cache.models.get(model)
        if loaded is None:
            return
        loaded.unsaved_s += seconds
        if loaded.unsaved_s > self.cfg.serve.save_seconds:

            def report(error: Exception) -> None:  # no client waits for this save
                loaded.unsaved_s = 0.0
                print_to_user(
                    f"the state of {model} could not be saved, and the journal grows: {bare(error)}"
                )

            with catch_error(report):
                self.model_cache.keep(loaded)

    def close(self) -> None:
        """Save the models in memory. Pending calls run when the service starts again."""
        self.drawing.close()
        self.prefetcher.close()
        self.model_cache.keep_all()

    def _count(self) -> None:
        stages = {self.drawing, self.runner.sample_turns}
        self.gauges["samples_total"] = float(sum(each.samples for each in stages))
        for drafts, rounds in sorted(self.accepted.items()):
            self.gauges[f"rounds_accepting_{drafts}_drafts_total"] = float(rounds)
        self.gauges["samples_under_way"] = float(sum(each.left for each in stages))
        self.gauges.update(self.runner.model_calls.gauges)
        self.gauges["models_in_memory"] = float(len(self.model_cache.models))
        self.gauges["snapshots_in_memory"] = float(len(self.model_cache.snapshots))


class ProgressLine:
    """Line about the last seconds, printed only if calls were done in them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.last = clock, clock()
        self.calls, self.busy_s = 0, 0.0
        self.before: dict[str, float] = {}

    def record_work(self, calls: int, seconds: float) -> None:
        """Count calls that were done."""
        self.calls += calls
        self.busy_s += seconds

    def update(self, gauges: Mapping[str, float], waiting: int) -> None:
        """Print the line when it is due; call this often."""
        seconds = self.clock() - self.last
        if seconds < STATUS_EVERY_S:
            return
        if self.calls:
            print_to_user(self._line(gauges, waiting, seconds))
        self.last, self.calls, self.busy_s = self.clock(), 0, 0.0
        self.before = dict(gauges)

    def _line(self, gauges: Mapping[str, float], waiting: int, seconds: float) -> str:
        def since(name: str) -> float:
            return gauges.get(name, 0.0) - self.before.get(name, 0.0)

        return (
            f"{self.calls} calls in {seconds:.0f} s ({self.busy_s / seconds:.0%} busy): "
            f"{since('trained_tokens_total') / seconds:,.0f} tokens/s through models, "
            f"{since('optimizer_steps_total'):.0f} steps, {since('samples_total'):.0f} samples; "
            f"{gauges.get('models_in_memory', 0):.0f} models in memory, {waiting} calls wait"
        )
