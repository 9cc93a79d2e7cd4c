"""Choice of the calls that run next, on rank 0, and of those that share their turn: samples drawn
with the same weights, or gradients of different models in one pass through the pipeline. In the
fair queue each API key gets the same share of the ranks' time, and within a key each model and each
set of sampling weights."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.rank0 import HEARTBEAT_S
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import SAMPLE, TRAINING, Call
from megatron_vlm.serve.model_cache import ModelCache
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import Batch
from megatron_vlm.serve.served_models import ModelCommands

FORGOTTEN_S = 600.0
PER_SWAP = 4  # seconds of other work for each second in which weights are loaded into memory
MANY = 1000  # names that are kept before old ones are forgotten


class FairQueue:
    """Queue that counts the seconds that each key and each of its tenants has used. The one with
    the fewest seconds comes next.

    A key or tenant that was idle continues from the count of the one that was served last, where
    that count is higher. So it comes next at once, but it cannot save up turns while it is idle or
    sends few calls. A tenant whose weights must first be loaded into memory waits until it is some
    seconds behind the others. Otherwise models that do not fit into memory together would be
    swapped at every call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.had: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        # Lowest count of the pending keys (under ""), or of the pending tenants of a key.
        self.floor: dict[str, float] = {}

    def next(
        self,
        calls: Sequence[Call],
        tenant_of: Callable[[Call], str],
        delay_of: Callable[[Call], float] = lambda call: 0.0,
    ) -> Call:
        """Return the next call; calls of the same tenant stay in their order. `delay_of` returns by
        how many seconds the tenant of a call must be behind the others before it comes next."""
        first: dict[str, dict[str, Call]] = {}  # {key: {tenant: its first call}}
        for call in calls:
            first.setdefault(call.key, {}).setdefault(f"{call.key}/{tenant_of(call)}", call)
        delays = {
            key: {name: delay_of(call) for name, call in tenants.items()}
            for key, tenants in first.items()
        }
        key = self._least_served(
            "", {f"/{key}": min(tenants.values()) for key, tenants in delays.items()}
        )[1:]
        return first[key][self._least_served(key, delays[key])]

    def record_work(self, call: Call, tenant: str, seconds: float) -> None:
        """Count the seconds of a call, or of its share of a batch."""
        for name in (f"/{call.key}", f"{call.key}/{tenant}"):
            self.had[name] = self.had.get(name, 0.0) + seconds
            self.seen[name] = self.clock()

    def _least_served(self, group: str, delays: Mapping[str, float]) -> str:
        now, floor = self.clock(), self.floor.get(group, 0.0)
        for name in delays:
            # A name whose calls have been pending all the time is at the floor or above it already.
            self.had[name] = max(self.had.get(name, 0.0), floor)
            self.seen[name] = now
        chosen = min(delays, key=lambda name: self.had[name] + delays[name])
        self.floor[group] = min(self.had[name] for name in delays)
        self._forget(now)
        return chosen

    def _forget(self, now: float) -> None:
        if len(self.seen) < MANY:
            return
        for name in [
            name for name, last_seen in self.seen.items() if now - last_seen > FORGOTTEN_S
        ]:
            del self.seen[name], self.had[name]
            if name.startswith("/"):  # a key; its tenants were last seen at the same time or before
                self.floor.pop(name[1:], None)


PREFETCHED_CALLS = 4  # calls per model that are read while other calls run
GATHER_S = 0.02  # seconds without a new sample before the pending samples are drawn
TOGETHER = 256  # maximum samples at the start of a turn; a single request may have more
# Micro-batches per stage in a pass that several models share. With this number the stages are idle
# for less than a fifth of the time; with more, the first model's answer comes much later.
FULL = 4


class CallScheduler:
    """Scheduler of the journal's calls, which gives each tenant its share of the time."""

    def __init__(
        self,
        cfg: Config,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        model_cache: ModelCache,
        next_calls: Callable[[int], Sequence[Call]],
    ):
        """`next_calls` returns the calls for the ranks, with this number ahead for each model."""
        self.journal, self.prefetcher, self.model_cache = journal, prefetcher, model_cache
        self.pending = partial(next_calls, PREFETCHED_CALLS)
        self.batcher = CallBatcher(
            cfg, commands.models.base.dims, prefetcher, self.tenant_of, model_cache.is_loaded
        )
        self.queue = FairQueue()
        self.folder_of = lru_cache(10_000)(self._read_folder)  # a session's weights never change

    def next_turn(self, calls: Sequence[Call]) -> list[Call]:
        """Return the pending calls that run next, together. If none should run yet, wait a
        moment for more."""
        self.prefetcher.begin(calls)
        ready = [call for call in calls if _is_first(call, calls)]
        if not ready:
            self.journal.wait(HEARTBEAT_S / 2)
            return []
        call = self.queue.next(ready, self.tenant_of, self._delay)
        if self.batcher.expects_more(call, ready):
            self.journal.wait(GATHER_S)
            return []
        return self.batcher.batch_with(call, ready)

    def arriving_samples(self, tenant: str) -> list[Call]:
        """Return the samples of this tenant that may join those in progress."""
        calls = self.pending()
        self.prefetcher.begin(calls)
        samples = [call for call in calls if call.kind == SAMPLE and not call.attempts]
        return [call for call in samples if self.tenant_of(call) == tenant]

    def record_work(self, call: Call, seconds: float) -> None:
        """Count the seconds of a call, or of its share of a turn."""
        self.queue.record_work(call, self.tenant_of(call), seconds)

    def tenant_of(self, call: Call) -> str:
        """Return the name of the model or of the weights that a call uses."""
        return self.folder_of(call.owner) if call.kind == SAMPLE else call.owner

    def _read_folder(self, session: str) -> str:
        sampler = self.journal.sampler(session)
        return "gone" if sampler is None else f"{sampler.folder}"

    def _delay(self, call: Call) -> float:
        """Return the delay of a call in seconds, which keeps models from being swapped often."""
        in_memory = call.kind not in (SAMPLE, *TRAINING) or self.model_cache.is_loaded(
            self.tenant_of(call)
        )
        return 0.0 if in_memory else PER_SWAP * self.model_cache.swap_s


