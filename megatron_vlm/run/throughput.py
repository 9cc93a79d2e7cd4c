"""Figures of a step: rates, memory, and whether it was applied."""

import math
import time

import torch.distributed as dist

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.distributed.device import Platform
from megatron_vlm.errors import TrainError
from megatron_vlm.report.metrics_lines import (
    DISTILL_FIGURES,
    PREFERENCE_FIGURES,
    RETRIEVAL_FIGURES,
    StepLine,
)
from megatron_vlm.training.worker import StepMetrics

_FIGURES = (*PREFERENCE_FIGURES, *RETRIEVAL_FIGURES, *DISTILL_FIGURES)


class Meter:
    """A meter of the seconds, rates and memory of a step."""

    def __init__(self, platform: Platform):
        self.platform = platform
        peak = self.platform.peak_flops()
        self.peak = None if peak is None else peak * dist.get_world_size()
        self.last = time.perf_counter()

    def skip(self) -> None:
        """Do not count the time since the last reading as part of a step."""
        self.last = time.perf_counter()

    def read(
        self,
        step: int,
        epoch: int,
        metrics: StepMetrics,
        lr: float,
        norm: float,
        batch: BatchFigures,
    ) -> StepLine:
        """Return the figures since the last reading."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        # A backward is twice the work of a forward. Recomputation does not count as work.
        flops_per_s = 3 * batch.work / seconds
        empty = not metrics.num_tokens
        finite = math.isfinite(metrics.loss) and math.isfinite(norm)
        return StepLine(
            step=step,
            epoch=epoch,
            loss=math.nan if empty else metrics.loss,
            lr=lr,
            grad_norm=norm,
            seconds=seconds,
            tokens_per_s=batch.tokens / seconds,
            trained_tokens_per_s=metrics.num_tokens / seconds,
            images_per_s=batch.images / seconds,
            padding=1 - batch.tokens / batch.padded,
            mfu=None if self.peak is None else flops_per_s / self.peak,
            memory_gb=self.platform.memory_peak() / 2**30,
            skipped=not (empty or finite),
            empty=empty,
            expert_load=metrics.means.get("expert_load"),
            balance_loss=metrics.means.get("balance_loss"),
            z_loss=metrics.means.get("z_loss"),
            samples=batch.samples,
            **{name: metrics.means.get(name) for name in _FIGURES},
        )


class NonFiniteGuard:
    """A counter of steps that are not applied, because no token is trained or because the loss or
    gradient is not finite. Too many non-finite steps in a row end the run."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.total, self.in_a_row = 0, 0
        self.empty = 0

    def check(self, step: int, metrics: StepMetrics, norm: float) -> str | None:
        """Return a warning about this step, or None. Raise if the configuration requires a stop."""
        loss = metrics.loss
        if not metrics.num_tokens:
            self.empty += 1
            return (
                f"step {step}: no token of its batch is trained: not applied ({self.empty} so far)"
            )
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        train = self.cfg.train
        if train.on_nonfinite == "stop" or self.in_a_row > train.max_nonfinite:
            raise TrainError(
                f"loss {loss}, gradient norm {norm}: not applied, {self.in_a_row} in a row "
                f"(train.on_nonfinite={train.on_nonfinite}, "
                f"train.max_nonfinite={train.max_nonfinite})",
                place=f"step {step}",
                remedy="lower optim.lr, or look at the data",
            )
        return f"step {step}: loss {loss}, gradient norm {norm}: not applied ({self.total} so far)"
