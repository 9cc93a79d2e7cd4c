"""Sinks for the lines of a run: metrics.jsonl, TensorBoard, Weights & Biases."""

import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import rank_of_process
from megatron_vlm.errors import ConfigError, TrainError
from megatron_vlm.report.metrics_lines import EvalLine, Line, RlLine, StepLine, to_json


def check_sinks(cfg: Config) -> None:
    """Refuse a sink that could not be opened later. A command asks before it starts a job, and rank
    0 asks again: torchrun runs no command, and Ray may give the rank another login."""
    for key, setting in (("tensorboard", cfg.log.tensorboard), ("wandb", cfg.log.wandb)):
        if setting and importlib.util.find_spec(key) is None:
            raise ConfigError(
                f"needs the package {key}",
                key=f"log.{key}",
                found=setting,
                remedy="run pip install 'megatron_vlm[log]'",
            )
    if cfg.log.wandb is not None and rank_of_process() == 0:
        wandb_mode(cfg)


def wandb_mode(cfg: Config) -> str:
    """Return how W&B will log: online, offline or disabled. Raise a ConfigError if it would need a
    login that it does not have. This asks W&B's own functions, and no server."""
    from pydantic import ValidationError
    from wandb.errors import AuthenticationError
    from wandb.sdk import wandb_setup

    try:
        settings = wandb_setup.singleton().settings
    except ValidationError as error:  # a WANDB_ variable or its settings file is wrong
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(
            f": wandb cannot read its settings: {'; '.join(faults)}",
            key="log.wandb",
            found=cfg.log.wandb,
            remedy="correct the WANDB_ variables, such as WANDB_MODE, or wandb's settings file",
        ) from error
    for name, modes in {"offline": ("offline", "dryrun"), "disabled": ("disabled",)}.items():
        if settings.mode in modes:
            return name
    try:
        from wandb.sdk.lib.wbauth import authenticate_session

        found = authenticate_session(
            host=settings.base_url, source="log.wandb", prompt=False, update_session=False
        )
    except (ImportError, TypeError):  # The version has no such function: its `init` decides.
        return "online"
    except AuthenticationError as error:
        raise _no_login(cfg, str(error).rstrip(".")) from error
    if found is None:
        raise _no_login(cfg, f"there is no login for {settings.base_url}")
    return "online"


def _no_login(cfg: Config, reason: str) -> ConfigError:
    return ConfigError(
        f": {reason}",
        key="log.wandb",
        found=cfg.log.wandb,
        remedy="run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to log into RUN "
        "and send it later with `wandb sync`",
    )


class UnbufferedFile:
    """A growing file without a buffer. Data that cannot be written now is not kept for later."""

    def __init__(self, path: Path):
        self.path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab", buffering=0)

    def write(self, text: bytes) -> None:
        with self._writing():
            while text:
                text = text[self.file.write(text) :]

    def close(self) -> None:
        self.file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainError(
                f"cannot be written: {error.strerror}",
                place=str(self.path),
                remedy="free space there, or give another run=FOLDER; started again, the run "
                "resumes from its last checkpoint",
            ) from error


class JsonLines:
    """The file metrics.jsonl or samples.jsonl. Each line is one, even after a killed run's."""

    def __init__(self, path: Path):
        before = path.read_bytes() if path.is_file() else b""
        self.file = UnbufferedFile(path)
        if before and not before.endswith(b"\n"):  # the last line of a killed run
            self.file.write(b"\n")

    def write(self, line: Line) -> None:
        self.add(to_json(line))

    def add(self, text: str) -> None:
        """Write a line that is already formatted."""
        self.file.write(text.encode() + b"\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """A sink that writes TensorBoard lines at once: errors of its own writer's thread come late and
    with a traceback, and a killed process does not wait for it."""

    def __init__(self, folder: Path):
        from tensorboard.summary.writer.record_writer import RecordWriter

        now, here = int(time.time()), f"{socket.gethostname()}.{os.getpid()}"
        self.file = UnbufferedFile(folder / f"events.out.tfevents.{now}.{here}")
        self.records = RecordWriter(self.file)
        self._add(file_version="brain.Event:2")

    def write(self, line: Line) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=k, simple_value=v) for k, v in _numbers(line).items()]
        if numbers:
            self._add(step=line.step, summary=Summary(value=numbers))

    def close(self) -> None:
        self.file.close()

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **content).SerializeToString())


class WandB:
    """A sink for W&B. A resumed run continues the same W&B run, whose id is in RUN."""

    def __init__(self, cfg: Config):
        import wandb

        id_path = Path(cfg.run) / "wandb_id"
        if not id_path.exists():
            id_path.write_text(uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=cfg.log.wandb,
                dir=cfg.run,
                name=Path(cfg.run).name,
                id=id_path.read_text().strip(),
                resume="allow",
                config=asdict(cfg),
            )
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise _no_login(cfg, " ".join(str(error).rstrip(".").split())) from error

    def write(self, line: Line) -> None:
        if numbers := _numbers(line):
            self.run.log(numbers, step=line.step)

    def close(self) -> None:
        self.run.finish()


def _numbers(line: Line) -> dict[str, float]:
    """Return the scalars of a line, named as the charts are: train/loss, eval/exact_match,
    rl/reward. A figure of a reward is rl/NAME, or rl/figures/NAME if RlLine has a field of that
    name."""
    if isinstance(line, RlLine):
        figures = {f"{'figures/' * (k in vars(line))}{k}": v for k, v in line.figures.items()}
        return _scalars("rl", line) | {f"rl/{name}": value for name, value in figures.items()}
    if isinstance(line, StepLine | EvalLine):
        prefix = "train" if isinstance(line, StepLine) else line.name
        metrics = (line.metrics or {}) if isinstance(line, EvalLine) else {}
        return _scalars(prefix, line) | {f"{prefix}/{k}": v for k, v in metrics.items()}
    return {}


def _scalars(prefix: str, line: Line) -> dict[str, float]:
    return {
        f"{prefix}/{key}": float(value)
        for key, value in vars(line).items()
        if isinstance(value, int | float) and key not in ("step", "wall_s")
    }
