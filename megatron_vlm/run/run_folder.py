"""The folder of a run: marked as the run's, and locked by one job at a time.

job.lock says which job writes the run, or was the last to do so, and how it ended. Its first line
names the process. The second one is written at the end: `ended`, or `failed: ` with the reason. A
job that was killed leaves no second line, and the kernel releases its lock.

Nothing else in the folder changes until the run begins, and a start that is refused leaves job.lock
as it was, too.
"""

import contextlib
import datetime
import os
import socket
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from megatron_vlm.checkpoint.run_checkpoints import check_leftovers, last_serial
from megatron_vlm.config import read_saved, to_yaml
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.data_sources import WITHOUT_EFFECT, plain_sets, plain_sources
from megatron_vlm.config.evaluation_checks import held_out_names
from megatron_vlm.config.load import given_keys
from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.config.teachers import ALL_SOURCES, teachers_of
from megatron_vlm.config.trainable import Exported, exports
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import ConfigError, LostError, MegatronVLMError, sentences
from megatron_vlm.hf.export_mark import check_replaceable
from megatron_vlm.io import atomic
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.io.hub import hub_name, pin
from megatron_vlm.io.untrusted import what_is_at
from megatron_vlm.report.metrics_lines import SAMPLES

HELD_OUT_LIST = "held_out.txt"  # the records that data.split holds out
# Files that a run overwrites or appends to.
_FILES = ("config.yaml", "metrics.jsonl", SAMPLES, "examples.json", "report.html", HELD_OUT_LIST)
JOB_LOCK = "job.lock"
_ENDED, _FAILED = "ended", "failed: "
_MAX_BYTES = 4096
_MAX_REASON = 1000  # characters
_PATIENCE_S = 5  # for an earlier job of the run to release the folder
_PATIENCE_AFTER_RESTART_S = 60  # A file server releases a dead machine's locks late.


@dataclass
class JobLock:
    """The lock of the job that writes a run."""

    has_begun: bool = False  # False: an error is the refusal of a start
    former: list[tuple[Path, bytes, os.stat_result]] = field(default_factory=list)

    def keep(self, path: Path) -> None:
        """Note the content of a small file, which a refused start puts back."""
        self.former.append((path, path.read_bytes(), path.stat()))

    def put_back(self) -> None:
        """Write the files as they were, and remove one that was empty."""
        for path, content, times in self.former:
            with contextlib.suppress(OSError):
                path.write_bytes(content)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                if not content:
                    path.unlink()


@dataclass(frozen=True)
class RunLock:
    """A run's folder that this job has locked."""

    run: str  # id of the run
    last_serial: int  # serial of the last checkpoint when the job first started
    job: JobLock

    def begin(self, cfg: Config) -> None:
        """Mark the folder, remove what a crash has left, and write config.yaml."""
        folder, self.job.has_begun = Path(cfg.run), True
        with _explain_errors(cfg):
            atomic.write_mark(folder, self.run, kind="run", last_serial=self.last_serial)
            exports = map(atomic.partial_of, (folder / "export", folder / "merged"))
            checkpoints = (folder / "checkpoints").glob("step-*.partial")
            atomic.discard_partials([*checkpoints, *exports], self.run)
            atomic.write_text(folder / "config.yaml", to_yaml(cfg))


@contextmanager
def held_folder(cfg: Config) -> Iterator[RunLock]:
    """Check and lock cfg.run, which is created if necessary. Only one rank does this."""
    folder = Path(cfg.run)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    check_folder(cfg)
    with ExitStack() as held:
        with _explain_errors(cfg):
            folder.mkdir(parents=True, exist_ok=True)
            held.callback(_remove_empty, made)
            claim = _claim(cfg, held.enter_context(hold_job_lock(folder)))
        yield claim


