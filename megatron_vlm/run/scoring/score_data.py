"""Scoring of data.train and data.eval: the files that a folder lacks are computed in order. All
ranks compute them, and rank 0 writes; or engines do, to which this process sends rows with their
pictures. A kill loses the file that was being computed, and no other.

Shapes: S tokens of a row, N supervised ones, J the most likely tokens of each, 2 an id and its
log-prob.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import Config, EngineConfig
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.micro_batch import MicroBatch, RowPlace
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.scores.score_file import RecordScore, supervised_positions
from megatron_vlm.data.scores.score_index import ScoredSet, prepare_folder
from megatron_vlm.data.tensors.tensor_list import pack, unpack
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_bytes, broadcast_json
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineScorer, EngineThread
from megatron_vlm.errors import ConfigError, DataError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.printable import escape_controls
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


log = logging.getLogger("megatron_vlm.data")


@dataclass(frozen=True)
class _Rows:
    """The rows of records with their pixels, or the error of a record, made in worker processes."""

    data: DataSet

    def __getitem__(self, number: int) -> list[Row] | DataError:
        try:
            return self.data.rows(self.data.handle(number))
        except DataError as error:
            return error


def open_score_folder(cfg: Config, path: Path, settings: ScoreSettings) -> ScoreFolder:
    """Open the sets and the folder of their scores."""
    sizes = read_sizes(cfg.model.path)
    sets = []
    for name, specs in scored_sets(cfg):
        data, scored = open_scored(name, tuple(specs), cfg, sizes)
        sets.append(OpenedSet(scored, data))
    weights = weights_digest(HFCheckpoint(folder_of(cfg.model.path, weights=True)).path)
    index = index_of(cfg, settings, weights, _precision(cfg), sets)
    return ScoreFolder(path, index, sets, frozenset(prepare_folder(path, index)))


def score_with_engines(
    folder: ScoreFolder, cfg: Config, engine: EngineConfig, report: Callable[[int, int], None]
) -> None:
    """Compute the missing files of a folder, with engines that are started for them."""
    if not folder.missing:
        return
    model = folder_of(cfg.model.path, weights=True)

    def other_view(problem: str) -> ConfigError:
        return ConfigError(
            f"{problem}, unlike the trainer",
            key="--engine",
            found=engine.python,
            remedy=f"see what `megatron-vlm agree {cfg.model.path}` says, or score without "
            "--engine",
        )

    with closing(EngineThread()) as engines:
        engines.start(engine, _engine_settings(folder, cfg, engine, model), _wait)
        scorer = EngineScorer(engines, model, other_view, _wait)
        folder.compute(partial(_score_files, scorer, cfg, folder.index.top_k, []), report)


def _engine_settings(
    folder: ScoreFolder, cfg: Config, engine: EngineConfig, model: Path
) -> EngineSettings:
    """Return the settings of engines that take every row, and one token that is drawn after it."""
    indexes = [index for each in folder.sets if each.data for index in each.data.indexes]
    return EngineSettings.from_config(
        replace(engine, draft_tokens=0),  # nothing is drawn
        str(model),
        dtype=_precision(cfg),
        max_len=1 + max(int(index.longest.max()) for index in indexes),
        pictures=max(1, *(int(index.images.max()) for index in indexes)),
        videos=max(int(index.videos.max()) for index in indexes),
        has_media=any(index.images.any() or index.videos.any() for index in indexes),
        top_k=folder.index.top_k,
        is_inspected=True,
        reserves_media=pick_platform(cfg.platform).is_cuda,
    )


def _precision(cfg: Config) -> str:
    return str(compute_dtype(cfg, pick_platform(cfg.platform))).removeprefix("torch.")


def _score_files(
    scorer: EngineScorer,
    cfg: Config,
    top_k: int,
    errors: list[str],
    opened: OpenedSet,
    files: Sequence[MissingFile],
) -> Iterator[ScoredFile]:
    """Yield the records of neighbouring files. `errors` gets the errors of skipped records."""
    data = opened.data
    assert data is not None
    numbers = range(files[0].start, files[-1].end)
    loaded = map_in_processes(_Rows(data), numbers, cfg.data.num_workers, cfg.data.prefetch)
    for file in files:
        places = range(file.start, file.end)
        pairs = zip(places, islice(loaded, len(places)), strict=True)
        yield file.name, list(_records(scorer, data, top_k, _valid(pairs, errors, cfg)))


def _valid(
    pairs: Iterable[tuple[int, list[Row] | DataError]], errors: list[str], cfg: Config
) -> Iterator[tuple[int, list[Row]]]:
    """Yield the records without an error. Others are left out, as training with data.max_errors
    does."""
    for number, rows in pairs:
        if not isinstance(rows, DataError):
            yield number, rows
            continue
        if not cfg.data.max_errors:
            raise rows
        errors.append(str(rows))
        log.warning("skipped %s", escape_controls(str(rows)))
        check_errors(errors, cfg.data)


def _records(
    scorer: EngineScorer, data: DataSet, top_k: int, records: Iterable[tuple[int, list[Row]]]
) -> Iterator[RecordScore]:
    """Yield the scores of records in order. Enough rows are with the engines at any time."""
    limit = 2 * scorer.engines.engine.capacity.scores
    started: deque[tuple[int, int, Future[Tensor]]] = deque()

    def finished() -> RecordScore:
        number, place, scores = started.popleft()
        handle = data.handle(number)
        try:
            table_SJ2 = scorer.result(scores)
        except MegatronVLMError as error:
            raise error.within(data.where(handle)) from error
        positions_N = torch.from_numpy(supervised_positions(data.example(handle)[place]))
        return record_score(data, number, place, RowScores.from_table(table_SJ2, positions_N))

    try:
        for number, rows in records:
            for place, row in enumerate(rows):
                started.append((number, place, scorer.start(row, top_k)))
            while len(started) > limit:
                yield finished()
        while started:
            yield finished()
    finally:
        for *_, scores in started:
            scores.cancel()


def _wait() -> None:
    """Do nothing while the engines work: no other rank waits for this process."""
