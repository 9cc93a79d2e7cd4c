"""Map of the tokens that each expert got over the steps of a run."""

from collections.abc import Iterator

import numpy as np

from megatron_vlm.report.heat import HeatMap
from megatron_vlm.report.metrics_lines import MAX_LOADS, LoadLine
from megatron_vlm.report.run.metrics_arrays import RunMetrics
from megatron_vlm.report.sections import Heading, Section

_PERCENT = 100


def expert_section(metrics: RunMetrics) -> Iterator[Section]:
    """Yield the load of each expert of each layer; nothing for a model without experts."""
    if not metrics.loads:
        return
    loads = _comparable_loads(metrics.loads)
    yield Heading("Load of experts", "Experts")
    layers = loads[-1].layers
    cells_TRC = np.array([load.load for load in loads]) / _PERCENT
    steps = [load.step for load in loads]
    yield HeatMap("Tokens of experts", steps, "layer", layers, "expert", cells_TRC)


def _comparable_loads(loads: tuple[LoadLine, ...]) -> list[LoadLine]:
    """Return the loads whose layers and experts are those of the last load. If they are too many,
    return an evenly spaced choice."""

    def shape(line: LoadLine) -> tuple[list[int], int]:
        return line.layers, len(line.load[0])

    alike = [line for line in loads if shape(line) == shape(loads[-1])]
    if len(alike) <= MAX_LOADS + 1:
        return alike
    return [alike[place] for place in np.linspace(0, len(alike) - 1, MAX_LOADS + 1).astype(int)]
