"""Running of calls on rank 0: calls that are in the journal run on all ranks, and their results go
there."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from megatron_vlm.config.schema import ServeConfig
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.distributed.agreement import Stopped
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
