"""What the programs of the other trainers share: a step for each line on standard input.

They run in the environments of `make trl-env`, `make llamafactory-env` and `make swift-env`, which
do not have this package. Their arguments are FOLDER ROWS MICRO_BATCH PRECISION; the last one is
that of torch.set_float32_matmul_precision. They print {"loss": ...} after each step.

This is imported before transformers and torchvision.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
# torchvision's compiled operators do not load next to torch's build for the CPU. Qwen3-VL's
# processor does not use them, but they must be defined.
for operator in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

from transformers import TrainerCallback  # noqa: E402

# Only answers go to standard output.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


@dataclass(frozen=True)
class Arguments:
    """What compare.py asks for."""

    folder: str
    rows: int
    micro_batch: int

    @property
    def accumulated(self) -> int:
        """Return the number of micro-batches of a step."""
        return self.rows // self.micro_batch


def read_arguments() -> Arguments:
    """Return the arguments of the command, and set the precision of products."""
    folder, rows, micro_batch, precision = sys.argv[1:5]
    torch.set_float32_matmul_precision(precision)
    return Arguments(folder, int(rows), int(micro_batch))


class TakeTurns(TrainerCallback):
    """Callback that stops the trainer until a line requests its next step. The trainer logs at the
    end of a step. Work after that, the next batch included, belongs to the next step."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        wait()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs is not None and "loss" in logs:
            answer(logs["loss"])
            wait()


def answer(loss: float) -> None:
    """Answer a line with the loss of its step."""
    print(json.dumps({"loss": loss}), file=ANSWERS, flush=True)


def wait() -> None:
    """Wait for the next line. At the end of the input the process ends, too."""
    if not sys.stdin.readline():
        os._exit(0)
