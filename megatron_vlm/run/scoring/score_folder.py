"""A folder of scores that is written: its data sets, the files that it still lacks, and its index.
Then the results of each data set: means of each source, and the records that the model finds least
likely."""

import hashlib
import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.objectives import records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.scores.score_file import (
    RecordScore,
    ScoreFile,
    digest_sample,
    save_scores,
    supervised_positions,
)
from megatron_vlm.data.scores.score_index import ScoredSet, ScoreIndex, digest_vocabulary
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.training.row_scores import RowScores

RECORDS_PER_FILE = 512  # records of a file, rounded up to whole batches


@dataclass(frozen=True)
class ScoreSettings:
    """Values that are stored for each supervised token in addition to its own log-prob."""

    top_k: int = 0  # number of most likely tokens; 0: none
    temperature: float = 1.0  # divisor of the logits of these tokens


@dataclass(frozen=True)
class OpenedSet:
    """A data set on this rank; only the loading ranks have `data`."""

    scored: ScoredSet
    data: DataSet | None


@dataclass(frozen=True)
class MissingFile:
    """A file that is to be computed: its name, and the numbers of its records."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class ScoreFolder:
    """A folder, its data sets, and the names of the files that it had at the start."""

    path: Path
    index: ScoreIndex
    sets: Sequence[OpenedSet]
    present: frozenset[str]
    is_writer: bool = True  # only rank 0 writes

    @property
    def missing(self) -> int:
        """Number of files that are still to be computed."""
        return sum(name not in self.present for name in self.index.files)

    def gaps(self) -> Iterator[tuple[OpenedSet, list[MissingFile]]]:
        """Yield the missing files: those that are neighbours together, with their set."""
        for number, opened in enumerate(self.sets):
            scored = opened.scored
            pairs = zip(scored.files(number), scored.starts, strict=True)
            for is_present, run in groupby(pairs, lambda pair: pair[0] in self.present):
                if not is_present:
                    yield (
                        opened,
                        [
                            MissingFile(name, start, min(start + scored.chunk, scored.samples))
                            for name, start in run
                        ],
                    )

    def compute(
        self,
        score: "Callable[[OpenedSet, Sequence[MissingFile]], Iterator[ScoredFile]]",
        report: Callable[[int, int], None],
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Write the missing files. `score` yields the records of neighbouring files, `report` gets
        the numbers of written and of missing files, and `together` raises an error on all ranks."""
        done, missing = 0, self.missing
        for opened, files in self.gaps():
            for name, records in score(opened, files):
                with together():
                    if self.is_writer:
                        self._write(name, records)
                done += 1
                if self.is_writer:
                    report(done, missing)

    def _write(self, name: str, records: Sequence[RecordScore]) -> None:
        try:
            save_scores(self.path / name, records)
        except OSError as error:
            raise DataError(
                f"cannot be written: {error.strerror}",
                place=str(self.path / name),
                remedy="free space there and run the same command again: it continues with this "
                "file",
            ) from error

    def finish(self, summary: list[dict[str, Any]]) -> None:
        """Mark the folder as complete, with these results."""
        replace(self.index, is_complete=True, summary=summary).write(self.path)

    def files(self) -> Iterator[tuple[OpenedSet, int, ScoreFile]]:
        """Yield each file of scores with its set and the number of its first record."""
        for number, opened in enumerate(self.sets):
            for name, start in zip(opened.scored.files(number), opened.scored.starts, strict=True):
                yield opened, start, ScoreFile.open(self.path / name)


ScoredFile = tuple[str, list[RecordScore]]  # name and records, which only the writer needs


def scored_sets(cfg: Config) -> list[tuple[str, Collection[SourceSpec]]]:
    """Return the names and sources of the sets that are scored."""
    sets: list[tuple[str, Collection[SourceSpec]]] = []
    if cfg.data.train:
        sets.append(("data.train", cfg.data.train))
    return sets + [(entry.name, (entry.source,)) for entry in cfg.data.eval]


def open_scored(
    name: str,
    specs: Sequence[SourceSpec],
    cfg: Config,
    sizes: ModelSizes,
    share: tuple[int, int] = (0, 1),
) -> tuple[DataSet, ScoredSet]:
    """Open a set, with all of its records. `share` is that of open_data."""
    data = open_data(
        *(specs, name, cfg.data, cfg.model.path, sizes, share), train=False, kind=records_of(cfg)
    )
    assert isinstance(data, DataSet)
    chunk = -(-RECORDS_PER_FILE // cfg.eval.batch_size) * cfg.eval.batch_size
    return data, ScoredSet(name, _digest_of(data), data.length, chunk)


def index_of(
    cfg: Config, settings: ScoreSettings, weights: str, precision: str, sets: Sequence[OpenedSet]
) -> ScoreIndex:
    """Return the index of a folder. `weights` is a digest of the model's weights."""
    vocabulary = read_tokenizer(cfg.model.path, cfg.data.add_tokens).get_vocab()
    return ScoreIndex(
        model=cfg.model.path,
        weights=weights,
        vocabulary=digest_vocabulary(vocabulary),
        top_k=settings.top_k,
        temperature=settings.temperature,
        precision=precision,
        sets=tuple(each.scored for each in sets),
    )


def record_score(data: DataSet, number: int, row: int, targets: RowScores) -> RecordScore:
    """Return the score of a row of a record, which has several if it is a pair."""
    source, place = data.handle(number)
    example = data.indexes[source].example(place)
    sample, where = example[row], data.where((source, place))
    if len(example) > 1:
        where += ", rejected answer" if sample.is_rejected else ", chosen answer"
    positions_N = supervised_positions(sample)
    assert len(positions_N) == len(targets.label_log_probs_N)
    has_top = bool(targets.ids_NJ.shape[1])
    return RecordScore(
        number=number,
        digest=int(data.indexes[source].digests[place]),
        sample_digest=digest_sample(sample),
        tokens=len(sample.ids_S),
        where=where,
        positions_N=positions_N,
        ids_N=sample.ids_S[positions_N],
        log_probs_N=targets.label_log_probs_N.numpy(),
        top_ids_NJ=targets.ids_NJ.numpy() if has_top else None,
        top_log_probs_NR=targets.log_probs_NR.numpy() if has_top else None,
    )


def _digest_of(data: DataSet) -> str:
    """Return a digest of the records of a set, of their order and of the sizes of their samples."""
    hasher = hashlib.blake2b(digest_size=16)
    for index in data.indexes:
        for column in (index.digests, index.tokens, index.supervised):
            hasher.update(column.astype("<i8").tobytes())
    return hasher.hexdigest()


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
    """Return a line for each source, and the records of the highest perplexity, on rank 0."""
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

    console = Console(stderr=True, highlight=False)
    table = plain_table("set", "source", "records", "tokens", "log-prob", "perplexity", first=2)
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
