"""Choice of the calls that run next, on rank 0."""

from collections.abc import Sequence

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.rank0 import HEARTBEAT_S
from megatron_vlm.serve.call_batching import GATHER_S, CallBatcher
from megatron_vlm.serve.engine_samples import EngineSampling
from megatron_vlm.serve.fair_queue import PER_SWAP, FairQueue
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import SAMPLE, TRAINING, Call
from megatron_vlm.serve.model_cache import ModelCache
from megatron_vlm.serve.rank_models import ModelCommands
from megatron_vlm.serve.request_prefetch import RequestPrefetcher

PREFETCHED_CALLS = 4  # calls per model that are read while other calls run


class CallScheduler:
    """Scheduler of the journal's calls. It gives each tenant its share of the time, and lets calls
    share a turn."""

    def __init__(
        self,
        cfg: Config,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        model_cache: ModelCache,
        engine_sampling: EngineSampling | None,
    ):
        self.journal, self.prefetcher, self.model_cache = journal, prefetcher, model_cache
        self.engine_sampling = engine_sampling
        self.batcher = CallBatcher(
            cfg, commands.models.base.dims, prefetcher, self.tenant_of, model_cache.is_loaded
        )
        self.queue = FairQueue()
        self.tenants: dict[str, str] = {}  # by sampling session, whose weights never change

    def pending(self) -> Sequence[Call]:
        """Return the calls for the ranks. Where an engine draws the samples, only those that it
        leaves to the ranks are among them."""
        if self.engine_sampling is None:
            return self.journal.next_calls(PREFETCHED_CALLS)
        drawn = list(self.engine_sampling.drawn.values())
        for call, ask in drawn:
            self.prefetcher.put(call, ask)
        return [
            *self.journal.next_calls(PREFETCHED_CALLS, samples=False),
            *(call for call, _ in drawn),
        ]

    def next_turn(self, calls: Sequence[Call]) -> list[Call]:
        """Return those of the pending calls that run next, together. Where none should run yet,
        wait a moment for more, and return none."""
        self.prefetcher.begin(calls)
        ready = [call for call in calls if _is_first(call, calls)]
        if not ready:
            self.journal.wait(HEARTBEAT_S / 2)
            return []
        call = self.queue.next(ready, self.tenant_of, self._delay)
        if self.engine_sampling is None and self.batcher.expects_more(call, ready):
            self.journal.wait(GATHER_S)
            return []
        return self.batcher.batch_with(call, ready)

    def arriving_samples(self, tenant: str) -> list[Call]:
        """Return the samples of this tenant that may join those in progress."""
        calls = self.journal.next_calls(PREFETCHED_CALLS)
        self.prefetcher.begin(calls)
        samples = [call for call in calls if call.kind == SAMPLE and not call.attempts]
        return [call for call in samples if self.tenant_of(call) == tenant]

    def record_work(self, call: Call, seconds: float) -> None:
        """Count the seconds of a call, or of its share of a turn."""
        self.queue.record_work(call, self.tenant_of(call), seconds)

    def tenant_of(self, call: Call) -> str:
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
            self.tenant_of(call)
        )
        return 0.0 if in_memory else PER_SWAP * self.model_cache.swap_s


def _is_first(call: Call, calls: Sequence[Call]) -> bool:
    """Return whether no earlier call of the same model is pending; `calls` are in order."""
    if call.kind == SAMPLE:
        return True
    return next(each for each in calls if each.owner == call.owner) is call
