"""Results of a scored data set: means of each source, and the records that the model finds least
likely."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.run.scoring.score_folder import ScoreFolder

_SHOWN = 10  # records with the highest perplexity


@dataclass
class SourceScore:
    """Sums over the supervised tokens of a source."""

    set: str
    source: str
    records: int = 0
    tokens: int = 0
    sum: float = 0.0

    def line(self) -> dict[str, Any]:
        """Return the line of JSON: the means over the tokens."""
        mean = self.sum / max(self.tokens, 1)
        counts = {key: value for key, value in asdict(self).items() if key != "sum"}
        return {**counts, "log_prob": mean, "perplexity": perplexity(mean)}


@dataclass(frozen=True, order=True)
class RecordLine:
    """A record by its perplexity."""

    perplexity: float
    tokens: int
    where: str


def perplexity(mean_log_prob: float) -> float:
    """Return e^(-mean); infinity stands for what no float can hold."""
    return math.exp(-mean_log_prob) if mean_log_prob > -700 else math.inf


def summarize(folder: ScoreFolder) -> tuple[list[dict[str, Any]], list[RecordLine]]:
    """Return a line for each source, and the records with the highest perplexity. Only rank 0 calls
    it."""
    scores: dict[tuple[str, int], SourceScore] = {}
    for opened in folder.sets:
        assert opened.data is not None
        for place, source in enumerate(opened.data.sources):
            name = opened.scored.name
            scores[name, place] = SourceScore(name, source.name)
    worst = heapq.nlargest(_SHOWN, _records(folder, scores))
    return [score.line() for score in scores.values() if score.records], worst


def _records(
    folder: ScoreFolder, scores: dict[tuple[str, int], SourceScore]
) -> Iterator[RecordLine]:
    """Yield every record, and add it to the score of its source."""
    for opened, _, file in folder.files():
        assert isinstance(opened.data, DataSet)
        columns = zip(file.columns["numbers"], file.where, file.log_probs(), strict=True)
        before = None
        for number, where, log_probs_N in columns:
            score = scores[opened.scored.name, opened.data.handle(int(number))[0]]
            total = math.fsum(log_probs_N.tolist())
            score.records += int(number != before)  # the answers of a pair are neighbours
            before = number
            score.tokens += len(log_probs_N)
            score.sum += total
            yield RecordLine(perplexity(total / len(log_probs_N)), len(log_probs_N), where)


def print_tables(lines: Sequence[dict[str, Any]], worst: Sequence[RecordLine]) -> None:
    """Print the results for people. They go to stderr: stdout has JSON alone."""
    from rich.console import Console
    from rich.text import Text

    from megatron_vlm.report.terminal import plain_table

    console, table = Console(stderr=True, highlight=False), plain_table()
    for name in ("set", "source"):
        table.add_column(name, overflow="fold")
    for name in ("records", "tokens", "log-prob", "perplexity"):
        table.add_column(name, justify="right")
    for line in lines:
        names = (Text(escape_controls(line[key])) for key in ("set", "source"))
        counts = (f"{line[key]:,}" for key in ("records", "tokens"))
        table.add_row(*names, *counts, f"{line['log_prob']:.4f}", f"{line['perplexity']:.4g}")
    console.print(table)
    # A line per record that no width folds, so that a path can be copied.
    console.print("perplexity  tokens  records with the highest perplexity", soft_wrap=True)
    for record in worst:
        place = escape_controls(record.where)
        shown = f"{record.perplexity:>10.4g}  {record.tokens:>6,}  {place}"
        console.print(Text(shown), soft_wrap=True)
