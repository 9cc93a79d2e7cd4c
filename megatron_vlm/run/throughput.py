"""Speed of a run: rates and memory of its steps, seconds of its phases, and traces by
torch.profiler in RUN/profile, for Perfetto or chrome://tracing."""

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

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

_FIGURES: tuple[str, ...] = (*PREFERENCE_FIGURES, *RETRIEVAL_FIGURES, *DISTILL_FIGURES)
_FIGURES += ("expert_load", "balance_loss", "z_loss", "mtp_loss", "mtp_accepted")


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
            samples=batch.samples,
            shared_patches=batch.shared_patches / batch.patches if batch.shared_patches else None,
            **{name: metrics.means.get(name) for name in _FIGURES},
        )


class NonFiniteGuard:
    """A counter of steps that are not applied, because no token is trained or because the loss or
    gradient is not finite. Too many non-finite steps in a row end the run."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.total = self.in_a_row = self.empty = 0

    def check(self, step: int, metrics: StepMetrics, norm: float) -> str | None:
        """Return a warning about this step, or None. Raise if the configuration requires a stop."""
        loss = metrics.loss
        if not metrics.num_tokens:
            self.empty += 1
            why = "no token of its batch is trained"
            return f"step {step}: {why}: not applied ({self.empty} so far)"
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


class PhaseTimes:
    """A clock of phases, each of which begins with a call."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "start", time.perf_counter()

    def begin(self, phase: str) -> None:
        """End the phase before, and begin this one."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. The phase goes on."""
        self.begin(self._phase)
        taken = {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class Profiler:
    """A trace of the configured steps of rank 0. It does nothing on others."""

    def __init__(self, cfg: Config, rank: int, platform: Platform):
        steps = cfg.log.profile_steps if rank == 0 else None
        self.first, self.last = steps or (-1, -1)
        self.path = Path(cfg.run) / "profile" / f"rank-{rank}.json.gz"
        self.platform = platform
        self.running: Any = None

    def begin_step(self, step: int) -> None:
        """Start or stop the trace if this step is the first or comes after the last."""
        if step == self.last:
            self.close()
        elif step == self.first:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU]
            if self.platform.is_cuda:
                activities.append(ProfilerActivity.CUDA)
            # Without acc_events torch 2.11 warns of earlier cycles, which there are none of.
            self.running = profile(activities=activities, record_shapes=True, acc_events=True)
            self.running.start()

    def close(self) -> None:
        """Write the trace, if one is running."""
        if self.running is None:
            return
        self.running.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.running.export_chrome_trace(str(self.path))
        self.running = None
