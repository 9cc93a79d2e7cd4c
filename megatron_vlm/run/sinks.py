"""Where the lines of a run go: metrics.jsonl, TensorBoard, Weights & Biases. Each takes a line as
`run_log.py` makes it, a dict with a `kind`."""

import importlib.util
import json
import math
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError


def check_installed(cfg: Config) -> None:
    """Refuse what cannot be written to before anything is loaded."""
    for key, wanted in (("tensorboard", cfg.log.tensorboard), ("wandb", cfg.log.wandb)):
        if wanted and importlib.util.find_spec(key) is None:
            raise ConfigError(
                f"log.{key}={wanted} needs the package {key}: pip install 'megatron_vlm[log]'"
            )


class JsonLines:
    """A line is written whole or not at all; numbers that are not finite become null."""

    def __init__(self, path: Path):
        cut_line = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self.file = path.open("a")
        if cut_line:  # a killed run's last line
            self.file.write("\n")

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps({key: _finite(value) for key, value in line.items()}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, line: dict[str, Any]) -> None:
        for key, value in _numbers(line).items():
            self.writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A resumed run goes on as the same one: its id is kept in the run's folder."""

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

    def write(self, line: dict[str, Any]) -> None:
        if numbers := _numbers(line):
            self.run.log(numbers, step=line["step"])

    def close(self) -> None:
        self.run.finish()


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """A line's scalars under the names of charts: train/loss, eval/exact_match."""
    prefix = {"step": "train", "eval": line.get("name", "eval")}.get(line["kind"])
    if prefix is None:
        return {}
    return {
        f"{prefix}/{key}": float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and key != "step"
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
