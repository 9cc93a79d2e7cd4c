"""Map of cells over time, drawn by heat.js: each cell is compared with the mean of its row.

Shapes: T times, R rows, C columns.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_vlm.report.markup import Html, json_block, tag
from megatron_vlm.report.sections import Section

_HERE = Path(__file__).parent
UNIT = 32  # a cell of the page is a byte, in which this value is the mean


@dataclass(frozen=True)
class HeatMap(Section):
    """Map whose `cells_TRC` are multiples of the mean of their row."""

    title: str
    steps: Sequence[int]  # one for each time
    row: str  # the kind of a row, such as "layer"
    rows: Sequence[int]  # numbers of the rows
    column: str
    cells_TRC: np.ndarray


def heat_figure(heat: HeatMap) -> Html:
    """Return the figure of a map, with a slider over its times."""
    times, _, columns = heat.cells_TRC.shape
    where = f"Rows are {heat.row}s {heat.rows[0]} to {heat.rows[-1]}, columns {heat.column}s 0 to "
    where += f"{columns - 1}. {_summary(heat)}"
    last = {"min": 0, "max": times - 1, "value": times - 1, "step": 1}
    slider = tag("input", type="range", **last, aria_label="step", autocomplete="off")
    label = tag("label", "step ", slider, " ", tag("output"), class_="quiet")
    canvas = tag("canvas", tabindex="0", role="img", aria_label=f"{heat.title}: {where}")
    info = tag("p", class_="quiet", aria_live="polite")
    scale = tag("span", tag("i", class_="scale"), class_="quiet")
    legend = tag("div", "none ", scale, " 4 times the mean or more", class_="quiet legend")
    data = {
        "steps": list(heat.steps),
        "row": heat.row,
        "rows": list(heat.rows),
        "column": heat.column,
        "columns": columns,
        "unit": UNIT,
        "cells": base64.b64encode(_bytes(heat.cells_TRC)).decode(),
    }
    cells = tag("div", canvas, tag("b"), class_="cells")
    title = tag("div", tag("b", heat.title), " ", label)
    caption = tag("figcaption", where)
    return tag("figure", title, cells, info, legend, caption, json_block(data), class_="card heat")


def heat_script() -> str:
    """Return the script of a page with maps."""
    return (_HERE / "heat.js").read_text()


def heat_css() -> str:
    """Return the styles that a page with maps needs in addition to those of charts."""
    return (_HERE / "heat.css").read_text()


def _bytes(cells_TRC: np.ndarray) -> bytes:
    return (UNIT * cells_TRC).round().clip(0, 255).astype(np.uint8).tobytes()


def _summary(heat: HeatMap) -> str:
    """Describe the busiest cell of the last time, and count the cells that are empty."""
    last_RC = heat.cells_TRC[-1]
    row, column = divmod(int(last_RC.argmax()), last_RC.shape[1])
    num_empty = int((last_RC == 0).sum())
    return (
        f"At step {heat.steps[-1]:,} the most is {last_RC.max():.2f} times the mean, of "
        f"{heat.column} {column} in {heat.row} {heat.rows[row]}; {num_empty:,} of {last_RC.size:,} "
        "have nothing."
    )
