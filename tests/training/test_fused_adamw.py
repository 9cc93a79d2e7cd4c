# make fla-env, then .venv/bin/python -m pytest tests/training/test_fused_adamw.py
"""AdamW's kernel in Triton's interpreter, which needs no GPU (support/adamw_interpreter.py): it has
every bit of the code that runs without Triton. And it compiles for GPUs."""

import json
import math
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
MOST_BYTES = {"fp32": 30.1, "bf16": 22.1, "int8": 19.0}  # with the tables of int8, once


def answer_of(*words: str, interpreted: bool = True) -> Any:
    """Return what a process with Triton prints last."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    kept |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    done = subprocess.run(
        [PYTHON, *words], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compared() -> Any:
    return answer_of("-m", "tests.support.adamw_interpreter")


def test_every_bit_is_that_of_the_code_without_triton(compared):
    """Over 20 steps, some of which clip; one is skipped, and before one both resume from each
    other's state."""
    assert len(compared["values"]) == 9
    assert set(compared["values"].values()) == {0}, compared["values"]


def test_a_worker_has_the_same_weights(compared):
    for name, found in compared["workers"].items():
        assert found["different"] == 0, f"{name}: {found}"
        assert found["values"] > 100_000 and found["steps"] == [3, 3], f"{name}: {found}"
        assert max(found["norms"][:2]) > 2 and math.isnan(found["norms"][2]), f"{name}: {found}"
    assert len(compared["workers"]) == 7


def test_a_weight_takes_few_bytes():
    """At most 24 with small moments, where separate kernels take hundreds."""
    for states, found in answer_of("benchmarks/optimizer_bytes.py").items():
        assert found["kernel"] <= MOST_BYTES[states] < found["operations"], (states, found)


def test_it_compiles_for_gpus():
    """It rounds where the code without Triton does: products and sums are joined in two places
    alone, 16 times for the 8 weights of a thread. And it moves 16 bytes at a time."""
    compiled = answer_of("-m", "tests.support.adamw_compiled", interpreted=False)
    for name, count in compiled.items():
        assert (count["fma.rn.f32"], count["div.full"], count["sqrt.approx"]) == (16, 0, 0), name
        assert count["ld.global.v4.b32"] >= 4 and count["st.global.v4.b32"] >= 2, (name, count)
    assert len(compiled) == 6
