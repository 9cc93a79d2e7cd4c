# .venv/bin/python -m pytest tests/package/test_gpu_script.py
"""Files and output of `make gpu`, and whether its steps fit what they call. In CI, `make gpu-dry`
shows that all of them work."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.gpu import run as gpu_script
from benchmarks.gpu.run import STEPS, read_done, unpack
from benchmarks.gpu.tables import write_tables
from benchmarks.gpu.work import HYBRIDS, STACKS, WHOLES, largest, needs
from megatron_vlm.training.worker import MegatronWorker
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.runs import Case

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


def test_a_run_out_of_time_is_no_success(tmp_path):
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
    together = [step.seconds for step in STEPS if not step.is_timed]
    assert timed + max(together) <= 900  # seconds that the script takes by default
    assert len(together) <= gpu_script.MAX_TOGETHER
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.full
def test_what_is_missing_is_said_and_is_no_failure(tmp_path):
    status, _output, figures = run(tmp_path, "--only", "nccl")
    assert status == 0
    assert figures["nccl", "missing"] == "a second GPU: torch sees 0"
    assert figures["nccl", "status"].startswith("not run, ")


def test_a_call_continues_those_before_it(tmp_path):
    """The newest figures of a step count, and a step that was not done is played."""

    def earlier(name: str, *steps: tuple[str, int, str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {"step": step, "key": key, "value": value}
            for step, number, status in steps
            for key, value in (("loss", number), ("status", status))
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "figures.jsonl").write_text(text)
        return folder

    one = earlier("one", ("parity", 1, "done, 9 s"), ("syncs", 1, "done, 5 s"))
    two = earlier("two", ("parity", 2, "done, 8 s"), ("syncs", 2, "stopped after 3 s, 3 s"))
    done, lines = read_done([one, two])
    assert done == {"parity", "syncs"}
    values = {json.loads(line)["step"]: json.loads(line)["value"] for line in lines[::2]}
    assert values == {"parity": 2, "syncs": 1}
    folders = [str(one), str(two)]
    status, output, figures = run(tmp_path / "new", "--only", "parity", "--earlier", *folders)
    assert status == 0 and figures["parity", "loss"] == 2 and figures["syncs", "loss"] == 1
    assert "| loss | 2 |" in output
    text = (two / "figures.jsonl").read_text()
    (two / "figures.jsonl").write_text(text.replace("done", "failed"))
    assert read_done([two]) == (set(), [])


@pytest.fixture
def steps_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def calls_of_tests(file: Path) -> Iterator[tuple[ast.Call, Any]]:
    """Yield the calls of what a file imports from the tests, with their functions."""
    tree, names = ast.parse(file.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            for alias in node.names:
                module = importlib.import_module(node.module)
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(name) if name in names:
                    yield node, names[name]
                case ast.Attribute(ast.Name(owner), name) if owner in names:
                    yield node, getattr(names[owner], name)


@pytest.mark.usefixtures("steps_can_be_imported")
def test_the_steps_fit_what_they_call():
    """Each step is a function of figures, and each call of a helper of the tests has the arguments
    that the helper takes."""
    modules = {step.module for step in STEPS}
    for step in STEPS:
        function = getattr(importlib.import_module(f"gpu.{step.module}"), step.name)
        assert list(inspect.signature(function).parameters) == ["figures"], step
    checked = set()
    for module in modules:
        for call, function in calls_of_tests(ROOT / "benchmarks" / "gpu" / f"{module}.py"):
            if any(isinstance(each, ast.Starred) for each in call.args):
                continue
            keywords = {each.arg: None for each in call.keywords if each.arg is not None}
            has_more = len(keywords) < len(call.keywords)
            signature = inspect.signature(function)
            bind = signature.bind_partial if has_more else signature.bind
            try:
                bind(*[None] * len(call.args), **keywords)
            except TypeError as error:
                pytest.fail(f"benchmarks/gpu/{module}.py:{call.lineno}: {error}")
            checked.add(function)
    assert len(checked) > 20


def play(path: str, out: Path) -> list[dict[str, Any]]:
    """Play each variant of a worker and the cheapest steps, and return the figures of these."""
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        from gpu import correct, kernels, training
        from gpu.step import Figures
        from gpu.variants import variants

        worker, rows = MegatronWorker(Case().config(path)), make_rows(MIXED)[:1]
        for variant in variants(worker, dry=True).values():
            with variant():
                worker.forward_backward(rows)
        figures = Figures("cheap", out, out, dry=True)
        correct.generation(figures, Path(path))
        training.blocks(figures)
        kernels.experts(figures)
    return [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]


def test_the_cheapest_steps_hold(pool, tiny, tmp_path):
    """Their helpers are those of tests, whose defaults may change."""
    [lines] = pool.run(play, 1, tiny(head_dim=32, **SHALLOW), tmp_path)
    values = [line["value"] for line in lines if isinstance(line["value"], dict)]
    checks = [value["holds"] for value in values if "holds" in value]
    assert len(checks) >= 14 and all(checks), lines


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
    for works in (STACKS, WHOLES, HYBRIDS):
        bytes_of = [needs(work, "none") for work in works]
        assert bytes_of == sorted(bytes_of, reverse=True)
