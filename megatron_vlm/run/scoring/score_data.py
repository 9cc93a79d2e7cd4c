"""Scoring of data.train and data.eval: the files that a folder lacks are computed in order, by all
ranks, and written by rank 0. A kill loses the file that was being computed, and no other."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.objectives import records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.collate import MAX_ROWS
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.scores.score_file import (
    RecordScore,
    ScoreFile,
    digest_sample,
    save_scores,
    supervised_positions,
)
from megatron_vlm.data.scores.score_index import (
    ScoredSet,
    ScoreIndex,
    check_folder,
    digest_vocabulary,
)
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_bytes, broadcast_json
from megatron_vlm.errors import DataError
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.training.data_feed import SharedBatches, open_together
from megatron_vlm.training.top_targets import TopTargets, top_targets
from megatron_vlm.training.worker import MegatronWorker

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


class Scorer:
    """The data sets of a configuration, and the folder of their scores. Its methods are
    collectives."""

    def __init__(
        self,
        worker: MegatronWorker,
        cfg: Config,
        folder: Path,
        settings: ScoreSettings,
        weights: str,
    ):
        """Open the sets and the folder. `weights` is a digest of the model's weights."""
        self.cfg = cfg
        self.worker, self.folder, self.settings = worker, folder, settings
        self.device = worker.platform.device
        sets = [("data.train", cfg.data.train)] if cfg.data.train else []
        sets += [(entry.name, (entry.source,)) for entry in cfg.data.eval]
        self.sets = [self._open(*each) for each in sets]
        self.index = ScoreIndex(
            model=cfg.model.path,
            weights=weights,
            vocabulary=digest_vocabulary(
                read_tokenizer(cfg.model.path, cfg.data.add_tokens).get_vocab()
            ),
            top_k=settings.top_k,
            temperature=settings.temperature,
            precision=str(compute_dtype(cfg, worker.platform)).removeprefix("torch."),
            sets=tuple(each.scored for each in self.sets),
        )
        existing: Collection[str] = ()
        with fail_together(self.device, DataError):
            if dist.get_rank() == 0:
                existing = check_folder(folder, self.index)
        present = broadcast_json(sorted(existing), 0, None, self.device)
        self.present = frozenset(present)

    def _open(self, name: str, specs: Sequence[SourceSpec]) -> OpenedSet:
        grid, cfg = self.worker.grid, self.cfg

        def opening() -> tuple[DataSet, Any]:
            share, sizes = (grid.dp.rank, grid.dp.size), self.worker.source.sizes
            data = open_data(
                *(specs, name, cfg.data, cfg.model.path, sizes, share),
                train=False,
                kind=records_of(cfg),
            )
            assert isinstance(data, DataSet)
            chunk = -(-RECORDS_PER_FILE // cfg.eval.batch_size) * cfg.eval.batch_size
            return data, asdict(ScoredSet(name, _digest_of(data), data.length, chunk))

        data, scored = open_together(name, grid, self.device, opening, self.worker.watchdog)
        return OpenedSet(ScoredSet(**scored), data)

    @property
    def missing(self) -> int:
        """Number of files that are still to be computed."""
        return sum(name not in self.present for name in self.index.files)

    def compute(self, report: Callable[[int, int], None]) -> None:
        """Compute the missing files. `report` receives the numbers of computed and of missing
        files, on rank 0."""
        done, missing = 0, self.missing
        for number, opened in enumerate(self.sets):
            names, starts = opened.scored.files(number), opened.scored.starts
            pairs = zip(names, starts, strict=True)
            for is_present, run in groupby(pairs, lambda pair: pair[0] in self.present):
                if is_present:
                    continue
                files = list(run)
                for name, records in self._chunks(opened, files):
                    with fail_together(self.device, DataError):
                        if dist.get_rank() == 0:
                            _write(self.folder / name, records)
                    done += 1
                    if dist.get_rank() == 0:
                        report(done, missing)

    def _chunks(
        self, opened: OpenedSet, files: Sequence[tuple[str, int]]
    ) -> Iterator[tuple[str, list[RecordScore]]]:
        """Yield the records of neighbouring files, on rank 0, and nothing of them on others."""
        grid, cfg, size = self.worker.grid, self.cfg, self.cfg.eval.batch_size
        loader = None
        if opened.data is not None:
            replica, limits = Replica(grid.dp.rank, grid.dp.size), Limits.from_config(cfg.train)
            start = Position(0, files[0][1])
            loader = Loader(opened.data, cfg.data, size, limits, replica, start, epochs=1)
        batches = SharedBatches(loader, grid, self.device)
        for name, start_of_file in files:
            end = min(start_of_file + opened.scored.chunk, opened.scored.samples)
            records: list[RecordScore] = []
            for first in range(start_of_file, end, size):
                by_place = self._score_batch(batches.next().micro_batches)
                if dist.get_rank() == 0:
                    assert opened.data is not None
                    for place, targets in sorted(by_place.items()):
                        sample, row = self._place_of(place)
                        records.append(_record(opened.data, first + sample, row, targets))
            yield name, records

    def _score_batch(self, micro_batches: Sequence[Any]) -> dict[int, TopTargets]:
        """Return the scores of the rows of a global batch, by `MicroBatch.rows`."""
        self.worker.watchdog.busy()
        settings = self.settings.top_k, self.settings.temperature
        rows = top_targets(self.worker.stage, micro_batches, *settings)
        places = sorted(place for batch in micro_batches for place in batch.rows)
        # One dtype for all three: float32 has every id.
        packed = pack(
            {
                str(place): (True, [row.label_log_probs_N, row.ids_NJ.float(), row.log_probs_NR])
                for place, row in zip(places, rows, strict=True)
            },
            {},
        )
        by_place: dict[int, TopTargets] = {}
        for message in all_gather_bytes(packed, self.worker.grid.dp.group, self.device):
            for place, (_, (label_N, ids_NJ, log_probs_NR)) in unpack(message)[0].items():
                by_place[int(place)] = TopTargets(label_N, ids_NJ.int(), log_probs_NR)
        return by_place

    def _place_of(self, place: int) -> tuple[int, int]:
        """Return the sample of a row, by its place in the global batch, and the row's number."""
        return (place, 0) if records_of(self.cfg) == "chat" else divmod(place, MAX_ROWS)

    def finish(self, summary: list[dict[str, Any]]) -> None:
        """Mark the folder as complete, with these results. Only rank 0 calls it."""
        replace(self.index, is_complete=True, summary=summary).write(self.folder)

    def files(self) -> Iterator[tuple[OpenedSet, int, ScoreFile]]:
        """Yield each file of scores with its set and the number of its first record."""
        for number, opened in enumerate(self.sets):
            for name, start in zip(opened.scored.files(number), opened.scored.starts, strict=True):
                yield opened, start, ScoreFile.open(self.folder / name)


def _write(path: Path, records: Sequence[RecordScore]) -> None:
    try:
        save_scores(path, records)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror}",
            place=str(path),
            remedy="free space there and run the same command again: it continues with this file",
        ) from error


def _record(data: DataSet, number: int, row: int, targets: TopTargets) -> RecordScore:
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
