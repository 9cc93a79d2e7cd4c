# .venv/bin/python -m pytest tests/test_golden.py
"""Twenty steps of the tiny run, compared digit for digit: a refactor moves none.

A change of math changes the file in the same commit and says why:
.venv/bin/python -m tests.test_golden > tests/golden/losses.json
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "losses.json"
ROOT = Path(__file__).parent.parent
STEPS = 20
# The same kernels on every x86-64 processor, in one thread: otherwise the last digit is the CPU's.
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def run() -> list[dict[str, str]]:
    """Loss and gradient norm of each step, every digit."""
    from megatron_vlm.config import load_config
    from megatron_vlm.tiny import write_tiny
    from megatron_vlm.worker import MegatronWorker
    from tests.batches import MIXED, make_rows

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tiny"
        write_tiny(path)
        worker = MegatronWorker(load_config(["model=tiny_cpu", f"model.path={path}"]))
        steps = []
        for step in range(STEPS):
            loss = worker.forward_backward(make_rows(MIXED, seed=step % 4)).loss
            steps.append({"loss": repr(loss), "grad_norm": repr(worker.optim_step()[0])})
        return steps


def test_golden_losses():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "tests.test_golden"]
    done = subprocess.run(
        command, env={**env, **PINNED}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    found, expected = json.loads(done.stdout), json.loads(GOLDEN.read_text())
    assert len(expected) == STEPS
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a == b, f"step {step}"
    assert float(expected[-1]["loss"]) < float(expected[0]["loss"]) - 1  # and it learns


if __name__ == "__main__":
    if not PINNED.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **PINNED})
    print(json.dumps(run(), indent=1))