def _is_first(call: Call, calls: Sequence[Call]) -> bool:
    """Return whether no earlier call of the same model is pending; `calls` are in order."""
    if call.kind == SAMPLE:
        return True
    return next(each for each in calls if each.owner == call.owner) is call


class CallBatcher:
    """Chooser of the calls that are batched with a call. `in_memory` returns whether the model or
    the weights of a call, which `tenant_of` names, are in memory."""

    def __init__(
        self,
        cfg: Config,
        dims: ParallelDims,
        prefetcher: RequestPrefetcher,
        tenant_of: Callable[[Call], str],
        in_memory: Callable[[str], bool],
    ):
        self.prefetcher, self.tenant_of, self.in_memory = prefetcher, tenant_of, in_memory
        # Without a pipeline, a shared pass saves nothing. With overlapped gradient reduction, the
        # reduction must know which micro-batch of a model is the last one.
        shared = dims.pp > 1 and not cfg.parallel.overlap_grad_reduce
        self.micro_batches = FULL * dims.pp if shared else 0
        self.rows = dims.dp * cfg.train.micro_batch_size

    def expects_more(self, call: Call, ready: Sequence[Call]) -> bool:
        """Return whether more samples with the same weights are about to arrive. Samples arrive one
        by one, and drawing them together takes much less time."""
        if call.kind != SAMPLE or call.attempts:
            return False
        tenant = self.tenant_of(call)
        accepted_at = [each.accepted for each in ready if self.tenant_of(each) == tenant]
        now = time.time()
        return now - max(accepted_at) < GATHER_S and now - min(accepted_at) < 10 * GATHER_S

    def batch_with(self, call: Call, ready: Sequence[Call]) -> list[Call]:
        """Return the call whose turn it is, and the calls that are best batched with it."""
        if call.attempts:  # the process has died during this call before: it runs alone
            return [call]
        alike = [each for each in ready if each.kind == call.kind and not each.attempts]
        candidates = [each for each in alike if each is not call]
        if call.kind == SAMPLE:
            return self._samples(call, candidates)
        if call.kind == "forward_backward":
            return self._fill_pipeline(call, candidates)
        return [call]

    def sizes(self, together: Sequence[Call]) -> dict[str, float]:
        """Return the relative share of the work of each call, by request id."""
        if together[0].kind == SAMPLE or len(together) == 1:
            return dict.fromkeys((each.request_id for each in together), 1.0)
        return {each.request_id: max(self.prefetcher.look(each).tokens, 1) for each in together}

    def _samples(self, call: Call, others: Sequence[Call]) -> list[Call]:
        """Return samples with the same weights, the call's first. More may join later."""
        ask = self.prefetcher.look(call)
        if ask is None:
            return [call]
        tenant = self.tenant_of(call)
        batch, samples = [call], ask.n
        for other in others:
            if self.tenant_of(other) != tenant:
                continue
            other_ask = self.prefetcher.look(other)
            if other_ask is not None and samples + other_ask.n <= TOGETHER:
                batch.append(other)
                samples += other_ask.n
        return batch

    def _fill_pipeline(self, call: Call, others: Sequence[Call]) -> list[Call]:
        """Return the gradient calls of as many models as fill the pipeline."""
        batch, room = [call], self.micro_batches - self._micro_batches(call)
        for other in others if room > 0 else ():
            count = self._micro_batches(other)
            if count <= room:
                batch.append(other)
                room -= count
        return batch

    def _micro_batches(self, call: Call) -> float:
        """Return a call's micro-batches on each replica; infinity if it cannot share a pass."""
        if not self.in_memory(self.tenant_of(call)):
            return math.inf
        batch: Batch | None = self.prefetcher.look(call)
        if batch is None or batch.forward_only:
            return math.inf
        return math.ceil(len(batch.rows) / self.rows)
