"""Scoring of data.train and data.eval by engines: rows go to them in order, with their pictures,
and this process writes the files. It holds no model.

Shapes: S tokens of a row, N supervised ones, J the most likely tokens of each, 2 an id and its
log-prob.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config, EngineConfig
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.scores.score_file import RecordScore, supervised_positions
from megatron_vlm.data.scores.score_index import prepare_folder
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.worker_processes import map_in_processes
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
from megatron_vlm.training.row_scores import RowScores

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
