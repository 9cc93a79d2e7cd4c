# make fla-env, then .venv/bin/python -m pytest tests/model/test_fla.py
"""flash-linear-attention's own kernels, which Triton's interpreter runs without a GPU
(support/fla_interpreter.py): the rule, and a whole worker with model.delta_rule=fla."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-fla" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,  # the interpreter takes minutes
    pytest.mark.engine("fla"),
]


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """Return the errors of all cases, which one process computes."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    done = subprocess.run(
        [PYTHON, "-m", "tests.support.fla_interpreter"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# Relative to this package's rule in fp32. Measured: 6.8e-5 for a single token, whose decay has the
# gradient zero but for rounding, and 3.1e-5 for strong decays; in bf16, 7.6e-3.
TOLERANCE = {"fp32": 3e-4, "bf16": 3e-2}
WORKER_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-2}  # measured: 4.6e-6 and 1.2e-2


def check(name: str, errors: dict[str, float], tolerance: float) -> None:
    wrong = [f"{key} {error:.1e}" for key, error in errors.items() if not error <= tolerance]
    assert not wrong, f"{name}: {', '.join(wrong)}"


def test_outputs_states_and_gradients_are_those_of_our_rule(compared):
    for name, errors in compared["rules"].items():
        check(name, errors, TOLERANCE[name.rpartition(", ")[2]])
    assert len(compared["rules"]) == 16


def test_a_worker_has_the_same_losses_and_gradients(compared):
    """At TP2, at PP2, and in bf16. transformers' reference is computed by torch, which it would not
    be by itself where flash-linear-attention is installed."""
    for layout, errors in compared["workers"].items():
        check(layout, errors, WORKER_TOLERANCE["bf16" if layout == "bf16" else "fp32"])
    assert set(compared["workers"]) == {"1x1x1", "tp2", "pp2", "bf16", "transformers"}
