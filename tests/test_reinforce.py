# .venv/bin/python -m pytest tests/test_reinforce.py
"""The worked example: inside torchrun and over Ray it is one controller. `make reinforce`, which
.ci/run does, fails where it does not learn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_train import outside_of_jobs

pytestmark = pytest.mark.slow  # minutes: it learns the words of answers twice
ROOT = Path(__file__).parent.parent
SCRIPT = "scripts/reinforce_shapes.py"


def rewards(out: Path, launcher: list[str], *words: str) -> list[float]:
    """Of the first three steps, which are by far too few: hence status 1."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*launcher, SCRIPT, str(out), "--steps", "3", "parallel.pp=2", *words],
        cwd=ROOT,
        env=outside_of_jobs() | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "at the end (needs 0.8)" in done.stdout, done.stderr
    assert (out / "export" / "config.json").exists()
    return json.loads((out / "rewards.json").read_text())


def test_rewards_over_ray_are_those_inside_torchrun(tmp_path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    one, other = tmp_path / "inside", tmp_path / "over-ray"
    subprocess.run([sys.executable, SCRIPT, str(one), "--make"], cwd=ROOT, check=True)
    shutil.copytree(one, other)
    inside = rewards(one, ["torchrun", "--standalone", "--nproc-per-node=2"])
    over_ray = rewards(other, [sys.executable], "--ray", "2")
    assert inside == over_ray and 0 < sum(inside) / 3 < 0.5  # about as good as a guess
    tuned = [(out / "export" / "model.safetensors").read_bytes() for out in (one, other)]
    assert tuned[0] == tuned[1]
