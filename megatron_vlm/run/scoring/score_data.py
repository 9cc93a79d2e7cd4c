"""Scoring of data.train and data.eval: the files that a folder lacks are computed in order, by all
ranks, and written by rank 0. A kill loses the file that was being computed, and no other."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.micro_batch import RowPlace
from megatron_vlm.data.scores.score_file import RecordScore
from megatron_vlm.data.scores.score_index import ScoredSet, check_folder
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_bytes, broadcast_json
from megatron_vlm.errors import DataError
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.run.scoring.score_folder import (
    MissingFile,
    OpenedSet,
    Report,
    ScoreFolder,
    ScoreSettings,
    index_of,
    open_scored,
    record_score,
    scored_sets,
)
from megatron_vlm.training.data_feed import SharedBatches, open_together
from megatron_vlm.training.row_scores import TopTargets, top_targets, values_by_place
from megatron_vlm.training.worker import MegatronWorker


class Scorer:
    """The data sets of a configuration, and the folder of their scores. Its methods are
    collectives."""

    def __init__(
        self, worker: MegatronWorker, cfg: Config, path: Path, settings: ScoreSettings, weights: str
    ):
        """Open the sets and the folder. `weights` is a digest of the model's weights."""
        self.cfg, self.worker, self.settings = cfg, worker, settings
        self.device = worker.platform.device
        sets = [self._open(name, tuple(specs)) for name, specs in scored_sets(cfg)]
        precision = str(compute_dtype(cfg, worker.platform)).removeprefix("torch.")
        index = index_of(cfg, settings, weights, precision, sets)
        existing: Collection[str] = ()
        with fail_together(self.device, DataError):
            if dist.get_rank() == 0:
                existing = check_folder(path, index)
        present = broadcast_json(sorted(existing), 0, None, self.device)
        self.folder = ScoreFolder(path, index, sets, frozenset(present))

    def _open(self, name: str, specs: Sequence[SourceSpec]) -> OpenedSet:
        grid, cfg = self.worker.grid, self.cfg

        def opening() -> tuple[DataSet, Any]:
            share, sizes = (grid.dp.rank, grid.dp.size), self.worker.source.sizes
            data, scored = open_scored(name, specs, cfg, sizes, share)
            return data, asdict(scored)

        data, scored = open_together(name, grid, self.device, opening, self.worker.watchdog)
        return OpenedSet(ScoredSet(**scored), data)

    def compute(self, report: Report) -> None:
        """Compute the missing files. `report` is called on rank 0."""
        done, missing = 0, self.folder.missing
        for opened, files in self.folder.gaps():
            for name, records in self._chunks(opened, files):
                with fail_together(self.device, DataError):
                    if dist.get_rank() == 0:
                        self.folder.write(name, records)
                done += 1
                if dist.get_rank() == 0:
                    report(done, missing)

    def _chunks(
        self, opened: OpenedSet, files: Sequence[MissingFile]
    ) -> Iterator[tuple[str, list[RecordScore]]]:
        """Yield the records of neighbouring files, on rank 0, and nothing of them on others."""
        grid, cfg, size = self.worker.grid, self.cfg, self.cfg.eval.batch_size
        loader = None
        if opened.data is not None:
            replica, limits = Replica(grid.dp.rank, grid.dp.size), Limits.from_config(cfg.train)
            start = Position(0, files[0].start)
            loader = Loader(opened.data, cfg.data, size, limits, replica, start, epochs=1)
        batches = SharedBatches(loader, grid, self.device)
        for file in files:
            records: list[RecordScore] = []
            for first in range(file.start, file.end, size):
                by_place = self._score_batch(batches.next().micro_batches)
                if dist.get_rank() == 0:
                    assert opened.data is not None
                    for (sample, row), targets in sorted(by_place.items()):
                        records.append(record_score(opened.data, first + sample, row, targets))
            yield file.name, records

    def _score_batch(self, micro_batches: Sequence[Any]) -> dict[RowPlace, TopTargets]:
        """Return the scores of the rows of a global batch, by `MicroBatch.rows`."""
        self.worker.watchdog.busy()
        settings = self.settings.top_k, self.settings.temperature
        rows = top_targets(self.worker.stage, micro_batches, *settings)
        # One dtype for all three: float32 has every id.
        packed = pack(
            {
                f"{place[0]} {place[1]}": (
                    True,
                    [row.label_log_probs_N, row.ids_NJ.float(), row.log_probs_NR],
                )
                for place, row in values_by_place(micro_batches, rows).items()
            },
            {},
        )
        by_place: dict[RowPlace, TopTargets] = {}
        for message in all_gather_bytes(packed, self.worker.grid.dp.group, self.device):
            for place, (_, (label_N, ids_NJ, log_probs_NR)) in unpack(message)[0].items():
                sample, row = map(int, place.split())
                by_place[sample, row] = TopTargets(label_N, ids_NJ.int(), log_probs_NR)
        return by_place
