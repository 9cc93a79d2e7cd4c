"""Teachers in vLLM engines: rank 0 asks them for the scores of each train batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import teachers_of
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines import EngineSettings
from megatron_vlm.engines.engine_thread import Engines, side_by_side
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.rl.teacher_scores import check_ids_of_teacher
from megatron_vlm.rl.train_batch import TrainBatch
from megatron_vlm.rl.vllm_engines import settings_of
from megatron_vlm.training.worker import MegatronWorker

_MAX_LOG_PROBS = 20  # vLLM's own limit of tokens in a place


@dataclass(frozen=True)
class EngineTeachers:
    """The engines of each teacher, in the order of rl.teacher, on rank 0."""

    cfg: Config
    paths: Sequence[str]
    engines: Sequence[Engines]

    @staticmethod
    def start(
        worker: MegatronWorker, data: DataSet, opened: ExitStack, waiting: Callable[[], None]
    ) -> "EngineTeachers":
        """Start the engines. `opened` ends them, and `waiting` is called until they have loaded.
        Sources with the same teacher share its engines."""
        cfg = worker.cfg
        paths = list(teachers_of(cfg.rl.teacher).values())
        started: dict[str, Engines] = {}
        distinct = list(dict.fromkeys(paths))
        for place, path in enumerate(distinct):
            started[path] = engines = Engines()
            opened.callback(engines.close)
            gpus = share_of_gpus(cfg.rl.teacher_gpus, place, len(distinct))
            try:
                engines.start(teacher_settings(worker, data, path, gpus), gpus, waiting)
            except MegatronVLMError as error:
                raise error.within(f"rl.teacher={path}") from error
        return EngineTeachers(cfg, paths, [started[path] for path in paths])

    def score(self, batch: TrainBatch, waiting: Callable[[], None]) -> TrainBatch:
        """Return the train batch with the scores of all rows, or raise an error: nothing is learnt
        from a part of them. `waiting` is called until all scores are there."""
        rl = self.cfg.rl
        for place, path in enumerate(self.paths):
            check_ids_of_teacher(batch, place, read_sizes(path).text.vocab, path)
        asked: list[Future[Tensor]] = []
        for row in batch.rows:
            engines = self.engines[row.teacher]
            scoring = engines.sampler.score(row.row, rl.teacher_top_k, rl.teacher_timeout)
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


def share_of_gpus(gpus: Sequence[str], place: int, teachers: int) -> Sequence[str]:
    """Return the engines of a teacher. Several teachers have equal shares, in their order, which
    config/teachers.py checks."""
    share = len(gpus) // teachers
    return gpus[place * share : (place + 1) * share]


def teacher_settings(
    worker: MegatronWorker, data: DataSet, path: str, gpus: Sequence[str]
) -> EngineSettings:
    """Return the settings of a teacher's engines. They take the longest row that a step can have,
    and one token, which vLLM draws after it."""
    own, rl = settings_of(worker, data), worker.cfg.rl
    options: dict[str, Any] = {}
    if rl.teacher_top_k > _MAX_LOG_PROBS:
        options["max_logprobs"] = rl.teacher_top_k
    return replace(
        own,
        folder=str(folder_of(path, weights=True)),
        max_len=own.max_len + 1,
        lora_rank=0,
        lora_vision=False,
        options=side_by_side(gpus) | options | rl.teacher_options,
    )
