"""Seconds from the command `megatron-vlm train` to the end of its first step, with a tiny model.

make bench   (or: .venv/bin/python benchmarks/first_step.py)
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

REPEATS = 3


def cli(*arguments: str) -> list[str]:
    """Return the command of this environment."""
    return [sys.executable, "-m", "megatron_vlm.cli", *arguments]


def first_step(folder: Path, number: int) -> float:
    """Train until the line of the first step is logged; return the seconds."""
    run = folder / f"run{number}"
    command = cli(
        "train",
        "model=tiny_cpu",
        f"model.path={folder}/tiny",
        f"data.train={folder}/shapes/train.jsonl",
        f"data.cache_dir={folder}/cache{number}",
        "train.steps=2",
        f"run={run}",
    )
    metrics = run / "metrics.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (metrics.exists() and any(map(_is_step, metrics.read_text().splitlines()))):
        assert process.poll() in (None, 0), "training ended"
        time.sleep(0.02)
    taken = time.perf_counter() - start
    process.wait()
    return taken


def _is_step(line: str) -> bool:
    return line.endswith("}") and json.loads(line)["kind"] == "step"


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(cli("demo", "tiny", "--out", f"{folder}/tiny"), check=True)
        subprocess.run(
            cli("demo", "shapes", "--out", f"{folder}/shapes", "--train", "200"), check=True
        )
        times = [first_step(folder, number) for number in range(REPEATS)]
    record(
        "first_step", {"first_step_s": statistics.median(times), "first_step_s_worst": max(times)}
    )


if __name__ == "__main__":
    main()
