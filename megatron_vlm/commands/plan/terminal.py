"""A plan in the terminal: the best layouts, the memory of each stage, the pipeline as text."""

from rich.console import Console
from rich.table import Table

from megatron_vlm.commands.plan.plan_content import MEMORY, Plan, assumptions, degrees, memory_cells
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.planner.search import Candidate
from megatron_vlm.report.terminal import plain_table

_WIDTH = 72
_IDLE = "."


def print_plan(plan: Plan, console: Console) -> None:
    """Print the whole plan."""
    for sentence in assumptions(plan):
        console.print(sentence, markup=False, soft_wrap=True)
    columns, *lines = plan.layouts
    console.print(_table(columns, lines))
    best = plan.candidates[0]
    console.print(f"The fastest: {' '.join(best.overrides)}", markup=False, soft_wrap=True)
    console.print(_table(MEMORY, memory_cells(best)))
    if (pipelined := plan.pipeline) is not None:
        console.print(heading(pipelined), markup=False, soft_wrap=True)
        assert pipelined.stages is not None
        console.print(pipeline_text(pipelined.stages), markup=False, soft_wrap=True)


def heading(drawn: Candidate) -> str:
    """Return the title of the drawing."""
    return (
        f"Pipeline of {degrees(drawn)}, one step: digits are forwards, letters backwards, dots "
        f"wait ({drawn.bubble:.0%})"
    )


def pipeline_text(stages: Stages, width: int = _WIDTH) -> str:
    """Return a line for each stage. Micro-batch 0 is 0 in forward and a in backward; micro-batch 10
    is 0 and a again."""
    end = stages.seconds
    lines = [[_IDLE] * width for _ in range(stages.forward_GS.shape[1])]
    for task in stages.tasks:
        sign = chr(ord("0" if task.forward else "a") + task.micro % 10)
        first, last = (round(width * time / end) for time in (task.start, task.end))
        lines[task.stage][first:last] = sign * (last - first)
    return "\n".join(f"stage {stage}  {''.join(line)}" for stage, line in enumerate(lines))


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = plain_table()
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
