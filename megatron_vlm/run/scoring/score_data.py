"""Scoring of data.train and data.eval by all ranks: the files that a folder lacks are computed in
order, and written by rank 0. A kill loses the file that was being computed, and no other."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.micro_batch import MicroBatch, RowPlace
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.scores.score_file import RecordScore
from megatron_vlm.data.scores.score_index import ScoredSet, prepare_folder
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_bytes, broadcast_json
from megatron_vlm.errors import DataError
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.run.scoring.score_folder import (
    MissingFile,
    OpenedSet,
    ScoredFile,
    ScoreFolder,
    ScoreSettings,
    index_of,
    open_scored,
    record_score,
    scored_sets,
)
from megatron_vlm.training.data_feed import SharedBatches, open_together
from megatron_vlm.training.row_scores import RowScores, top_targets, values_by_place
from megatron_vlm.training.worker import MegatronWorker


def open_scores_together(
    worker: MegatronWorker, cfg: Config, path: Path, settings: ScoreSettings, weights: str
) -> ScoreFolder:
    """Open the sets and the folder of their scores. `weights` is a digest of the model's weights. A
    collective."""
    is_first = dist.get_rank() == 0
    sets = [_open_set(worker, cfg, name, tuple(specs)) for name, specs in scored_sets(cfg)]
    precision = str(compute_dtype(cfg, worker.platform)).removeprefix("torch.")
    index = index_of(cfg, settings, weights, precision, sets)
    existing: Collection[str] = ()
    with fail_together(DataError):
        if is_first:
            existing = prepare_folder(path, index)
    present = broadcast_json(sorted(existing), 0)
    return ScoreFolder(path, index, sets, frozenset(present), is_writer=is_first)


def _open_set(
    worker: MegatronWorker, cfg: Config, name: str, specs: Sequence[SourceSpec]
) -> OpenedSet:
    grid = worker.grid

    def opening() -> tuple[DataSet, Any]:
        share, sizes = (grid.dp.rank, grid.dp.size), worker.source.sizes
        data, scored = open_scored(name, specs, cfg, sizes, share)
        return data, asdict(scored)

    data, scored = open_together(name, grid, opening, worker.watchdog)
    return OpenedSet(ScoredSet(**scored), data)


def score_on_ranks(
    worker: MegatronWorker,
    cfg: Config,
    settings: ScoreSettings,
    opened: OpenedSet,
    files: Sequence[MissingFile],
) -> Iterator[ScoredFile]:
    """Yield the records of neighbouring files, on rank 0, and nothing of them on others. A
    collective."""
    grid, size = worker.grid, cfg.eval.batch_size
    loader = None
    if opened.data is not None:
        replica, limits = Replica(grid.dp.rank, grid.dp.size), Limits.from_config(cfg.train)
        start = Position(0, files[0].start)
        loader = Loader(opened.data, cfg.data, size, limits, replica, start, epochs=1)
    batches = SharedBatches(loader, grid, worker.platform.device)
    for file in files:
        records: list[RecordScore] = []
        for first in range(file.start, file.end, size):
            by_place = _score_batch(worker, settings, batches.next().micro_batches)
            if dist.get_rank() == 0:
                assert opened.data is not None
                for (sample, row), scores in sorted(by_place.items()):
                    records.append(record_score(opened.data, first + sample, row, scores))
        yield file.name, records


def _score_batch(
    worker: MegatronWorker, settings: ScoreSettings, micro_batches: Sequence[MicroBatch]
) -> dict[RowPlace, RowScores]:
    """Return the scores of the rows of a global batch, by `MicroBatch.rows`."""
    worker.watchdog.busy()
    rows = top_targets(worker.stage, micro_batches, settings.top_k, settings.temperature)
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
    by_place: dict[RowPlace, RowScores] = {}
    for message in all_gather_bytes(packed, worker.grid.dp.group, worker.platform.device):
        for place, (_, (label_N, ids_NJ, log_probs_NR)) in unpack(message)[0].items():
            sample, row = map(int, place.split())
            by_place[sample, row] = RowScores(label_N, ids_NJ.int(), log_probs_NR)
    return by_place
