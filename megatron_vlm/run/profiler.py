"""Trace by torch.profiler of some steps on some ranks: RUN/profile/rank-0.json.gz, for Perfetto or
chrome://tracing."""

from pathlib import Path
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import Platform


class Profiler:
    """A trace of the configured steps and ranks. Call `at` before each step; it does nothing on
    others."""

    def __init__(self, cfg: Config, rank: int, platform: Platform):
        steps = cfg.log.profile_steps if rank in cfg.log.profile_ranks else None
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
            # Without acc_events torch 2.11 warns that it forgets earlier cycles, but there are
            # none.
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
