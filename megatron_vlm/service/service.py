"""The service on rank 0: calls from the journal, one turn after the other.

the front (HTTP, a thread)  ->  journal  ->  this loop  ->  orders to all ranks
                                journal  <-  answers
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.agree import Stopped
from megatron_vlm.distributed.process import say
from megatron_vlm.errors import CheckpointError, ConfigError, DataError, MegatronVLMError
from megatron_vlm.group.member import BrokenError
from megatron_vlm.service.drawing import SampleAsk, StopWords, draw, read_ask
from megatron_vlm.service.front.limits import RequestLimits
from megatron_vlm.service.journal.journal import Journal
from megatron_vlm.service.journal.values import SAMPLE, TRAINING, Call, Failure, Finished, Outcome
from megatron_vlm.service.orders import EVERY_S, ModelOrders
from megatron_vlm.service.progress import ProgressLine
from megatron_vlm.service.residents import Resident, Residents
from megatron_vlm.service.rows import RowReader
from megatron_vlm.service.training import Batch, ModelCalls, read_batch
from megatron_vlm.service.turns import Turns
from megatron_vlm.service.wire.values import RequestError

AHEAD = 4  # calls of a model that are read while others are done
READ_AHEAD = 256  # calls, of all
READ_BYTES = 256 * 2**20  # of their bodies
PER_SWAP = 4  # seconds that go to others for each second in which a model is brought into memory
TOGETHER = 256  # samples that are drawn in one turn, at least one request

USERS = (RequestError, DataError, ConfigError, ValidationError)


class Service:
    """Everything that rank 0 does beside the ranks' work."""

    def __init__(
        self,
        cfg: Config,
        orders: ModelOrders,
        journal: Journal,
        reader: RowReader,
        stops: StopWords,
        limits: RequestLimits,
    ):
        self.cfg, self.orders, self.journal = cfg, orders, journal
        self.reader, self.stops, self.limits = reader, stops, limits
        self.residents = Residents(cfg.serve, orders, journal, self._redo)
        self.training = ModelCalls(orders, self.residents, journal)
        self.turns, self.progress = Turns(), ProgressLine()
        self.pool = ThreadPoolExecutor(1, "read")  # pictures are decoded beside the ranks' work
        self.read: dict[str, Future[Any]] = {}
        self.tenants: dict[str, str] = {}  # of sampling sessions, whose weights never change
        self.replicas = orders.models.base.dims.dp
        self.gauges = {"samples_total": 0.0}  # for /metrics

    def run(self) -> None:
        """Until a signal, which raises Stopped."""
        while True:
            self.orders.wait()
            calls = self.journal.next_calls(AHEAD)
            self.progress.tell(self.gauges, len(calls))
            self._read_ahead(calls)
            ready = [call for call in calls if self._is_first(call, calls)]
            if not ready:
                self.journal.wait(EVERY_S / 2)
                continue
            self.turn(self.turns.next(ready, self._tenant, self._delay), ready)

    def turn(self, call: Call, ready: Sequence[Call]) -> None:
        """Do a call, and whatever is done best together with it."""
        together = [call]
        if call.kind == SAMPLE and not call.attempts:
            together = self._alike(call, ready)
        started = time.monotonic()
        together = self._do(together)
        seconds = time.monotonic() - started
        self.progress.worked(len(together), seconds)
        share = seconds / max(len(together), 1)
        for each in together:
            self.read.pop(each.request_id, None)
            self.turns.worked(each, self._tenant(each), share)
        self._count()
        if call.changes_state:
            self._keep_if_due(call.owner, share)

    def _keep_if_due(self, model: str, seconds: float) -> None:
        """A service that is killed does little work twice."""
        resident = self.residents.models.get(model)
        if resident is None:
            return
        resident.unsaved_s += seconds
        if resident.unsaved_s > self.cfg.serve.save_seconds:
            try:
                self.residents.keep(resident)
            except BrokenError:
                raise
            except MegatronVLMError as error:  # nobody has asked for it, and nothing is lost
                resident.unsaved_s = 0.0
                say(f"the state of {model} could not be kept, and the journal grows: {error}")

    def _do(self, together: Sequence[Call]) -> list[Call]:
        """Those that were done, with or without success."""
        try:
            # Before they are begun: a model may take long to come back, and whoever ends the
            # service meanwhile has not shown that there is anything wrong with the calls.
            self._bring(together[0])
        except BrokenError:
            raise
        except MegatronVLMError as error:
            self._fail(together, error)
            return list(together)
        still = set(self.journal.begun(*(each.request_id for each in together)))
        together = [each for each in together if each.request_id in still]
        call = together[0] if together else None
        try:
            if call is not None and call.kind == SAMPLE:
                self._draw(together)
            elif call is not None:
                outcome, changes = self._done(call)
                self.journal.finish(call.request_id, outcome, changes)
        except BrokenError:
            raise  # the other ranks may be anywhere: only a new process can go on
        except Stopped:
            self.journal.given_back(*still)
            raise
        except (MegatronVLMError, ValidationError) as error:
            self._fail(together, error)
        return together

    def _bring(self, call: Call) -> None:
        """Into memory what the call is about."""
        if call.kind == SAMPLE:
            if (sampler := self.journal.sampler(call.owner)) is not None:
                self.residents.weights(sampler)
        elif call.kind in TRAINING:
            self.residents.model(call.owner)

    def _fail(self, together: Sequence[Call], error: Exception) -> None:
        self.journal.finish_all([Finished(e.request_id, _failure(error)) for e in together])

    def _done(self, call: Call) -> Any:
        if call.kind == "forward_backward":
            return self.training.forward_backward(call, self._ready(call))
        method: Callable[..., Any] = getattr(self.training, call.kind)
        return method(call, self.journal.body(call.request_id))

    def _redo(self, resident: Resident, call: Call) -> None:
        body, batch = self.journal.body(call.request_id), None
        if call.kind == "forward_backward":
            batch = self._batch(body)
        self.training.redo(resident, call, batch, body)

    # -- samples

    def _draw(self, together: Sequence[Call]) -> None:
        asks: list[SampleAsk] = []
        fine, failed = [], []
        for call in together:
            try:
                asks.append(self._ready(call))
                fine.append(call)
            except USERS as error:
                failed.append(Finished(call.request_id, _failure(error)))
        if fine:
            sampler = self.journal.sampler(fine[0].owner)
            if sampler is None:
                gone = Failure("sampling_session_id: the session has ended", "user")
                failed += [Finished(call.request_id, gone) for call in fine]
            else:
                weights = self.residents.weights(sampler)
                answers = draw(self.orders, weights, asks)
                self.gauges["samples_total"] += sum(ask.n for ask in asks)
                failed += [
                    Finished(call.request_id, Outcome(answer, "protobuf"))
                    for call, answer in zip(fine, answers, strict=True)
                ]
        self.journal.finish_all(failed)

    def _alike(self, call: Call, ready: Sequence[Call]) -> list[Call]:
        """Samples of the same weights with the same settings, the one whose turn it is first."""
        tenant, ask = self._tenant(call), self._try(call)
        if ask is None:
            return [call]
        found, samples = [call], ask.n
        for other in ready:
            if other.kind != SAMPLE or other.attempts or other is call:
                continue
            if self._tenant(other) != tenant or samples + ask.n > TOGETHER:
                continue
            theirs = self._try(other)
            if theirs is not None and theirs.alike == ask.alike:
                found.append(other)
                samples += theirs.n
        return found

    # -- reading

    def _tenant(self, call: Call) -> str:
        """Whose work it is: a model's, or that of weights which are sampled from."""
        if call.kind != SAMPLE:
            return call.owner
        if call.owner not in self.tenants:
            if len(self.tenants) > 10_000:
                self.tenants.clear()
            sampler = self.journal.sampler(call.owner)
            self.tenants[call.owner] = "gone" if sampler is None else f"{sampler.folder}"
        return self.tenants[call.owner]

    def _delay(self, call: Call) -> float:
        """What is in memory goes on for a while, so that most of the time is not spent swapping."""
        there = call.kind not in (SAMPLE, *TRAINING) or self.residents.has(self._tenant(call))
        return 0.0 if there else PER_SWAP * self.residents.swap_s

    def _is_first(self, call: Call, calls: Sequence[Call]) -> bool:
        """Whether nothing of the same model has to be done before; `calls` are in their order."""
        if call.kind == SAMPLE:
            return True
        return next(each for each in calls if each.owner == call.owner) is call

    def _read_ahead(self, calls: Sequence[Call]) -> None:
        if len(self.read) > 2 * READ_AHEAD:  # some were cancelled meanwhile
            there = {call.request_id for call in calls}
            self.read = {name: each for name, each in self.read.items() if name in there}
        size = 0
        for call in calls[:READ_AHEAD]:
            size += call.size
            if size > READ_BYTES:
                break
            if call.request_id not in self.read and call.kind in ("forward_backward", SAMPLE):
                self.read[call.request_id] = self.pool.submit(self._parsed, call)

    def _parsed(self, call: Call) -> Batch | SampleAsk:
        body = self.journal.body(call.request_id)
        if call.kind == SAMPLE:
            return read_ask(body, self.reader, self.stops, call.seed, self.limits.max_tokens)
        return self._batch(body)

    def _batch(self, body: bytes) -> Batch:
        return read_batch(body, self.reader, self.replicas)

    def _ready(self, call: Call) -> Any:
        future = self.read.pop(call.request_id, None)
        # One that waits behind those of others is read at once: its turn has come.
        return self._parsed(call) if future is None or future.cancel() else future.result()

    def _try(self, call: Call) -> SampleAsk | None:
        """What a sample asks for, if it can be read; it is read no second time."""
        future = self.read.get(call.request_id)
        if future is None:
            future = self.read[call.request_id] = self.pool.submit(self._parsed, call)
        return None if future.exception() else future.result()

    def close(self) -> None:
        """Keep what is in memory; what waits is done when the service starts again."""
        self.pool.shutdown(cancel_futures=True)
        self.residents.keep_all()

    def _count(self) -> None:
        self.gauges.update(self.training.gauges)
        self.gauges["models_in_memory"] = float(len(self.residents.models))
        self.gauges["snapshots_in_memory"] = float(len(self.residents.snapshots))


def _failure(error: Exception) -> Failure:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return Failure(f"{where}: {first['msg']}", "user")
    user = isinstance(error, USERS) and not isinstance(error, CheckpointError)
    return Failure(str(error), "user" if user else "server")
