"""A plan as one HTML page: the layouts, the memory of each stage, the pipeline and its bubble."""

from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.commands.plan.plan_content import MEMORY, Plan, assumptions, degrees, memory_cells
from megatron_vlm.io.numbers_as_text import time_spent
from megatron_vlm.planner.pipeline_time import Stages, Task
from megatron_vlm.planner.search import Candidate
from megatron_vlm.report.html import Html, document, table, tag, tiles

_WIDE, _LEFT, _ROW, _TOP = 1000, 66, 30, 8
_MIN_NUMBERED_WIDTH = 15  # units of width that a number needs


def render_plan(plan: Plan) -> str:
    """Return the whole page."""
    css = Path(__file__).with_name("planning.css").read_text()
    return document("Plan of a layout", css, _body(plan))


def _body(plan: Plan) -> Iterator[Html]:
    best, cluster = plan.candidates[0], plan.cluster
    yield tag("h1", f"{cluster.gpus} x {cluster.machine.name}, {cluster.memory / 2**30:,.0f} GiB")
    yield tag("p", plan.cfg.model.path, class_="quiet")
    yield tiles(
        [
            (f"{best.tokens_per_s:,.0f}", "tokens/s, predicted"),
            (time_spent(best.step_s), "a step"),
            (f"{best.need / 2**30:.1f} GiB", "on the fullest rank"),
            (f"{best.bubble:.0%}", "of the time stages wait"),
        ]
    )
    yield tag("h2", "Layouts")
    caption = f"The fastest of {plan.tried:,} that fit. GiB: of the fullest rank."
    columns, *lines = plan.layouts
    yield table(columns, lines, caption)
    yield tag("p", "The fastest: ", tag("code", " ".join(best.overrides)), class_="keys")
    pipelined = plan.pipeline
    if pipelined is not None:
        yield tag("h2", "Pipeline")
        yield _pipeline(pipelined)
    yield tag("h2", "Memory of the fastest")
    yield table(MEMORY, memory_cells(best), "GiB of one rank of each stage.")
    yield tag("h2", "Assumed")
    yield tag("ul", *(tag("li", sentence) for sentence in assumptions(plan)), class_="card assumed")


def _pipeline(drawn: Candidate) -> Html:
    assert drawn.stages is not None
    words = (
        f"{degrees(drawn)}, layers {list(drawn.dims.layers_per_stage)}: one step of one replica. "
        f"Stages wait {drawn.bubble:.0%} of the time."
    )
    legend = tag(
        "div",
        tag("span", tag("i", class_="f"), "forward"),
        tag("span", tag("i", class_="b"), "backward"),
        tag("span", tag("i", class_="w"), "waiting"),
        class_="legend quiet",
    )
    caption = tag("figcaption", words)
    return tag(
        "figure", legend, pipeline_picture(drawn.stages, words), caption, class_="card scroll"
    )


def pipeline_picture(stages: Stages, words: str) -> Html:
    """Return the pipeline as SVG: a row for each stage, a box for each forward and backward."""
    count, end = stages.forward_GS.shape[1], stages.seconds
    scale, high = (_WIDE - _LEFT) / end, _TOP + _ROW * count
    parts: list[Html] = []
    for stage in range(count):
        top = _TOP + stage * _ROW
        parts.append(tag("text", f"stage {stage}", x=0, y=top + 17))
        box = dict(x=_LEFT, y=top, width=_WIDE - _LEFT, height=_ROW - 6)
        parts.append(tag("rect", **box, class_="w"))
    parts += [_box(task, scale) for task in stages.tasks]
    parts.append(tag("text", "0", x=_LEFT, y=high + 16))
    parts.append(tag("text", f"{end:.2f} s", x=_WIDE, y=high + 16, text_anchor="end"))
    size = f"0 0 {_WIDE} {high + 24}"
    return tag("svg", *parts, viewBox=size, role="img", aria_label=words)


def _box(task: Task, scale: float) -> Html:
    left, wide = _LEFT + task.start * scale, (task.end - task.start) * scale
    top = _TOP + task.stage * _ROW
    kind = "forward" if task.forward else "backward"
    label = (
        f"{kind} of micro-batch {task.micro} on stage {task.stage}: {task.end - task.start:.3f} s"
    )
    gap = min(0.8, wide / 4)
    box = {"x": left, "y": top, "width": wide - gap, "height": _ROW - 6}
    rect = tag("rect", **{k: f"{v:.2f}" for k, v in box.items()}, class_=kind[0])
    number = []
    if wide >= _MIN_NUMBERED_WIDTH:
        middle = f"{left + wide / 2:.2f}"
        number.append(tag("text", str(task.micro), x=middle, y=top + 16, text_anchor="middle"))
    return tag("g", tag("title", label), rect, *number)
