"""Trackers: programs of others that also get the figures and samples of a run, log.trackers.

A package registers one by an entry point of the group `megatron_vlm.trackers`. Its object starts a
tracker: it is called with a `TrackedRun` and returns a `Tracker`.

Each tracker is called in a thread of its own. One that raises or hangs costs its figures and a
warning, and never the run."""

import base64
import importlib.util
import io
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

import PIL.Image

from megatron_vlm.config.schema import Config, leaves
from megatron_vlm.distributed.process import rank_of_process
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.report.metrics_lines import Example
from megatron_vlm.secret_text import hide_secrets

TRACKER_GROUP = "megatron_vlm.trackers"
_KINDS = "megatron_vlm.run.tracker_kinds"
_NAMES = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")  # also of their packages
_BUILT_IN = {name: EntryPoint(name, f"{_KINDS}:start_{name}", TRACKER_GROUP) for name in _NAMES}
TRACKER_PATIENCE_S = 300.0  # maximum duration of a call
_MAX_WAITING = 1000  # calls that a tracker may be behind
_LONGEST = 300  # characters of an error


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for."""

    id: str  # the same when the run is started again
    name: str
    project: str
    folder: Path
    first_step: int  # steps that an earlier start has done
    config: Mapping[str, Any]  # values by their keys, such as optim.lr

    @staticmethod
    def from_config(cfg: Config, first_step: int) -> "TrackedRun":
        """Return the run of this configuration, with the id that its folder has."""
        folder, values = Path(cfg.run), asdict(cfg)
        settings = {key: reduce(getitem, key.split("."), values) for key in leaves()}
        run = (read_mark(folder) or {}).get("run") or uuid.uuid4().hex
        return TrackedRun(run, folder.name, cfg.log.project, folder, first_step, settings)


@dataclass(frozen=True)
class TrackedSample:
    """A question with its pictures, and what the model answered."""

    text: str
    images: Sequence[str] = ()  # data URIs

    def pictures(self) -> list[PIL.Image.Image]:
        """Decode the pictures."""
        files = (base64.b64decode(uri.partition(",")[2]) for uri in self.images)
        return [PIL.Image.open(io.BytesIO(file)).convert("RGB") for file in files]

    @staticmethod
    def from_example(example: Example) -> "TrackedSample":
        """Return the sample of a question of an evaluation set."""
        parts = [part for turn in example.turns for part in turn.parts]
        asked = "\n".join("".join(part.text for part in turn.parts) for turn in example.turns)
        text = f"{asked}\nright answer: {example.answer}\nanswer: {example.prediction}"
        return TrackedSample(text, [part.image for part in parts if part.image])

    @staticmethod
    def from_line(line: Mapping[str, Any]) -> "list[TrackedSample]":
        """Return the samples of a line of samples.jsonl: one for each episode of a prompt."""
        right = "" if line["right"] is None else f"\nright answer: {line['right']}"
        asked = f"{line['question']}{right}\nanswer: "
        return [
            TrackedSample(
                "\n".join([asked + " / ".join(each["answers"]), f"reward: {each['reward']}"]),
                [*line["images"], *(uri for heard in each["heard"] for uri in heard["images"])],
            )
            for each in line["episodes"]
        ]


class Tracker(Protocol):
    """A tracker that has started. All calls come from the thread that started it."""

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step by the names of their charts, such as train/loss."""

    def log_samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        """Add samples of a step: of the evaluation set of this name, or of rl."""

    def finish(self) -> None:
        """Write or send what is left."""


def _start_of(name: str) -> Callable[[TrackedRun], Tracker]:
    known = _BUILT_IN | {each.name: each for each in entry_points(group=TRACKER_GROUP)}
    if name not in known:
        raise ConfigError(key="log.trackers", found=name, allowed=tuple(known))
    try:
        return known[name].load()  # type: ignore[no-any-return]
    except Exception as error:  # code of others may raise anything
        problem, remedy = f"cannot be imported: {error!r}", f"correct {known[name].value}"
        raise ConfigError(problem, key="log.trackers", found=name, remedy=remedy) from error


