"""Memory of each rank of a run, and where its time went."""

from collections import defaultdict
from collections.abc import Iterator

from megatron_vlm.io.numbers_as_text import number, time_spent
from megatron_vlm.io.printable import show_count
from megatron_vlm.report.metrics_lines import UsageLine
from megatron_vlm.report.run.metrics_arrays import RunMetrics
from megatron_vlm.report.sections import Heading, Section, Table

_MAX_PHASES = 20
_MAX_RANKS = 16  # ranks in the table; of more, those with the most memory


def usage_section(metrics: RunMetrics) -> Iterator[Section]:
    """Yield the time of each phase and the memory of each rank; nothing for logs of older
    versions."""
    if not metrics.usages:
        return
    yield Heading("Time and memory", "Time")
    yield _phase_table(metrics.usages)
    yield _memory_table(metrics.usages[-1])


def _phase_table(usages: tuple[UsageLine, ...]) -> Table:
    seconds: defaultdict[str, float] = defaultdict(float)
    for usage in usages:
        for phase, value in usage.seconds.items():
            if 0 <= value < float("inf"):
                seconds[phase] += value
    total = sum(seconds.values()) or 1.0
    rows = [
        (phase, time_spent(value), number(value / total, percent=True))
        for phase, value in sorted(seconds.items(), key=lambda each: -each[1])[:_MAX_PHASES]
    ]
    caption = f"On the clock of rank 0, up to step {usages[-1].step:,}; with steps done again."
    return Table(("phase", "time", "share"), rows, caption)


def _memory_table(usage: UsageLine) -> Table:
    ranks = sorted(enumerate(usage.memory_gb), key=lambda rank: -rank[1])[:_MAX_RANKS]
    count = len(usage.memory_gb)
    rows = [(f"rank {rank}", f"{number(memory)} GB") for rank, memory in sorted(ranks)]
    which = f"The {_MAX_RANKS} fullest of {show_count(count, 'rank')}" if count > len(ranks) else ""
    caption = f"{which or 'The most since the start'}, at step {usage.step:,}."
    return Table(("rank", "memory"), rows, caption)
