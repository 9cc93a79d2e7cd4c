"""Table of public benchmarks: before, after, the difference and its standard error."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile
from megatron_vlm.report.sections import Heading, Note, Section, Table

BENCH_FILE = "bench/scores.json"  # in the folder of a run
BENCH_COLUMNS = ("task", "score", "before", "after", "difference", "samples")


@dataclass(frozen=True)
class BenchLine:
    """A score of both models. A figure that is not known is None."""

    task: str
    metric: str
    before: float
    after: float
    standard_error: float | None = None  # The difference has this error.
    samples: int | None = None
    is_paired: bool = False  # the error is that of the samples' differences


@dataclass(frozen=True)
class Benchmark:
    """The scores of one suite."""

    suite: str
    time: str
    lines: tuple[BenchLine, ...]


def read_benchmark(folder: Path) -> Benchmark | None:
    """Return what bench/scores.json says; None where there is no such file."""
    path = folder / BENCH_FILE
    if not path.is_file():
        return None
    return UntrustedFile(str(path)).json().read(Benchmark)


def bench_cells(line: BenchLine) -> tuple[str, ...]:
    """Return the cells of BENCH_COLUMNS."""
    change = f"{line.after - line.before:+.4f}"
    if line.standard_error is not None:
        change += f" \u00b1 {line.standard_error:.4f}"
    count = "" if line.samples is None else f"{line.samples:,}"
    return line.task, line.metric, f"{line.before:.4f}", f"{line.after:.4f}", change, count


def bench_section(folder: Path) -> Iterator[Section]:
    """Yield the table of a run's benchmarks; nothing for a run without them."""
    heading = Heading("Benchmarks", "Benchmarks")
    try:
        benchmark = read_benchmark(folder)
    except DataError as error:
        yield from (heading, Note(str(error), "alarm"))
        return
    if benchmark is not None:
        caption = (
            f"{benchmark.suite}, {benchmark.time}. The base model before, the export after, both "
            "by vLLM. \u00b1 is the standard error of the difference."
        )
        rows = [*map(bench_cells, benchmark.lines)]
        yield from (heading, Table(BENCH_COLUMNS, rows, caption))


def bench_markdown(benchmark: Benchmark) -> str:
    """Return the table for a model card."""
    rows = ["| " + " | ".join(BENCH_COLUMNS) + " |", "|---" * len(BENCH_COLUMNS) + "|"]
    rows += ["| " + " | ".join(bench_cells(line)) + " |" for line in benchmark.lines]
    return f"{benchmark.suite}, {benchmark.time}:\n\n" + "\n".join(rows) + "\n"
