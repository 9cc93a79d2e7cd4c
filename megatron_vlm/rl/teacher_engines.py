"""Teachers in engines: rank 0 asks them for the scores of each train batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import teachers_of
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.micro_batch import VISUAL_FIELDS
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.processed_prompt import describe_difference
from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.rl.episode import pictures_of
from megatron_vlm.rl.policy_engine import settings_of
from megatron_vlm.rl.teacher_scores import check_ids_of_teacher
from megatron_vlm.rl.train_batch import TrainBatch
from megatron_vlm.training.worker import MegatronWorker


@dataclass(frozen=True)
class EngineTeachers:
    """The engines of each teacher, in the order of rl.teacher, on rank 0."""

    cfg: Config
    paths: Sequence[str]
    engines: Sequence[EngineThread]
    checked: set[str] = field(default_factory=set)  # teachers that see what the student sees

    @staticmethod
    def start(
        worker: MegatronWorker, data: DataSet, opened: ExitStack, waiting: Callable[[], None]
    ) -> "EngineTeachers":
        """Start the engines. `opened` ends them, and `waiting` is called until they have loaded.
        Sources with the same teacher share its engines."""
        cfg = worker.cfg
        paths = list(teachers_of(cfg.rl.teacher).values())
        named = replace(cfg.engine, name=cfg.rl.teacher_scorer)
        started: dict[str, EngineThread] = {}
        distinct = list(dict.fromkeys(paths))
        for place, path in enumerate(distinct):
            started[path] = engines = EngineThread()
            opened.callback(engines.close)
            gpus = share_of_gpus(cfg.rl.teacher_gpus, place, len(distinct))
            try:
                engines.start(named, teacher_settings(worker, data, path, gpus), waiting)
            except MegatronVLMError as error:
                raise error.within(f"rl.teacher={path}") from error
        return EngineTeachers(cfg, paths, [started[path] for path in paths])

    def score(self, batch: TrainBatch, waiting: Callable[[], None]) -> TrainBatch:
        """Return the train batch with the scores of all rows, or raise an error: nothing is learnt
        from a part of them. `waiting` is called until all scores are there."""
        rl = self.cfg.rl
        for place, path in enumerate(self.paths):
            check_ids_of_teacher(batch, place, read_sizes(path).text.vocab, path)
            self._check_sight(batch, place, waiting)
        asked: list[Future[Tensor]] = []
        for row in batch.rows:
            engines = self.engines[row.teacher]
            scoring = engines.engine.score(row.row, rl.teacher_top_k, rl.teacher_timeout)
            asked.append(engines.submit(scoring))
        rows = []
        try:
            for row, future in zip(batch.rows, asked, strict=True):
                path = self.paths[row.teacher]
                rows.append(replace(row, teacher_table=result_of(future, waiting)))
        except MegatronVLMError as error:
            raise error.within(f"rl.teacher={path}") from error
        finally:
            for future in asked:
                future.cancel()
        return replace(batch, rows=rows)

    def _check_sight(self, batch: TrainBatch, place: int, waiting: Callable[[], None]) -> None:
        """Refuse engines whose own processor makes other patches of the first row with pictures
        than the student's. Engines that show no patches are not checked."""
        path, engine = self.paths[place], self.engines[place].engine
        rows = (each.row for each in batch.rows if each.teacher == place)
        row = next((each for each in rows if pictures_of([each]) != _NO_PICTURES), None)
        if path in self.checked or row is None:
            return
        self.checked.add(path)
        view = result_of(self.engines[place].submit(engine.inspect(row)), waiting)
        if view and (what := describe_difference(row, view, folder_of(self.cfg.model.path))):
            raise ConfigError(
                f": {view.version} makes {what} of a picture, so this teacher would not see what "
                "the student sees",
                key="rl.teacher",
                found=path,
                remedy="see what `megatron-vlm agree model.path=TEACHER` says, or set "
                "rl.teacher_scorer=own",
            )


_NO_PICTURES: dict[str, Any] = dict.fromkeys(VISUAL_FIELDS)


def share_of_gpus(gpus: Sequence[str], place: int, teachers: int) -> Sequence[str]:
    """Return the engines of a teacher. Several teachers have equal shares, in their order, which
    config/teachers.py checks."""
    share = len(gpus) // teachers
    return gpus[place * share : (place + 1) * share]


def teacher_settings(
    worker: MegatronWorker, data: DataSet, path: str, gpus: Sequence[str]
) -> EngineSettings:
    """Return the settings of a teacher's engines. They take the longest row that a step can have,
    and one token, which may be drawn after it."""
    own, rl = settings_of(worker, data), worker.cfg.rl
    return replace(
        own,
        folder=str(folder_of(path, weights=True)),
        max_len=own.max_len + 1,
        lora_rank=0,
        lora_vision=False,
        devices=gpus,
        options=rl.teacher_options,
        top_k=rl.teacher_top_k,
        is_inspected=True,
    )