def check_folder(cfg: Config) -> None:
    """Refuse a folder in which something is in the way of what the run would write."""
    folder = Path(cfg.run)
    run = (_run_mark(folder) or {"run": "none yet"})["run"]
    with _explain_errors(cfg):
        _check_free(folder)
        _check_ways(cfg)
        check_leftovers(folder / "checkpoints", run)
        for target in export_folders(cfg).values():
            atomic.check_partial(atomic.partial_of(target), run)
            check_replaceable(target, run)


@contextmanager
def _explain_errors(cfg: Config) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, key="run", found=cfg.run, allowed="another folder") from error


def _remove_empty(folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # one that has files stays
        for folder in folders:
            folder.rmdir()


def export_folders(cfg: Config) -> dict[Exported, Path]:
    """Return the folder of each export of a run: `export`, and `merged` for a second one."""
    run = Path(cfg.run)
    return dict(zip(exports(cfg), (run / "export", run / "merged"), strict=False))


def _check_free(folder: Path) -> None:
    """Refuse a folder that is not the folder of a run and has files that a run would overwrite."""
    taken = [name for name in (*_FILES, "predictions", atomic.MARK) if (folder / name).exists()]
    if taken and _run_mark(folder) is None:
        raise ConfigError(
            f"is not the folder of a run, and has {taken[0]}, which a run would overwrite",
            key="run",
            found=str(folder),
            allowed="another folder",
        )


def _check_ways(cfg: Config) -> None:
    """Refuse anything in the place of a file or a folder that the run will write, even if only at
    its end. Exports and checkpoints are checked separately."""
    folder = Path(cfg.run)
    predictions = [f"predictions/{name}.jsonl" for name in held_out_names(cfg)]
    # They are written under another name first.
    whole = ["config.yaml", "examples.json", HELD_OUT_LIST, atomic.MARK, *predictions]
    files = (JOB_LOCK, *_FILES, *whole, *(name + atomic.NEW for name in whole))
    folders = ("checkpoints", "predictions", "tensorboard", "profile", "stacks")
    ways = dict.fromkeys(folders, "a folder")
    for name, expected in {**ways, **dict.fromkeys(files, "a file")}.items():
        path = folder / name
        if (kind := _found_at(path)) not in ("nothing", expected):
            raise ConfigError(
                f": {path} is {kind}, and the run would write {expected} there",
                key="run",
                found=str(folder),
                remedy="move it somewhere else, or give another folder",
            )


def _found_at(path: Path) -> str:
    """Return the result of `what_is_at`, except that a link that leads nowhere is not "nothing"."""
    try:
        kind = what_is_at(path)
    except OSError:  # links in a circle, or a file in place of the folder above
        kind = "nothing"
    return "a link that leads nowhere" if kind == "nothing" and path.is_symlink() else kind


def _run_mark(folder: Path) -> dict[str, Any] | None:
    mark = atomic.read_mark(folder)
    return mark if mark is not None and mark.get("kind") == "run" else None


def _claim(cfg: Config, job: JobLock) -> RunLock:
    folder, resume = Path(cfg.run), cfg.checkpoint.resume
    mark, last = _run_mark(folder), last_serial(folder / "checkpoints")
    if mark is not None and restarts():
        return RunLock(mark["run"], min(last, mark["last_serial"]), job)
    run = uuid.uuid4().hex if mark is None else mark["run"]
    if last and mark is not None and resume not in ("auto", "never"):
        # A restart after a failure must know, and torchrun restarts after a refusal, too.
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            job.keep(folder / atomic.MARK)
        atomic.write_mark(folder, run, kind="run", last_serial=last)
    return RunLock(run, last, job)


@dataclass(frozen=True)
class Job:
    """The job that writes a run, or was the last to do so."""

    is_running: bool
    has_ended: bool = False  # in an orderly way
    failure: str | None = None  # why it ended


@contextmanager
def hold_job_lock(folder: Path) -> Iterator[JobLock]:
    """Lock the folder, which one job may write, at most until the process ends."""
    path, job = folder / JOB_LOCK, JobLock()
    with _locked(path) as file:
        job.keep(path)
        file.truncate(0)
        now = datetime.datetime.now().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
        file.flush()
        try:
            yield job
        except BaseException as error:
            is_fault = isinstance(error, LostError) or not isinstance(error, MegatronVLMError)
            if not job.has_begun and not (is_fault and isinstance(error, Exception)):
                job.put_back()
            else:
                reason = _FAILED + _reason(error) if isinstance(error, Exception) else _ENDED
                _write_end(file, reason)
            raise
        _write_end(file, _ENDED)


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Open a file that only this process may write. A refused start may just have removed it."""
    until = time.monotonic() + (_PATIENCE_AFTER_RESTART_S if restarts() else _PATIENCE_S)
    while True:
        with open(path, "a+", encoding="utf-8") as file:
            if atomic.try_lock(file.fileno()):
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield file
                    return
            elif time.monotonic() > until:
                file.seek(0)
                raise ConfigError(
                    f"is being written by another job ({file.read()})",
                    key="run",
                    found=str(path.parent),
                    remedy="wait for it, stop it, or give another folder",
                )
        time.sleep(0.1)


def read_job(folder: Path) -> Job | None:
    """Return the job of a run folder; None without a readable job.lock that is no link."""
    try:
        handle = os.open(folder / JOB_LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    with open(handle, "rb") as file:
        # A job that starts at this moment tries again for some seconds.
        is_running = not atomic.try_lock(handle, shared=True)
        text = file.read(_MAX_BYTES).decode(errors="replace")
    _, _, end = text.partition("\n")
    return Job(
        is_running,
        has_ended=end.strip() == _ENDED,
        failure=end.removeprefix(_FAILED).strip() if end.startswith(_FAILED) else None,
    )


def _write_end(file: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full, which the error may be about
        file.write(f"\n{text}")
        file.flush()


def _reason(error: Exception) -> str:
    text = next(iter(sentences(error)), f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:_MAX_REASON]


_LONGEST = 200  # characters of a value
# Keys that make a run another experiment, since they change what it learns from, and how. A run may
# continue for longer.
_LEARNING = (
    *("model.path", "model.freeze", "model.router", "lora.", "data.", "optim.", "train."),
    *("preference.", "reward.", "distill.", "embed.", "rerank.", "teacher.", "rl.reward"),
    *("rl.environment", "rl.agent", "rl.samples", "rl.loss", "rl.advantage", "rl.kl_coef"),
)
_GOING_ON = frozenset(
    ("train.steps", "train.epochs", "train.micro_batch_size", "train.micro_batch_tokens")
    + ("train.on_nonfinite", "train.max_nonfinite", "data.allow_http")
    + tuple(f"data.{name}" for name in WITHOUT_EFFECT)
)


def saved_config(folder: Path) -> Config | None:
    """Return the configuration of a run or a checkpoint; None where there is none. One with which
    this version cannot go on is a ConfigError."""
    if read_mark(folder) is None or not os.path.lexists(folder / "config.yaml"):
        return None
    return read_saved(folder)


def with_model(cfg: Config, weights: bool = True, saved: Config | None = None) -> Config:
    """Return the configuration with the commits in model.path and teacher.path, where these name
    models on the Hub. They are the newest commits when the run begins, and the same ones whenever
    the run starts again, from `saved`."""
    path = cfg.model.path
    if (name := hub_name(path)) is not None and not name.commit:
        before = None if saved is None else hub_name(saved.model.path)
        if before is not None and before.repo == name.repo and before.commit:
            path = str(before)
            if name.revision and pin(cfg.model.path) != path:
                raise ConfigError(
                    f"is another commit now than {before.commit}, with which run={cfg.run} began",
                    key="model.path",
                    found=str(name),
                    remedy=f"give model.path={name.repo} to go on with that one, or another "
                    "run=FOLDER",
                )
    model = replace(cfg.model, path=pin(path, weights))
    teacher = replace(cfg.teacher, path=_teachers_with_commits(cfg, saved))
    return replace(cfg, model=model, teacher=teacher)


def _teachers_with_commits(cfg: Config, saved: Config | None) -> str | dict[str, Any] | None:
    """Return the value of teacher.path with the commits that the run began with. A name with a
    revision of its own gets the commit that this is now."""
    before, now = teachers_of(saved), teachers_of(cfg)
    pinned = {}
    for source, path in now.items():
        name, known = hub_name(path), hub_name(before.get(source, ""))
        if name is not None and known is not None and known.repo == name.repo and not name.revision:
            path = str(known)
        pinned[source] = pin(path)
    return pinned.get(ALL_SOURCES, pinned) if pinned else cfg.teacher.path


def with_commit(arguments: Sequence[str], cfg: Config) -> list[str]:
    """Return a command's arguments for its processes, which then use the same commit."""
    named = [f"model.path={cfg.model.path}"] if hub_name(cfg.model.path) is not None else []
    teachers = teachers_of(cfg)
    if any(hub_name(path) is not None for path in teachers.values()):
        entries = ", ".join(f"{source}: '{path}'" for source, path in teachers.items())
        named.append(f"teacher.path={teachers.get(ALL_SOURCES, f'{{{entries}}}')}")
    return [*arguments, *named]


def changes(before: Config, now: Config) -> dict[str, str]:
    """Return the keys whose values differ, each with both values. The key `run` does not count."""
    differences = {}
    for key in leaves():
        new, old = (_MEANT[key](cfg) if key in _MEANT else get(cfg, key) for cfg in (now, before))
        if key != "run" and new != old:
            differences[key] = f"{key}={new!r:.{_LONGEST}}, was {old!r:.{_LONGEST}}"
    return differences


def _divergence(cfg: Config) -> str | None:
    """Return the divergence that distill.divergence means; None without a teacher."""
    default = "forward" if cfg.train.objective == "distill" else "reverse"
    return None if cfg.teacher.path is None else cfg.distill.divergence or default


# Keys whose values are written in several ways, or mean something only beside other keys.
_MEANT: dict[str, Callable[[Config], Any]] = {
    "data.train": lambda cfg: plain_sources(cfg.data.train),
    "data.eval": lambda cfg: plain_sets(cfg.data.eval),
    "distill.divergence": _divergence,
}


def changed_since(checkpoint: Path, cfg: Config, reported: Collection[str]) -> Iterator[str]:
    """Yield a line with every key that differs between a resumed run and its checkpoint, except for
    those that are reported already."""
    before = saved_config(checkpoint)
    differences = {} if before is None else changes(before, cfg)
    if texts := [text for text in differences.values() if text not in reported]:
        yield f"settings changed since {checkpoint.name}: {'; '.join(texts)}"


def check_unnamed(cfg: Config, overrides: Sequence[str], file: ConfigFile | None) -> Config | None:
    """Refuse to continue an unnamed run that was another experiment. Return its configuration."""
    folder = Path(cfg.run)
    before = saved_config(folder)
    is_named = "run" in given_keys(overrides, file)
    if before is None or is_named or not any(folder.glob("checkpoints/step-*")):
        return before
    texts = [
        text
        for key, text in changes(before, cfg).items()
        if key.startswith(_LEARNING) and key not in _GOING_ON
        if key != "model.path" or not _is_same_model(before.model.path, cfg.model.path)
    ]
    if texts:
        raise ConfigError(
            f"is not set, and {folder} holds a run with other settings ({'; '.join(texts)})",
            key="run",
            remedy=f"give run=FOLDER for a new one, or run={folder} to go on with that one",
        )
    return before


def _is_same_model(pinned: str, path: str) -> bool:
    """Return whether both names are of one repository on the Hub."""
    before, now = hub_name(pinned), hub_name(path)
    return before is not None and now is not None and before.repo == now.repo
