"""Turns of sampling on the ranks. They draw what no engine has drawn, and complete every answer.
Requests join the samples in progress and leave when they are complete. A turn ends after some
seconds, and unfinished samples continue in the next turn."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count

from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tokens.completions import Completion, Pieces
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.serve.failures import REFUSALS, bare, failure_of
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call, Failure, Finished
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.resumable_decoder import ResumableDecoder, SampleProgress, SampleRequest
from megatron_vlm.serve.sample_calls import SampleAsk
from megatron_vlm.serve.served_models import ModelCommands

SAMPLE_TURN_S = 0.1  # seconds of decoding before finished and new requests are handled
MAX_ROUNDS = 64  # maximum rounds of decoding in that time
SAMPLES_AHEAD_PER_ROW = 1.25  # samples on the ranks per decoder row
SUSPENDED = 4  # maximum sets of weights with samples in progress between turns

Answer = Callable[[str, Sequence[tuple[Call, SampleAsk]]], list[Finished]]
Finish = Callable[[Sequence[Finished], Sequence[Call]], None]
Arriving = Callable[[], Sequence[Call]]
Hear = Callable[[Call, Pieces], None]


@dataclass(eq=False)
class InProgress:
    """Request with samples in progress."""

    call: Call
    ask: SampleAsk
    request: SampleRequest
    left: int  # number of unfinished answers
    tokens: int = 0


@dataclass(eq=False)
class SampleBatch:
    """Requests in progress that share weights."""

    weights: str  # name of the weights on the ranks
    inside: dict[int, InProgress] = field(default_factory=dict)
    decoder: ResumableDecoder | None = None  # this rank's decoder, which holds these samples

    def ids(self) -> set[str]:
        """Return the ids of the requests."""
        return {each.call.request_id for each in self.inside.values()}


@dataclass(eq=False)
class SampleTurn:
    """State of a turn."""

    batch: SampleBatch
    waiting: list[Call]  # calls that have not joined
    begun: set[str]  # started calls in the journal, whose attempts must be undone at the end
    used: dict[str, tuple[Call, int]] = field(default_factory=dict)  # with the tokens drawn


class SampleTurns:
    """Scheduler of samples on rank 0. `answer` completes drawn requests, and `finish` writes the
    results of calls."""

    def __init__(
        self,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        answer: Answer,
        finish: Finish,
        seconds: float,
    ):
        self.commands, self.journal, self.prefetcher = commands, journal, prefetcher
        self.answer, self.finish, self.seconds = answer, finish, seconds
        self.models = models = commands.models
        self.replicas = models.base.dims.dp
        self.room = SAMPLES_AHEAD_PER_ROW * models.cfg.engine.rows * models.base.dims.pp
        self.batches: dict[str, SampleBatch] = {}
        self.numbers = count()
        self.hear: Hear = lambda call, pieces: None  # receives streamed tokens
        self.samples = 0  # number of samples in calls that were completed
        self.rounds = 1
        # Requests in `alone` are drawn without others, since their batch has failed. Requests in
        # `again` have lost their samples; the turn that draws them again does not end before they
        # are complete.
        self.alone: set[str] = set()
        self.again: set[str] = set()
        self.used: dict[str, tuple[Call, int]] = {}  # `used` of the last turn

    def weights_of(self, call: Call) -> str | None:
        """Return the weights that a request in progress is drawn with."""
        batches = self.batches.values()
        return next((each.weights for each in batches if call.request_id in each.ids()), None)

    @property
    def left(self) -> int:
        """Number of answers in progress."""
        return sum(e.left for batch in self.batches.values() for e in batch.inside.values())

    def next_calls(self, ahead: int) -> list[Call]:
        """Return the calls for the ranks, where no engine draws: see Journal.next_calls."""
        return self.journal.next_calls(ahead)

    def check(self) -> None:
        """Do nothing: an error on the ranks is raised by their turn."""

    def close(self) -> None:
        """Do nothing: no sample is drawn between turns."""

    def is_in_progress(self, call: Call) -> bool:
        """Return whether a request is in progress."""
        return self.weights_of(call) is not None

    def sizes(self, calls: Sequence[Call]) -> dict[str, float]:
        """Return the relative share of the last turn's work for each call that took part in it."""
        drawn = [call.request_id for call in calls if call.request_id in self.used]
        return {name: max(self.used[name][1], 1) for name in drawn}

    def forget_lost(self) -> None:
        """Forget the samples in progress whose weights have changed or have left memory."""
        for name, batch in list(self.batches.items()):
            if self.models.decoders.get(name) is not batch.decoder:
                self.again |= batch.ids()
                del self.batches[name]

    def move(self, weights: str, to: Callable[[Call], str | None]) -> None:
        """Prepare for a change of the weights: samples in progress continue with an equal copy,
        whose name `to` returns. Without a copy they are drawn again."""
        self.forget_lost()
        batch = self.batches.get(weights)
        if batch is None:
            return
        try:
            name = to(next(iter(batch.inside.values())).call)
            if name is not None:
                self.commands.call(self.models.move, weights, name)
                batch.weights = name
                self.batches[name] = self.batches.pop(weights)
        except BrokenError:
            raise
        except MegatronVLMError:  # forget_lost will notice that the samples are lost
            return

    def turn(self, weights: str, calls: Sequence[Call], arriving: Arriving) -> None:
        """Draw the samples of these calls, which are marked as started, and of the calls that
        arrive. All of them have the same weights."""
        batch = self.batches.setdefault(weights, SampleBatch(weights))
        inside = batch.ids()
        waiting = [call for call in calls if call.request_id not in inside]
        turn = SampleTurn(batch, waiting, {call.request_id for call in calls})
        self.used = turn.used
        suspended = inside - turn.begun
        started = set(self.journal.begin_calls(*suspended))
        cancelled = suspended - started
        leave = [n for n, each in batch.inside.items() if each.call.request_id in cancelled]
        for number in leave:
            self._forget(batch.inside.pop(number).call)
        turn.begun |= started
        try:
            self._draw(turn, leave, arriving)
        except Stopped:  # the caller undoes the attempts of its own calls
            self.journal.undo_attempts(*turn.begun - {call.request_id for call in calls})
            raise
        if turn.begun:
            self.journal.undo_attempts(*turn.begun)
        if not batch.inside:
            self.batches.pop(batch.weights, None)

    def leave_cancelled(self, pending: Collection[str]) -> None:
        """Let samples leave whose clients have gone, where no pending call has their weights."""
        self.forget_lost()
        for batch in list(self.batches.values()):
            if batch.ids().isdisjoint(pending):
                self.turn(batch.weights, [], lambda: [])

    def _draw(self, turn: SampleTurn, leave: Collection[int], arriving: Arriving) -> None:
        batch, ends = turn.batch, time.monotonic() + self.seconds
        while True:
            joining = self._choose_joining(turn)
            if batch.inside or leave:
                self._advance(turn, joining, leave)
                leave = ()
            if not batch.inside and not turn.waiting:
                return
            if time.monotonic() >= ends and self._may_suspend(batch):
                return
            if not self._has_alone(batch):
                known = turn.begun | {call.request_id for call in turn.waiting}
                arrived = [call for call in arriving() if call.request_id not in known]
                turn.waiting += [call for call in arrived if self.prefetcher.is_ready(call)]

    def _may_suspend(self, batch: SampleBatch) -> bool:
        """Return whether a turn may end before all samples are drawn."""
        suspended = sum(bool(each.inside) for each in self.batches.values() if each is not batch)
        return suspended < SUSPENDED and not batch.ids() & self.again

    def _is_alone(self, call: Call) -> bool:
        return bool(call.attempts) or call.request_id in self.alone

    def _has_alone(self, batch: SampleBatch) -> bool:
        return any(self._is_alone(each.call) for each in batch.inside.values())

    def _choose_joining(self, turn: SampleTurn) -> list[InProgress]:
        """Return the waiting requests that the ranks have rows for, by turns of the keys. Complete
        those whose answers an engine has drawn."""
        batch, joining, drawn = turn.batch, list[InProgress](), list[tuple[Call, SampleAsk]]()
        rows: Counter[str] = Counter()
        load = [0] * self.replicas
        for entry in batch.inside.values():
            rows[entry.call.key] += entry.left
            load[entry.request.replica] += entry.left
        while turn.waiting and min(load) < self.room and not self._is_full(batch, turn.waiting):
            call = min(turn.waiting, key=lambda each: rows[each.key])
            if batch.inside and self._is_alone(call):
                call = next(each for each in turn.waiting if not self._is_alone(each))
            turn.waiting.remove(call)
            ask = self._read(turn, call)
            if ask is None:
                continue
            if ask.answers:
                drawn.append((call, ask))
                continue
            replica = min(range(self.replicas), key=load.__getitem__)
            rows[call.key] += ask.n
            load[replica] += ask.n
            number = next(self.numbers)
            request = SampleRequest(
                number, replica, ask.settings, ask.n, ask.seed, streamed=ask.streamed
            )
            batch.inside[number] = entry = InProgress(call, ask, request, ask.n)
            joining.append(entry)
        self._finish(turn, self.answer(batch.weights, drawn), [call for call, _ in drawn])
        return joining

    def _is_full(self, batch: SampleBatch, waiting: Sequence[Call]) -> bool:
        """Return whether no request may join, because one has to be drawn alone."""
        only_alone = all(map(self._is_alone, waiting))
        return bool(batch.inside) and (only_alone or self._has_alone(batch))

    def _read(self, turn: SampleTurn, call: Call) -> SampleAsk | None:
        """Return the request of a call; None where nothing has to be drawn."""
        if call.request_id not in turn.begun:
            if not self.journal.begin_calls(call.request_id):
                return None
            turn.begun.add(call.request_id)
        turn.used.setdefault(call.request_id, (call, 0))
        try:
            ask: SampleAsk = self.prefetcher.take(call)
        except REFUSALS as error:
            self._finish(turn, [Finished(call.request_id, failure_of(bare(error)))], [call])
            return None
        self.prefetcher.put(call, ask)  # so that it is not read again between turns
        return ask

    def _advance(
        self, turn: SampleTurn, joining: Sequence[InProgress], leave: Collection[int]
    ) -> None:
        batch, started = turn.batch, time.monotonic()
        prompts = batch_of([each.ask.prompt for each in joining]) if joining else None
        requests = [asdict(each.request) for each in joining]
        drawing = batch.weights, prompts, requests, list(leave), self.rounds
        try:
            progress = self.commands.call(self.models.draw, *drawing)
        except BrokenError:
            raise
        except MegatronVLMError as error:
            self._record_failure(turn, error)
            return
        batch.decoder = self.models.decoders.get(batch.weights)
        rounds = int(self.rounds * SAMPLE_TURN_S / max(time.monotonic() - started, 1e-3))
        self.rounds = max(1, min(rounds, 2 * self.rounds, MAX_ROUNDS))
        self._take(turn, progress)

    def _take(self, turn: SampleTurn, progress_of_samples: Sequence[SampleProgress]) -> None:
        """Record the progress of each request, and complete the finished ones."""
        batch, calls, results = turn.batch, list[Call](), list[Finished]()
        answered: list[tuple[Call, SampleAsk]] = []
        for progress in progress_of_samples:
            entry = batch.inside[progress.number]
            call, used = entry.call, turn.used.get(entry.call.request_id, (entry.call, 0))[1]
            turn.used[call.request_id] = call, used + progress.tokens - entry.tokens
            entry.tokens, entry.left = progress.tokens, progress.left
            if progress.pieces is not None:
                self.hear(call, progress.pieces)
            if progress.left:
                continue
            del batch.inside[progress.number]
            calls.append(call)
            if progress.refused is not None:
                results.append(Finished(call.request_id, Failure(progress.refused, "user")))
            else:
                answers = tuple(map(Completion.from_json, progress.answers or ()))
                answered.append((call, replace(entry.ask, answers=answers)))
        results += self.answer(batch.weights, answered)
        self._finish(turn, results, calls)

    def _record_failure(self, turn: SampleTurn, error: MegatronVLMError) -> None:
        """Handle an error of the whole batch. If it has several requests, each is drawn alone."""
        calls = [each.call for each in turn.batch.inside.values()]
        turn.batch.inside = {}
        if len(calls) > 1:
            self.alone |= {call.request_id for call in calls}
            turn.waiting += calls
            return
        failure = failure_of(bare(error))
        self._finish(turn, [Finished(call.request_id, failure) for call in calls], calls)

    def _finish(
        self, turn: SampleTurn, finished: Sequence[Finished], calls: Sequence[Call]
    ) -> None:
        self.finish(finished, calls)
        for call in calls:
            turn.begun.discard(call.request_id)
            self._forget(call)

    def _forget(self, call: Call) -> None:
        self.prefetcher.drop(call)
        self.alone.discard(call.request_id)
        self.again.discard(call.request_id)
