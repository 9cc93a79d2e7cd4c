"""Teachers in engines: rank 0 asks them for the scores of each train batch. Before, files of both
checkpoints show whether a teacher, in an engine or on the ranks, reads what the student writes and
sees: the same ids, and the same pixels. No weights are needed for that."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import teacher_checkpoints, teachers_of
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineScorer, EngineThread
from megatron_vlm.errors import ConfigError, DataError, MegatronVLMError
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.io.hub import folder_of
from megatron_vlm.rl.policy_engine import settings_of
from megatron_vlm.rl.train_batch import TrainBatch, same
from megatron_vlm.training.worker import MegatronWorker

_BOUNDS = ("min_pixels", "max_pixels", "fps", "min_frames", "max_frames")


def check_teachers(cfg: Config) -> None:
    """Refuse a teacher that would score other tokens, or see other pixels, than the student."""
    for path in dict.fromkeys(teacher_checkpoints(cfg).values()):
        try:
            read_sizes(path)
        except MegatronVLMError as error:
            raise error.within(f"teacher.path={path}") from error
        if path != cfg.model.path or cfg.data.add_tokens:
            _check_ids(cfg, path)
            _check_vocab(cfg, path)
            _check_pixels(cfg, path)


def _check_ids(cfg: Config, path: str) -> None:
    student = read_tokenizer(cfg.model.path, cfg.data.add_tokens).get_vocab()
    teacher = read_tokenizer(path).get_vocab()
    if student == teacher:
        return
    token, own_id, other_id = _first_difference(student, teacher)
    of_student = "is no token there" if own_id is None else f"has the id {own_id} there"
    of_teacher = "none here" if other_id is None else f"the id {other_id} here"
    raise ConfigError(
        f"has another tokenizer than model.path={cfg.model.path}: {token!r} {of_student}, and "
        f"{of_teacher}",
        key="teacher.path",
        found=path,
        remedy="give a teacher with the student's tokenizer, such as a larger model of the same "
        "family",
    )


def _first_difference(
    student: Mapping[str, int], teacher: Mapping[str, int]
) -> tuple[str, int | None, int | None]:
    """Return the token with the lowest id that has another id, or none, in the other tokenizer."""
    ids = {token: (student.get(token), teacher.get(token)) for token in {**student, **teacher}}
    different = ((token, *both) for token, both in ids.items() if both[0] != both[1])
    return min(different, key=lambda each: min(id_ for id_ in each[1:] if id_ is not None))


def _check_vocab(cfg: Config, path: str) -> None:
    """Refuse a teacher whose most likely tokens may have ids that the student lacks. Its tokenizer
    is the student's, so that these ids are padding."""
    rows = {
        name: read_sizes(name, added).text.vocab
        for name, added in ((cfg.model.path, cfg.data.add_tokens), (path, ()))
    }
    if cfg.teacher.top_k and rows[path] > rows[cfg.model.path]:
        raise ConfigError(
            f"has {rows[path]} rows in its vocabulary, more than the {rows[cfg.model.path]} of "
            "model.path, and one of its most likely tokens may be one that the student lacks",
            key="teacher.path",
            found=path,
            remedy="set teacher.top_k=null, which scores the student's tokens alone",
        )


def _check_pixels(cfg: Config, path: str) -> None:
    for kind, chosen in (("image", vars(cfg.data)), ("video", vars(cfg.data.video))):
        student, teacher = (
            vars(getattr(read_family(folder), f"{kind}s")(folder, chosen))
            for folder in (folder_of(cfg.model.path), folder_of(path))
        )
        for name in student | teacher:
            values = student.get(name), teacher.get(name)
            if values[0] != values[1]:
                raise _pixel_error(cfg, path, kind, name, values)


def _pixel_error(
    cfg: Config, path: str, kind: str, name: str, values: tuple[Any, Any]
) -> ConfigError:
    key = f"data.{'video_' if kind == 'video' else ''}{name}"
    return ConfigError(
        f"would see other pixels than model.path={cfg.model.path}: its {kind} processor has "
        f"{name}={values[1]}, and the student's {name}={values[0]}",
        key="teacher.path",
        found=path,
        remedy=f"set {key}, which both then use"
        if name in _BOUNDS
        else "give a teacher with the student's processor",
    )


def check_ids_of_teacher(train_batch: TrainBatch, place: int, vocab: int, path: str) -> None:
    """Refuse drawn ids that this teacher has no row for. Ranks that have the whole train batch all
    raise this error together."""
    for train_row in train_batch.rows:
        if train_row.teacher == place and int(train_row.row.ids_S.max()) >= vocab:
            raise DataError(
                f": the student has drawn it, and the vocabulary of the teacher {path} has "
                f"{vocab} rows; no text has this token, so the student draws at random",
                place="an answer",
                key="tokens",
                found=int(train_row.row.ids_S.max()),
                allowed=range(vocab),
                remedy="train the student on text first, or give a teacher with as many rows",
            )


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
            # Equal shares, in the order of the teachers, which config/teachers.py checks.
            share = len(cfg.teacher.devices) // len(distinct)
            gpus = cfg.teacher.devices[place * share : (place + 1) * share]
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
