"""Scoring by engines: rows go to them in order, with their pictures, and this process writes
the files. It holds no model.

Shapes: S tokens of a row, N supervised ones, J the most likely tokens of each, R these and all
others, 2 an id and its log-prob.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config, EngineConfig
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.scores.score_file import RecordScore, supervised_positions
from megatron_vlm.data.scores.score_index import check_folder
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.processed_prompt import describe_difference
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
    Report,
    ScoreFolder,
    ScoreSettings,
    index_of,
    open_scored,
    record_score,
    scored_sets,
)
from megatron_vlm.training.row_scores import TopTargets

log = logging.getLogger("megatron_vlm.data")

_TIMEOUT_S = 600.0  # time in which an engine scores a row


@dataclass(frozen=True)
class _Rows:
    """The rows of records with their pixels, or the error of a record, made in worker processes."""

    data: DataSet

    def __getitem__(self, number: int) -> list[Row] | DataError:
        try:
            return [placed.row for placed in self.data.rows(self.data.handle(number))]
        except DataError as error:
            return error


class EngineScorer:
    """The data sets of a configuration, the folder of their scores, and the engines."""

    def __init__(self, cfg: Config, path: Path, settings: ScoreSettings, engine: EngineConfig):
        """Open the sets and the folder."""
        self.cfg, self.settings, self.engine = cfg, settings, engine
        self.model = folder_of(cfg.model.path, weights=True)
        self.platform: Platform = pick_platform(cfg.platform)
        sizes = read_sizes(cfg.model.path)
        sets = []
        for name, specs in scored_sets(cfg):
            data, scored = open_scored(name, tuple(specs), cfg, sizes)
            sets.append(OpenedSet(scored, data))
        self.precision = str(compute_dtype(cfg, self.platform)).removeprefix("torch.")
        weights = weights_digest(HFCheckpoint(self.model).path)
        index = index_of(cfg, settings, weights, self.precision, sets)
        self.folder = ScoreFolder(path, index, sets, frozenset(check_folder(path, index)))
        self.errors: list[str] = []
        self.is_checked = False

    def compute(self, report: Report) -> None:
        """Compute the missing files."""
        done, missing = 0, self.folder.missing
        if not missing:
            return
        with ExitStack() as opened:
            engines = EngineThread()
            opened.callback(engines.close)
            engines.start(self.engine, self._engine_settings(), _wait)
            for scored_set, files in self.folder.gaps():
                for name, records in self._chunks(engines, scored_set, files):
                    self.folder.write(name, records)
                    done += 1
                    report(done, missing)

    def _engine_settings(self) -> EngineSettings:
        """Return the settings of engines that take every row, and one token that is drawn after
        it."""
        indexes = [index for each in self.folder.sets if each.data for index in each.data.indexes]
        return EngineSettings.from_config(
            self.engine,
            str(self.model),
            dtype=self.precision,
            max_len=1 + max(int(index.longest.max()) for index in indexes),
            pictures=max(1, *(int(index.images.max()) for index in indexes)),
            videos=max(int(index.videos.max()) for index in indexes),
            top_k=self.settings.top_k,
            is_inspected=True,
            reserves_media=self.platform.is_cuda,
        )

    def _chunks(
        self, engines: EngineThread, opened: OpenedSet, files: Sequence[MissingFile]
    ) -> Iterator[tuple[str, list[RecordScore]]]:
        """Yield the records of neighbouring files."""
        data, cfg = opened.data, self.cfg.data
        assert data is not None
        numbers = range(files[0].start, files[-1].end)
        loaded = map_in_processes(_Rows(data), numbers, cfg.num_workers, cfg.prefetch)
        for file in files:
            places = range(file.start, file.end)
            pairs = zip(places, islice(loaded, len(places)), strict=True)
            yield file.name, list(self._records(engines, data, pairs))

    def _records(
        self, engines: EngineThread, data: DataSet, pairs: Iterator[tuple[int, Any]]
    ) -> Iterator[RecordScore]:
        """Yield the scores of records in order. Enough rows are with the engines at any time."""
        limit = 2 * engines.engine.capacity.scores
        asked: deque[tuple[int, int, Future[Tensor]]] = deque()
        try:
            for number, rows in pairs:
                if isinstance(rows, DataError):
                    self._skip(rows)
                    continue
                for place, row in enumerate(rows):
                    self._check_sight(engines, row)
                    scoring = engines.engine.score(row, self.settings.top_k, _TIMEOUT_S)
                    asked.append((number, place, engines.submit(scoring)))
                while len(asked) > limit:
                    yield self._record(data, *asked.popleft())
            while asked:
                yield self._record(data, *asked.popleft())
        finally:
            for _, _, future in asked:
                future.cancel()

    def _record(
        self, data: DataSet, number: int, place: int, future: "Future[Tensor]"
    ) -> RecordScore:
        handle = data.handle(number)
        try:
            table_SJ2 = result_of(future, _wait)
        except MegatronVLMError as error:
            raise error.within(data.where(handle)) from error
        positions_N = torch.from_numpy(supervised_positions(data.example(handle)[place]))
        return record_score(data, number, place, TopTargets.from_table(table_SJ2, positions_N))

    def _skip(self, error: DataError) -> None:
        """Leave a record out, as training with data.max_errors does."""
        if not self.cfg.data.max_errors:
            raise error
        self.errors.append(str(error))
        log.warning("skipped %s", escape_controls(str(error)))
        check_errors(self.errors, self.cfg.data)

    def _check_sight(self, engines: EngineThread, row: Row) -> None:
        """Refuse engines that make other patches of the first row with pictures than a student
        would see, unless they do not show them."""
        has_pictures = row.image_grid_I3 is not None or row.video_grid_I3 is not None
        if self.is_checked or not has_pictures:
            return
        self.is_checked = True
        view = result_of(engines.submit(engines.engine.inspect(row)), _wait)
        if view and (what := describe_difference(row, view, self.model)):
            raise ConfigError(
                f": {view.version} makes {what} of a picture, unlike the trainer",
                key="--engine",
                found=self.engine.python,
                remedy=f"see what `megatron-vlm agree {self.cfg.model.path}` says, or score "
                "without --engine",
            )


def _wait() -> None:
    """Do nothing while the engines work: no other rank waits for this process."""
