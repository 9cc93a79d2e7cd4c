"""Samples that the ranks draw: requests join those that are under way and leave when they are
answered, and a turn ends after some seconds, in which case what was begun goes on in the next."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from megatron_vlm.controller.group_decoder import GroupDecoder, SampleProgress, SampleRequest
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.serve.failures import REFUSALS, bare, failure_of
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call, Failure, Finished
from megatron_vlm.serve.model_commands import ModelCommands
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.sample_calls import SampleAsk

EVERY_S = 0.1  # of drawing, before it is seen who was answered, and who came
MOST_ROUNDS = 64  # of the same
AHEAD = 1.25  # samples that are with the ranks for each row that they have
SUSPENDED = 4  # sets of weights of which samples may be under way between turns

Answer = Callable[[str, Sequence[tuple[Call, SampleAsk]]], list[Finished]]
Finish = Callable[[Sequence[Finished], Sequence[Call]], None]
Arriving = Callable[[], Sequence[Call]]


@dataclass(eq=False)
class UnderWay:
    """A request whose samples are drawn."""

    call: Call
    ask: SampleAsk
    request: SampleRequest
    left: int  # answers that have not ended
    tokens: int = 0


@dataclass(eq=False)
class SampleBatch:
    """What is drawn by the same weights, by the name that the ranks have for them."""

    weights: str
    inside: dict[int, UnderWay] = field(default_factory=dict)
    decoder: GroupDecoder | None = None  # of this rank; another one would know nothing of these

    def ids(self) -> set[str]:
        """Of the requests."""
        return {each.call.request_id for each in self.inside.values()}


@dataclass(eq=False)
class SampleTurn:
    """What a turn knows beside its batch."""

    batch: SampleBatch
    waiting: list[Call]  # that have not joined
    begun: set[str]  # what the journal counts as begun, and has to get back
    used: dict[str, tuple[Call, int]] = field(default_factory=dict)  # tokens that were drawn


class SampleTurns:
    """On rank 0. `answer` completes requests whose answers are drawn, `finish` writes what has
    come of calls."""

    def __init__(
        self,
        orders: ModelCommands,
        journal: Journal,
        readings: RequestPrefetcher,
        answer: Answer,
        finish: Finish,
        seconds: float,
    ):
        self.orders, self.journal, self.readings = orders, journal, readings
        self.answer, self.finish, self.seconds = answer, finish, seconds
        models = orders.models
        self.replicas = models.base.dims.dp
        self.room = AHEAD * models.cfg.serve.sampler_rows * models.base.dims.pp
        self.batches: dict[str, SampleBatch] = {}
        self.numbers = count()
        self.rounds = 1
        # Requests that are drawn without others, since some of those with them could not be drawn;
        # and those that have to be drawn again, in a turn that does not end before.
        self.alone: set[str] = set()
        self.again: set[str] = set()
        self.used: dict[str, tuple[Call, int]] = {}  # in the last turn

    def weights_of(self, call: Call) -> str | None:
        """What a request that is under way is drawn by."""
        for batch in self.batches.values():
            if call.request_id in batch.ids():
                return batch.weights
        return None

    def has(self, call: Call) -> bool:
        """Whether a request is under way."""
        return self.weights_of(call) is not None

    def sizes(self, calls: Sequence[Call]) -> dict[str, float]:
        """What each one's part of the last turn was in proportion, of those that were in it."""
        there = [call.request_id for call in calls if call.request_id in self.used]
        return {name: max(self.used[name][1], 1) for name in there}

    def forget_lost(self) -> None:
        """Weights have changed, or have gone from memory, and with them what was drawn."""
        for name, batch in list(self.batches.items()):
            if self.orders.models.decoders.get(name) is not batch.decoder:
                self.again |= batch.ids()
                del self.batches[name]

    def move(self, weights: str, to: Callable[[Call], str | None]) -> None:
        """The weights are about to change: what is under way goes on with those that `to` names,
        which are the same; if there are none, it is drawn again."""
        self.forget_lost()
        batch = self.batches.get(weights)
        if batch is None:
            return
        try:
            name = to(next(iter(batch.inside.values())).call)
            if name is not None:
                self.orders.move(weights, name)
                batch.weights = name
                self.batches[name] = self.batches.pop(weights)
        except BrokenError:
            raise
        except MegatronVLMError:  # forget_lost will see it
            return

    def turn(self, weights: str, calls: Sequence[Call], arriving: Arriving) -> None:
        """Draw samples of these calls, which are begun, and of those that arrive; all of the same
        weights."""
        batch = self.batches.setdefault(weights, SampleBatch(weights))
        inside = batch.ids()
        waiting = [call for call in calls if call.request_id not in inside]
        turn = SampleTurn(batch, waiting, {call.request_id for call in calls})
        self.used = turn.used
        others = inside - turn.begun
        still = set(self.journal.begun(*others))
        leave = [n for n, each in batch.inside.items() if each.call.request_id in others - still]
        for number in leave:  # cancelled meanwhile
            self._forget(batch.inside.pop(number).call)
        turn.begun |= still
        try:
            self._draw(turn, leave, arriving)
        except Stopped:  # those that the caller has begun it gives back
            self.journal.given_back(*turn.begun - {call.request_id for call in calls})
            raise
        if turn.begun:
            self.journal.given_back(*turn.begun)
        if not batch.inside:
            self.batches.pop(batch.weights, None)

    def _draw(self, turn: SampleTurn, leave: Collection[int], arriving: Arriving) -> None:
        batch, ends = turn.batch, time.monotonic() + self.seconds
        while True:
            joining = self._joining(turn)
            if batch.inside or leave:
                self._advance(turn, joining, leave)
                leave = ()
            if not batch.inside and not turn.waiting:
                return
            if time.monotonic() >= ends and self._may_wait(batch):
                return
            if not any(self._is_alone(each.call) for each in batch.inside.values()):
                there = turn.begun | {call.request_id for call in turn.waiting}
                came = [call for call in arriving() if call.request_id not in there]
                turn.waiting += [call for call in came if self.readings.is_ready(call)]

    def _may_wait(self, batch: SampleBatch) -> bool:
        """Whether a turn may end before all is drawn."""
        others = sum(bool(each.inside) for each in self.batches.values() if each is not batch)
        return others < SUSPENDED and not batch.ids() & self.again

    def _is_alone(self, call: Call) -> bool:
        return bool(call.attempts) or call.request_id in self.alone

    def _joining(self, turn: SampleTurn) -> list[UnderWay]:
        """Those that the ranks have rows for. Of those that wait come first those of the key that
        has the fewest."""
        batch, found = turn.batch, []
        rows: Counter[str] = Counter()
        load = [0] * self.replicas
        for each in batch.inside.values():
            rows[each.call.key] += each.left
            load[each.request.replica] += each.left
        while turn.waiting and min(load) < self.room and not self._is_full(batch, turn.waiting):
            call = min(turn.waiting, key=lambda each: rows[each.key])
            if batch.inside and self._is_alone(call):
                call = next(each for each in turn.waiting if not self._is_alone(each))
            turn.waiting.remove(call)
            ask = self._read(turn, call)
            if ask is None:
                continue
            replica = min(range(self.replicas), key=load.__getitem__)
            rows[call.key] += ask.n
            load[replica] += ask.n
            number = next(self.numbers)
            request = SampleRequest(number, replica, ask.settings, ask.n, ask.seed)
            batch.inside[number] = UnderWay(call, ask, request, ask.n)
            found.append(batch.inside[number])
        return found

    def _is_full(self, batch: SampleBatch, waiting: Sequence[Call]) -> bool:
        """Whether nobody may join, since somebody is to be alone."""
        if not batch.inside:
            return False
        inside = any(self._is_alone(each.call) for each in batch.inside.values())
        return inside or all(map(self._is_alone, waiting))

    def _read(self, turn: SampleTurn, call: Call) -> SampleAsk | None:
        """What it asks for; None where nothing is to be drawn."""
        if call.request_id not in turn.begun:
            if not self.journal.begun(call.request_id):
                return None
            turn.begun.add(call.request_id)
        turn.used.setdefault(call.request_id, (call, 0))
        try:
            ask: SampleAsk = self.readings.take(call)
        except REFUSALS as error:
            self._finish(turn, [Finished(call.request_id, failure_of(bare(error)))], [call])
            return None
        self.readings.put(call, ask)  # nobody reads it again while it waits between turns
        return ask

    def _advance(
        self, turn: SampleTurn, joining: Sequence[UnderWay], leave: Collection[int]
    ) -> None:
        batch, started = turn.batch, time.monotonic()
        rows = [each.ask.prompt for each in joining]
        requests = [each.request for each in joining]
        try:
            found = self.orders.draw(batch.weights, rows, requests, list(leave), self.rounds)
        except BrokenError:
            raise
        except MegatronVLMError as error:
            self._failed(turn, error)
            return
        batch.decoder = self.orders.models.decoders.get(batch.weights)
        wanted = int(self.rounds * EVERY_S / max(time.monotonic() - started, 1e-3))
        self.rounds = max(1, min(wanted, 2 * self.rounds, MOST_ROUNDS))
        self._take(turn, found)

    def _take(self, turn: SampleTurn, found: Sequence[SampleProgress]) -> None:
        """How far each is; those that are answered leave."""
        batch, finished = turn.batch, []
        answered: list[tuple[Call, SampleAsk]] = []
        for each in found:
            mine = batch.inside[each.number]
            call, used = mine.call, turn.used.get(mine.call.request_id, (mine.call, 0))[1]
            turn.used[call.request_id] = call, used + each.tokens - mine.tokens
            mine.tokens, mine.left = each.tokens, each.left
            if each.left:
                continue
            del batch.inside[each.number]
            if each.refused is not None:
                finished.append((call, Finished(call.request_id, Failure(each.refused, "user"))))
            else:
                ask = replace(mine.ask, answers=tuple(each.answers or ()))
                answered.append((call, ask))
        done = [of_it for _, of_it in finished]
        if answered:
            done += self.answer(batch.weights, answered)
        self._finish(turn, done, [call for call, _ in (*finished, *answered)])

    def _failed(self, turn: SampleTurn, error: MegatronVLMError) -> None:
        """None of the batch could be drawn: where there are several, each will be drawn alone."""
        inside, turn.batch.inside = list(turn.batch.inside.values()), {}
        if len(inside) > 1:
            self.alone |= {each.call.request_id for each in inside}
            turn.waiting += [each.call for each in inside]
            return
        calls = [each.call for each in inside]
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
        self.readings.drop(call)
        self.alone.discard(call.request_id)
        self.again.discard(call.request_id)
