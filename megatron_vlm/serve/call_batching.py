"""Which calls are done in one turn: samples that are drawn from the same weights, and gradients of
different models, which go through the pipeline in one pass."""

import math
import time
from collections.abc import Callable, Sequence

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.serve.journal.journal_records import SAMPLE, Call
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import Batch

GATHER_S = 0.02  # without another sample, before those that came are drawn
TOGETHER = 256  # samples that a turn begins with, at least one request
# Micro-batches for each stage of a pass that several models share. Its stages stand still for less
# than a fifth of the time, and with more of them the first model's answer comes much later.
FULL = 4


class CallBatcher:
    """`tenant_of` names the model or the weights that a call is about, and `in_memory` says whether
    they are there."""

    def __init__(
        self,
        cfg: Config,
        dims: ParallelDims,
        readings: RequestPrefetcher,
        tenant_of: Callable[[Call], str],
        in_memory: Callable[[str], bool],
    ):
        self.readings, self.tenant_of, self.in_memory = readings, tenant_of, in_memory
        # Without a pipeline nothing is won by sharing a pass, and what reduces gradients behind the
        # last micro-batch of a model has to know which one that is.
        shared = dims.pp > 1 and not cfg.parallel.overlap_grad_reduce
        self.micro_batches = FULL * dims.pp if shared else 0
        self.rows = dims.dp * cfg.train.micro_batch_size

    def more_come(self, call: Call, ready: Sequence[Call]) -> bool:
        """Whether samples like this one arrive just now: they come one by one, and are drawn
        together in much less time."""
        if call.kind != SAMPLE or call.attempts:
            return False
        tenant = self.tenant_of(call)
        came = [each.accepted for each in ready if self.tenant_of(each) == tenant]
        now = time.time()
        return now - max(came) < GATHER_S and now - min(came) < 10 * GATHER_S

    def of(self, call: Call, ready: Sequence[Call]) -> list[Call]:
        """The call whose turn it is, and those that are done best with it."""
        if call.attempts:  # the process died in it once: it takes no others along
            return [call]
        others = [
            each
            for each in ready
            if each is not call and each.kind == call.kind and not each.attempts
        ]
        if call.kind == SAMPLE:
            return self._samples(call, others)
        if call.kind == "forward_backward":
            return self._filling(call, others)
        return [call]

    def sizes(self, together: Sequence[Call]) -> dict[str, float]:
        """What each one's part of the work is in proportion, by request."""
        if together[0].kind == SAMPLE or len(together) == 1:
            return dict.fromkeys((each.request_id for each in together), 1.0)
        return {each.request_id: max(self.readings.look(each).tokens, 1) for each in together}

    def _samples(self, call: Call, others: Sequence[Call]) -> list[Call]:
        """Samples of the same weights, the one whose turn it is first; more may join later."""
        ask = self.readings.look(call)
        if ask is None:
            return [call]
        tenant = self.tenant_of(call)
        found, samples = [call], ask.n
        for other in others:
            if self.tenant_of(other) != tenant:
                continue
            theirs = self.readings.look(other)
            if theirs is not None and samples + theirs.n <= TOGETHER:
                found.append(other)
                samples += theirs.n
        return found

    def _filling(self, call: Call, others: Sequence[Call]) -> list[Call]:
        """Gradients of as many models as fill the pipeline; a large call fills it alone."""
        found, left = [call], self.micro_batches - self._micro_batches(call)
        for other in others if left > 0 else ():
            taken = self._micro_batches(other)
            if taken <= left:
                found.append(other)
                left -= taken
        return found

    def _micro_batches(self, call: Call) -> float:
        """Of each replica; endless of what goes with no other."""
        if not self.in_memory(self.tenant_of(call)):
            return math.inf
        batch: Batch | None = self.readings.look(call)
        if batch is None or batch.forward_only:
            return math.inf
        return math.ceil(len(batch.rows) / self.rows)