def check_trackers(cfg: Config) -> None:
    """Refuse a tracker that could not be started later. A command asks before it starts a job, and
    rank 0 asks again: torchrun runs no command, and Ray may give the rank another login."""
    for name in cfg.log.trackers if rank_of_process() == 0 else ():
        _start_of(name)
        if name in _NAMES and importlib.util.find_spec(name) is None:
            problem, remedy = f"needs the package {name}", f"run pip install {name}"
            raise ConfigError(problem, key="log.trackers", found=name, remedy=remedy)
        if name == "wandb":
            wandb_mode()


def wandb_mode() -> str:
    """Return how W&B will log: online, offline or disabled. Raise a ConfigError if it would
    need a login that it does not have. This asks W&B's own functions, and no server."""
    from pydantic import ValidationError
    from wandb.errors import AuthenticationError
    from wandb.sdk import wandb_setup

    try:
        settings = wandb_setup.singleton().settings
    except ValidationError as error:  # a WANDB_ variable or its settings file is wrong
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f": wandb cannot read its settings: {'; '.join(faults)}",
            key="log.trackers",
            found="wandb",
            remedy="correct the WANDB_ variables, such as WANDB_MODE, or wandb's settings file",
        ) from error
    for name, modes in {"offline": ("offline", "dryrun"), "disabled": ("disabled",)}.items():
        if settings.mode in modes:
            return name
    try:
        from wandb.sdk.lib.wbauth import authenticate_session

        found = authenticate_session(
            host=settings.base_url, source="log.trackers", prompt=False, update_session=False
        )
    except (ImportError, TypeError):  # The version has no such function: its `init` decides.
        return "online"
    except AuthenticationError as error:
        raise _no_login(str(error).rstrip(".")) from error
    if found is None:
        raise _no_login(f"there is no login for {settings.base_url}")
    return "online"


def _no_login(reason: str) -> ConfigError:
    return ConfigError(
        f": {reason}",
        key="log.trackers",
        found="wandb",
        remedy="run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to log into RUN "
        "and send it later with `wandb sync`",
    )


class TrackerThread:
    """The calls of a tracker, in order and in a thread of their own."""

    def __init__(self, name: str, run: TrackedRun, patience_s: float = TRACKER_PATIENCE_S):
        self.name, self.patience_s = name, patience_s
        self.problem: str | None = None  # why the tracker is lost
        self.calls: queue.Queue[Callable[[Tracker], object]] = queue.Queue(_MAX_WAITING)
        self.busy_since: float | None = time.monotonic()
        self.has_answered = threading.Event()
        threading.Thread(target=self._work, args=(run,), daemon=True).start()

    def send(self, call: Callable[[Tracker], object]) -> None:
        """Leave a call to the thread, unless the tracker is lost."""
        since = self.busy_since  # the thread may change it at any time
        if self.calls.full() or (since and time.monotonic() - since > self.patience_s):
            self._lose(f"it has not answered within {self.patience_s:g} s")
        elif self.problem is None:
            self.calls.put(call)

    def wait(self) -> None:
        """Wait until all calls have returned, or for as long as one may take."""
        self.has_answered.clear()
        self.send(lambda tracker: self.has_answered.set())
        if self.problem is None and not self.has_answered.wait(self.patience_s):
            self._lose(f"it has not answered within {self.patience_s:g} s")

    def _lose(self, why: str) -> None:
        self.problem = self.problem or why

    def _work(self, run: TrackedRun) -> None:
        try:
            tracker = _start_of(self.name)(run)
            while self.problem is None:
                self.busy_since = None
                call = self.calls.get()
                self.busy_since = time.monotonic()
                call(tracker)
        except BaseException as error:  # code of others may also try to exit
            text = " ".join(hide_secrets(f"{type(error).__name__}: {error}").split())
            self._lose(f"it raised {text[:_LONGEST]}")
            self.has_answered.set()
