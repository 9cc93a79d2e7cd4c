"""Progress of the service in the terminal."""

import time
from collections.abc import Callable, Mapping

from megatron_vlm.distributed.process import print_to_user

STATUS_EVERY_S = 10.0


class ProgressLine:
    """Line about the last seconds, printed only if calls were done in them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.last = clock, clock()
        self.calls, self.busy_s = 0, 0.0
        self.before: dict[str, float] = {}

    def record_work(self, calls: int, seconds: float) -> None:
        """Count calls that were done."""
        self.calls += calls
        self.busy_s += seconds

    def update(self, gauges: Mapping[str, float], waiting: int) -> None:
        """Print the line when it is due; call this often."""
        seconds = self.clock() - self.last
        if seconds < STATUS_EVERY_S:
            return
        if self.calls:
            print_to_user(self._line(gauges, waiting, seconds))
        self.last, self.calls, self.busy_s = self.clock(), 0, 0.0
        self.before = dict(gauges)

    def _line(self, gauges: Mapping[str, float], waiting: int, seconds: float) -> str:
        def since(name: str) -> float:
            return gauges.get(name, 0.0) - self.before.get(name, 0.0)

        return (
            f"{self.calls} calls in {seconds:.0f} s ({self.busy_s / seconds:.0%} busy): "
            f"{since('trained_tokens_total') / seconds:,.0f} tokens/s through models, "
            f"{since('optimizer_steps_total'):.0f} steps, {since('samples_total'):.0f} samples; "
            f"{gauges.get('models_in_memory', 0):.0f} models in memory, {waiting} calls wait"
        )
