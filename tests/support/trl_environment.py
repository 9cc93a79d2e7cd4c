"""TRL itself, in its own environment (make trl-env)."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.comparison import check_worst

PYTHON = Path(__file__).parents[2] / ".venv-trl" / "bin" / "python"


def run_trl(script: str, *arguments: object, given: Any = None) -> Any:
    """Run a script of this folder there, and return the JSON that it prints."""
    return json.loads(_printed(script, arguments, json.dumps(given)))


def run_on_tensors(script: str, case: Any, folder: Path) -> Any:
    """Run a script of this folder there with a file of torch, and return the content of the file
    that it writes."""
    given, out = folder / "case.pt", folder / "out"
    torch.save(case, given)
    _printed(script, (given, out))
    return torch.load(out)


def _printed(script: str, arguments: Sequence[object], given: str | None = None) -> str:
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name(script), *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_"))},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def check_trl(
    loss: Tensor,
    grad: Tensor,
    theirs: Mapping[str, Any],
    tolerance: float,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare a loss and its gradient in float64 with TRL's, by the largest value."""
    want = torch.tensor(theirs["grad"], dtype=torch.float64)
    assert want.any()
    errors = {
        "loss": abs(float(loss) - theirs["loss"]) / abs(theirs["loss"]),
        "gradient": float((grad - want).abs().max() / want.abs().max()),
    }
    check_worst(errors, tolerance, record_property)
