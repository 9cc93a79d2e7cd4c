"""Teachers in engines: rank 0 asks them for the scores of each train batch."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megatron_vlm.config.teachers import teachers_of
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineScorer, EngineThread
from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.rl.policy_engine import settings_of
from megatron_vlm.rl.teacher_checks import check_ids_of_teacher
from megatron_vlm.rl.train_batch import TrainBatch, same
from megatron_vlm.training.worker import MegatronWorker


@dataclass(frozen=True)
class EngineTeachers:
    """The engines of each teacher, by its path, on rank 0. Sources with the same teacher share its
    engines."""

    paths: Sequence[str]  # in the order of teacher.path
    top_k: int
    scorers: Mapping[str, EngineScorer]

    @staticmethod
    def start(
        worker: MegatronWorker, data: DataSet, opened: ExitStack, waiting: Callable[[], None]
    ) -> "EngineTeachers":
        """Start the engines. `opened` ends them, and `waiting` is called until they have loaded."""
        cfg = worker.cfg
        paths = list(teachers_of(cfg).values())
        named = replace(cfg.engine, name=cfg.teacher.engine)
        student, scorers = folder_of(cfg.model.path), dict[str, EngineScorer]()
        distinct = list(dict.fromkeys(paths))
        for place, path in enumerate(distinct):
            engines = EngineThread()
            opened.callback(engines.close)
            gpus = share_of_gpus(cfg.teacher.devices, place, len(distinct))
            try:
                engines.start(named, teacher_settings(worker, data, path, gpus), waiting)
            except MegatronVLMError as error:
                raise error.within(f"teacher.path={path}") from error
            scorers[path] = EngineScorer(engines, student, partial(_blind_teacher, path), waiting)
        return EngineTeachers(paths, cfg.teacher.top_k or 0, scorers)

    def score(self, batch: TrainBatch) -> TrainBatch:
        """Return the train batch with the scores of all rows, or raise an error: nothing is learnt
        from a part of them."""
        for place, path in enumerate(self.paths):
            check_ids_of_teacher(batch, place, read_sizes(path).text.vocab, path)
        started: list[Future[Tensor]] = []
        rows = []
        try:
            for row in batch.rows:
                scorer = self.scorers[self.paths[row.teacher]]
                started.append(scorer.start(same(row), self.top_k))
            for row, scores in zip(batch.rows, started, strict=True):
                path = self.paths[row.teacher]
                try:
                    rows.append(replace(row, teacher_table=self.scorers[path].result(scores)))
                except MegatronVLMError as error:
                    raise error.within(f"teacher.path={path}") from error
        finally:
            for scores in started:
                scores.cancel()
        return replace(batch, rows=rows)


def _blind_teacher(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}, so this teacher would not see what the student sees",
        key="teacher.path",
        found=path,
        remedy="see what `megatron-vlm agree model.path=TEACHER` says, or set teacher.engine=own",
    )


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
    own, teacher = settings_of(worker, data), worker.cfg.teacher
    return replace(
        own,
        folder=str(folder_of(path, weights=True)),
        max_len=own.max_len + 1,
        lora_rank=0,
        lora_vision=False,
        devices=gpus,
        options=teacher.options,
        top_k=teacher.top_k or 0,
        is_inspected=True,
    )
