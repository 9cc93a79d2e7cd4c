"""The group `teacher`: one folder of scores for train.objective=distill, or for `rl` the checkpoint
of all prompts or of each source of prompts, which may be the trained model itself."""

from collections.abc import Iterator, Mapping

from megatron_vlm.config.schema import OWN, Config, TeacherConfig, check_of
from megatron_vlm.errors import ConfigError

ALL_SOURCES = ""  # the name of the only teacher
SELF = "self"  # a teacher that is the trained model; a folder of this name is ./self


def target_folder(cfg: Config) -> str | None:
    """Return the folder of scores that train.objective=distill learns from; None for others."""
    path = cfg.teacher.path if cfg.train.objective == "distill" else None
    assert path is None or isinstance(path, str), "check_teacher refuses it"
    return path


def teachers_of(cfg: Config | None) -> dict[str, str]:
    """Return the checkpoint or SELF of each source of `rl`, by the source's name. A teacher of all
    sources has the name ALL_SOURCES."""
    if cfg is None or cfg.teacher.path is None or cfg.train.objective == "distill":
        return {}
    path = cfg.teacher.path
    return {ALL_SOURCES: path} if isinstance(path, str) else dict(path)


def teacher_checkpoints(cfg: Config | None) -> dict[str, str]:
    """Return the teachers with a checkpoint of their own, by source."""
    return {source: path for source, path in teachers_of(cfg).items() if path != SELF}


def needs_initial_model(cfg: Config) -> bool:
    """Return whether `rl` scores rows with the model before its first step."""
    is_teacher = SELF in teachers_of(cfg).values() and cfg.teacher.weights == "initial"
    return is_teacher or cfg.rl.kl_coef is not None


@check_of
def check_teacher(cfg: Config) -> Iterator[ConfigError]:
    """Refuse a teacher that cannot be found, or settings for a missing teacher."""
    teacher = cfg.teacher
    if not isinstance(teacher.options, dict):
        yield ConfigError(key="teacher.options", allowed="{NAME: VALUE}")
    if cfg.train.objective == "distill":
        yield from _target_folder_errors(cfg)
    elif teacher.path is None:
        remedy = "give teacher.path=CHECKPOINT, or leave it out"
        yield from _unused_errors(teacher, "belongs to teacher.path, which is not set", remedy)
    else:
        yield from _checkpoint_errors(cfg)


def _target_folder_errors(cfg: Config) -> Iterator[ConfigError]:
    """Refuse distillation from stored scores without these, or with scores of a stream."""
    teacher = cfg.teacher
    if not isinstance(teacher.path, str):
        yield ConfigError(
            "is not set" if teacher.path is None else "",
            key="teacher.path",
            remedy="train.objective=distill learns from a folder that megatron-vlm score has "
            "written with --top-k",
        )
    yield from stream_errors(cfg, "teacher.path")
    problem = "is of a teacher that megatron-vlm rl runs, and train.objective=distill reads scores"
    yield from _unused_errors(teacher, problem, "leave it out", ("path", "top_k"))


def stream_errors(cfg: Config, key: str) -> Iterator[ConfigError]:
    """Refuse a folder of scores for a stream."""
    if cfg.data.is_stream:
        yield ConfigError(
            "has scores of records, and those of a stream are not known ahead",
            key=key,
            remedy="download the data, and give its files",
        )


def _unused_errors(
    teacher: TeacherConfig, problem: str, remedy: str, used: tuple[str, ...] = ("path",)
) -> Iterator[ConfigError]:
    """Refuse settings that would have no effect."""
    for name, default in vars(TeacherConfig()).items():
        if name not in used and getattr(teacher, name) != default:
            yield ConfigError(problem, key=f"teacher.{name}", remedy=remedy)


def _view_errors(cfg: Config) -> Iterator[ConfigError]:
    """Refuse views and divergences that teachers of `rl` do not have."""
    teacher, is_self = cfg.teacher, SELF in teachers_of(cfg).values()
    if is_self and teacher.view is None:
        yield ConfigError(
            ": the model itself has nothing to teach without teacher.view",
            key="teacher.path",
            remedy="give teacher.view=FILE.py:NAME, or ./self for a folder of this name",
        )
    if not is_self and teacher.weights != TeacherConfig().weights:
        yield ConfigError(
            "belongs to teacher.path=self", key="teacher.weights", remedy="leave it out"
        )
    if teacher.view is not None and teacher.engine != OWN:
        yield ConfigError(
            ": engines score what the student sees, and teacher.view is set",
            key="teacher.engine",
            remedy=f"give teacher.engine={OWN}",
        )
    if not teacher.top_k and cfg.distill.divergence not in (None, "reverse"):
        yield ConfigError(
            ": of the drawn token alone, only the reverse KL can be estimated",
            key="distill.divergence",
            remedy="give teacher.top_k, such as 100",
        )


def _checkpoint_errors(cfg: Config) -> Iterator[ConfigError]:
    """Refuse teachers of `rl` that have no name or that could not be run."""
    teacher, path = cfg.teacher, cfg.teacher.path
    named = path if isinstance(path, Mapping) else {"all": path}
    if not named or not all(
        isinstance(each, str) and each for pair in named.items() for each in pair
    ):
        yield ConfigError(
            key="teacher.path",
            allowed="a checkpoint's folder, its name on the Hub, self, or {SOURCE: one of these}",
        )
    yield from _view_errors(cfg)
    if teacher.top_k and cfg.rl.entropy_coef is not None:
        yield ConfigError(
            ": with teacher.top_k the head computes the divergence from the teacher instead",
            key="rl.entropy_coef",
            remedy="set rl.entropy_coef=null, or teacher.top_k=null",
        )
    if teacher.engine == OWN:
        if teacher.devices or teacher.options:
            yield ConfigError(
                "starts no engine, and teacher.devices or teacher.options is set",
                key="teacher.engine",
                remedy="give teacher.engine=vllm, or leave them out",
            )
        return
    count = len(set(teachers_of(cfg).values()))
    if len(teacher.devices) % count:
        yield ConfigError(
            f"has {len(teacher.devices)} engines for {count} teachers, which get equal shares",
            key="teacher.devices",
            remedy=f"give a multiple of {count}, the engines of the first teacher first",
        )
