# .venv/bin/python -m pytest tests/training/test_golden.py
"""Twenty steps, compared digit for digit: a refactoring changes none.

`worker` calls MegatronWorker with random rows. `trainer` and `trainer_pp2` are whole runs of
`megatron-vlm train`: loader, schedule, clipping and optimizer, in one process and over two stages.

A change of math changes the file in the same commit and gives the reason:
.venv/bin/python -m tests.training.test_golden > tests/golden/losses.json
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.support.suites import slow

pytestmark = pytest.mark.newest  # it depends on the versions

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"
ROOT = Path(__file__).parents[2]
STEPS = 20
# The same kernels on every x86-64 processor, in one thread; otherwise the last digit varies by CPU.
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
TRAINER = (
    "model=tiny_cpu platform=cpu run=run model.path=tiny data.train=chats.jsonl "
    "data.num_workers=0 data.cache_dir=null data.seed=3 train.steps=20 train.global_batch_size=6 "
    "train.micro_batch_tokens=150 optim.lr=3e-3 optim.vision_lr=1e-3 optim.warmup_steps=5 "
    "optim.schedule=cosine optim.min_lr_ratio=0.1 optim.weight_decay=0.05 optim.clip_grad=2.5 "
    "checkpoint.export=false log.report=false"
)
LAYOUTS = {"trainer": [], "trainer_pp2": ["parallel.pp=2", "model.recompute=full"]}


def run_worker(path: str) -> list[dict[str, str]]:
    """Return the loss and the gradient norm of each step with every digit."""
    from megatron_vlm.config import load_config
    from megatron_vlm.training.worker import MegatronWorker
    from tests.support.batches import MIXED, make_rows

    worker = MegatronWorker(load_config(["model=tiny_cpu", f"model.path={path}"]))
    steps = []
    for step in range(STEPS):
        loss = worker.forward_backward(make_rows(MIXED, seed=step % 4)).loss
        steps.append({"loss": repr(loss), "grad_norm": repr(worker.optim_step()[0])})
    return steps


def write_chats(folder: Path) -> None:
    """Write fifty chats of one or two turns, every second one with a picture or two."""
    generator = np.random.default_rng(7)
    lines = []
    for number in range(50):
        content: list[dict[str, str]] = []
        for image in range(int(generator.integers(1, 3)) * (number % 2)):
            height, width = generator.integers(1, 4, 2) * 32
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(folder / f"{number}-{image}.png")
            content.append({"type": "image", "image": f"{number}-{image}.png"})
        content.append({"type": "text", "text": "What colour is the circle? " * (number % 4 + 1)})
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": f"{number % 5} red, {number % 3} blue."},
        ]
        if number % 3 == 0:
            messages += [
                {"role": "user", "content": "How many shapes are there?"},
                {"role": "assistant", "content": "two " * (number % 7 + 1)},
            ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))


def run_trainer(folder: Path, layout: list[str]) -> list[dict[str, str]]:
    """Return the values of each step in metrics.jsonl."""
    from megatron_vlm.cli import main

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)  # of the ranks that a launcher starts
    with redirect_stdout(sys.stderr):
        assert main(["train", *TRAINER.split(), *layout]) == 0
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    return [{key: repr(step[key]) for key in ("loss", "lr", "grad_norm")} for step in steps]


def run(name: str, file: Path) -> None:
    """Write one entry of the golden file."""
    from megatron_vlm.commands.demo.tiny_model import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        write_tiny(f"{folder}/tiny")
        if name == "worker":
            steps = run_worker(f"{folder}/tiny")
        else:
            write_chats(Path(folder))
            steps = run_trainer(Path(folder), LAYOUTS[name])
    file.write_text(json.dumps(steps))


def run_forked(name: str) -> list[dict[str, str]]:
    """Return one entry of the golden file, from a fork in which all imports are done."""
    import megatron_vlm.run.run  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        process = get_context("fork").Process(target=run, args=(name, file))
        process.start()
        process.join()
        return list(json.loads(file.read_text()))


@cache
def played(*names: str) -> dict[str, list[dict[str, str]]]:
    """Return entries as a process with pinned kernels computes them now."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "tests.training.test_golden", *names]
    done = subprocess.run(command, env={**env, **PINNED}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # after torch 2.10's message about gloo
    return dict(json.loads(done.stdout[done.stdout.index("{") :]))


@pytest.mark.parametrize("name", ["worker", "trainer", slow("trainer_pp2")])
def test_golden_losses(name: str):
    actual = played(*([name] if name == "trainer_pp2" else ["worker", "trainer"]))[name]
    expected = json.loads(GOLDEN.read_text())[name]
    assert len(expected) == STEPS
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a == b, f"step {step}"
    assert float(expected[-1]["loss"]) < float(expected[0]["loss"]) - 1  # the model learns


def test_stages_change_no_loss():
    """The largest difference in 20 steps is 1.9e-7."""
    golden = json.loads(GOLDEN.read_text())
    for one, two in zip(golden["trainer"], golden["trainer_pp2"], strict=True):
        assert one["lr"] == two["lr"]
        for key in ("loss", "grad_norm"):
            assert float(two[key]) == pytest.approx(float(one[key]), rel=1.5e-6)
    norms = [float(step["grad_norm"]) for step in golden["trainer"]]
    assert min(norms) < 2.5 < max(norms)  # clipping was active in some steps only


if __name__ == "__main__":
    if not PINNED.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **PINNED})
    print(
        json.dumps(
            {name: run_forked(name) for name in sys.argv[1:] or ["worker", *LAYOUTS]}, indent=1
        )
    )
