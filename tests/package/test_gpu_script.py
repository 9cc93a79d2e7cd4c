# .venv/bin/python -m pytest tests/package/test_gpu_script.py
"""Files and output of `make gpu`. In CI, `make gpu-dry` shows that its steps work."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.run import STEPS, unpack
from benchmarks.gpu.tables import write_tables
from benchmarks.gpu.work import STACKS, WHOLES, largest, needs

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--dry", "--out"]


def run(out: Path, *options: str) -> tuple[int, str, dict[tuple[str, str], Any]]:
    command = [*SCRIPT, str(out), "--wheels", str(out / "none"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    figures = {(line["step"], line["key"]): line["value"] for line in lines}
    return done.returncode, done.stdout, figures


@pytest.mark.full
def test_what_is_found_is_kept(tmp_path):
    status, output, figures = run(tmp_path, "--only", "ceilings")
    assert status == 0
    assert figures["ceilings", "status"].startswith("done, ")
    assert figures["ceilings", "copy_gb_per_s"] > 0 < figures["ceilings", "gemm_bf16_tflops"]
    table = (tmp_path / "tables.md").read_text()
    assert "## ceilings" in table and table in output
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["figures.jsonl", "log.txt", "tables.md"]


def test_a_run_without_time_is_no_success(tmp_path):
    status, output, figures = run(tmp_path, "--seconds", "5", "--only", "parity")
    assert status == 1
    assert figures["parity", "status"] == "not begun: no time left, 0 s"
    assert "| status | not begun: no time left, 0 s |" in output


def test_what_does_not_hold_is_said(tmp_path):
    figures = tmp_path / "figures.jsonl"
    held = {"step": "parity", "key": "tp1", "value": {"found": 0.5, "bound": 1, "holds": True}}
    broken = {**held, "key": "tp2", "value": {"found": 3.0, "bound": 1, "holds": False}}
    figures.write_text(json.dumps(held) + "\n")
    assert write_tables(figures, tmp_path / "tables.md")
    figures.write_text(f"{json.dumps(held)}\n{json.dumps(broken)}\n")
    assert not write_tables(figures, tmp_path / "tables.md")
    text = (tmp_path / "tables.md").read_text()
    assert "| tp1 | 0.5 of at most 1 |" in text
    assert "| tp2 | 3 of at most 1 **does not hold** |" in text


def test_the_steps_fit_one_call():
    timed = sum(step.seconds for step in STEPS if step.is_timed)
    together = max(step.seconds for step in STEPS if not step.is_timed)
    assert timed + together <= 900  # seconds that the script takes by default
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_wheels_are_unpacked(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "x = 1")
    unpack(tmp_path / "wheels", tmp_path / "site")
    assert (tmp_path / "site" / "a" / "__init__.py").read_text() == "x = 1"


@pytest.mark.parametrize(
    ("gib", "stack", "whole"),
    [
        (139, "12 of the 36 layers of Qwen3-VL 8B", "Qwen3-VL 2B"),
        (79, "4 of the 36 layers of Qwen3-VL 8B", "Qwen3-VL 2B, two rows"),
        (52, None, "Qwen3-VL 2B, one row"),
        (23, None, None),
    ],
)
def test_a_device_measures_the_largest_model_that_it_holds(gib, stack, whole):
    choices = [largest(STACKS, gib * 2**30), largest(WHOLES, gib * 2**30)]
    assert [work and work.name for work in choices] == [stack, whole]


def test_the_models_are_listed_from_the_largest():
    for works in (STACKS, WHOLES):
        bytes_of = [needs(work, "none") for work in works]
        assert bytes_of == sorted(bytes_of, reverse=True)
