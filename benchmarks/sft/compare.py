"""Ratio of the samples per second of this trainer to those of TRL's SFTTrainer, with the same
chats, photographs, model and batch, from the files to the optimizer step. They take turns step by
step.

    make bench   (or: make trl-env, then .venv/bin/python benchmarks/sft/compare.py)
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megatron_vlm.family.cpu_matmul import enable_onednn

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from hf_ratio import BASE  # noqa: E402
from record import record  # noqa: E402
from sft.rows import MIXED, MIXED_QWEN3_5, UNIFORM, Mix, write_inputs  # noqa: E402

WARM_UP, REPEATS = 1, 6
COMPARED = 3  # the losses of these first steps must agree
APART = 1e-5  # maximum relative difference; 3.5e-7 in the first step
THEIRS, OURS = ROOT / ".venv-trl" / "bin" / "python", Path(sys.executable)


def same_products() -> str:
    """Return the setting with which torch uses this package's library for matrix products
    elsewhere, too: see megatron_vlm/family/cpu_matmul.py."""
    enable_onednn(BASE.hidden, has_experts=False)
    return torch.get_float32_matmul_precision()


# Sides that take turns: the Python, the program and its last argument. For TRL it is the precision
# of products, for this package the number of data workers.
SIDES = {
    "theirs": (THEIRS, "theirs.py", "highest"),
    "theirs_same_products": (THEIRS, "theirs.py", same_products()),
    "ours": (OURS, "ours.py", "0"),
    "two_workers": (OURS, "ours.py", "2"),
}


def start(side: str, folder: Path, mix: Mix) -> "subprocess.Popen[str]":
    """Start a trainer in a process and a folder of its own."""
    python, program, last = SIDES[side]
    command = [str(python), str(HERE / program), str(folder)]
    command += [str(mix.rows), str(mix.micro_batch), last]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / f"{side}.log").open("w"),
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )


def step(process: "subprocess.Popen[str]", log: Path) -> tuple[float, float]:
    """Return the seconds and the loss of a step."""
    assert process.stdin is not None and process.stdout is not None
    start_s = time.perf_counter()
    print("step", file=process.stdin, flush=True)
    line = process.stdout.readline()
    taken = time.perf_counter() - start_s
    if not line:
        raise SystemExit(f"a side ended:\n{log.read_text()[-3000:]}")
    return taken, float(json.loads(line)["loss"])


def compare(mix: Mix) -> dict[str, float]:
    """Compare both sides on this mix."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, mix, WARM_UP + REPEATS + 1)
        sides = {side: start(side, folder, mix) for side in SIDES}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        losses: list[dict[str, float]] = []
        for repeat in range(WARM_UP + REPEATS):
            results = {side: step(each, folder / f"{side}.log") for side, each in sides.items()}
            losses.append({side: loss for side, (_, loss) in results.items()})
            for side, (taken, _) in results.items():
                if repeat >= WARM_UP:
                    seconds[side].append(taken)
        for process in sides.values():
            process.kill()
    assert all(loss["two_workers"] == loss["ours"] for loss in losses), losses
    apart = [abs(loss["ours"] - loss["theirs"]) / loss["theirs"] for loss in losses[:COMPARED]]
    if max(apart) > APART:
        raise SystemExit(f"{mix.name}: the losses of the first steps differ: {losses[:COMPARED]}")
    return _figures(mix, seconds, max(apart))


def _figures(mix: Mix, seconds: dict[str, list[float]], apart: float) -> dict[str, float]:
    ratios = [a / b for a, b in zip(seconds["theirs"], seconds["ours"], strict=True)]
    of = {side: statistics.median(taken) for side, taken in seconds.items()}
    figures = {
        "trl_samples_per_s": mix.rows / of["theirs"],
        "ours_samples_per_s": mix.rows / of["ours"],
        "trl_ratio": of["theirs"] / of["ours"],
        "trl_ratio_same_products": of["theirs_same_products"] / of["ours"],
        "trl_ratio_least_of_a_step": min(ratios),
        "trl_losses_apart": apart,
        "two_workers_step": of["two_workers"] / of["ours"],
    }
    return {f"{key}_{mix.name}": value for key, value in figures.items()}


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    if not THEIRS.exists():
        raise SystemExit("make trl-env builds the environment of the other side")
    record("trl", {**compare(MIXED), **compare(UNIFORM)})
    record("trl_qwen3_5", compare(MIXED_QWEN3_5))


if __name__ == "__main__":
    main()
