"""Where the lines of a run go: metrics.jsonl, TensorBoard, Weights & Biases."""

import importlib.util
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError, TrainError
from megatron_vlm.run.lines import EvalLine, Line, StepLine, to_json


def check_installed(cfg: Config) -> None:
    """Refuse a sink whose package is missing, before anything is loaded."""
    for key, wanted in (("tensorboard", cfg.log.tensorboard), ("wandb", cfg.log.wandb)):
        if wanted and importlib.util.find_spec(key) is None:
            raise ConfigError(
                f"log.{key}={wanted} needs the package {key}: pip install 'megatron_vlm[log]'"
            )


class JsonLines:
    """metrics.jsonl. Every line starts on a line of its own, also after a run that was killed."""

    def __init__(self, path: Path):
        self.path = path
        with self._writing():
            before = path.read_bytes() if path.exists() else b""
            self.file = path.open("ab", buffering=0)  # what could not be written is not kept
            if before and not before.endswith(b"\n"):  # the last line of a killed run
                self._write("\n")

    def write(self, line: Line) -> None:
        with self._writing():
            self._write(to_json(line) + "\n")

    def close(self) -> None:
        self.file.close()

    def _write(self, text: str) -> None:
        left = text.encode()
        while left:
            left = left[self.file.write(left) :]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainError(
                f"{self.path} cannot be written: {error.strerror}; free space there, or give "
                "another run=FOLDER; started again, the run resumes from its last checkpoint"
            ) from error


class TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, line: Line) -> None:
        for key, value in _numbers(line).items():
            self.writer.add_scalar(key, value, line.step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A resumed run continues the same W&B run: its id is kept in the folder of the run."""

    def __init__(self, cfg: Config):
        import wandb

        kept = Path(cfg.run) / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:12])
        self.run = wandb.init(
            project=cfg.log.wandb,
            dir=cfg.run,
            name=Path(cfg.run).name,
            id=kept.read_text().strip(),
            resume="allow",
            config=asdict(cfg),
        )

    def write(self, line: Line) -> None:
        if numbers := _numbers(line):
            self.run.log(numbers, step=line.step)

    def close(self) -> None:
        self.run.finish()


def _numbers(line: Line) -> dict[str, float]:
    """The scalars of a step or an evaluation, named as charts are: train/loss, eval/exact_match."""
    if not isinstance(line, StepLine | EvalLine):
        return {}
    prefix = "train" if isinstance(line, StepLine) else line.name
    return {
        f"{prefix}/{key}": float(value)
        for key, value in vars(line).items()
        if isinstance(value, int | float) and key != "step"
    }
