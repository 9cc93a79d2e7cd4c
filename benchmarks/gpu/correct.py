"""Correctness on this GPU: the command line, parity with Hugging Face, generation, syncs."""

import gc
import json
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu.step import Figures
from megatron.core import parallel_state

from megatron_vlm import MegatronWorker, TinySpec, write_tiny
from megatron_vlm.training.generate import generate
from tests.batches import MIXED, make_rows
from tests.gpu.test_parity_gpu import TOLERANCE, have_te
from tests.reference import load_reference, row_log_probs, run_reference
from tests.runs import Case, loss_and_grads
from tests.test_decode import continue_rows
from tests.test_parity import errors, layout

STEPS, HALF = 4, 2
# The number of kernels of a backward pass that add in any order decides whether a run repeats to
# the last digit.
RESUME_BOUND = 1e-3


def leave() -> None:
    """Leave the process groups, so that the next worker joins afresh, as in a process of its
    own."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()


def _cli(*arguments: str) -> None:
    """Run a command as a user would."""
    subprocess.run([sys.executable, "-m", "megatron_vlm.cli", *arguments], check=True)


def _steps(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def command_line(figures: Figures) -> None:
    """Make a model and data, train, resume a run that stopped half-way, export. The processes are
    started, joined and ended as in a user's run."""
    home = figures.scratch / "runs"
    _cli("tiny", "--out", f"{home}/tiny", "--head-dim", "32")
    _cli("shapes", "--out", f"{home}/shapes", "--train", "64", "--eval", "8")
    common = [
        "model=tiny_cpu",
        f"platform={figures.platform}",
        f"model.path={home}/tiny",
        f"data.train={home}/shapes/train.jsonl",
        "optim.schedule=constant",
        "optim.lr=1e-3",
        "train.micro_batch_size=2",
        f"checkpoint.every={HALF}",
        "log.report=false",
    ]
    _cli("train", *common, f"run={home}/whole", f"train.steps={STEPS}")
    _cli("train", *common, f"run={home}/halves", f"train.steps={HALF}", "checkpoint.export=false")
    _cli("train", *common, f"run={home}/halves", f"train.steps={STEPS}", "checkpoint.export=false")
    whole, halves = _steps(home / "whole"), _steps(home / "halves")
    assert [step["step"] for step in whole] == [step["step"] for step in halves]
    pairs = [(a["loss"], b["loss"]) for a, b in zip(whole, halves, strict=True)]
    figures.say("losses", [a for a, _ in pairs])
    figures.say("resume_equal_to_the_digit", all(a == b for a, b in pairs))
    figures.check("resume", max(abs(a - b) / abs(a) for a, b in pairs), RESUME_BOUND)
    figures.say("seconds_of_the_first_step", whole[0]["seconds"])
    figures.say("seconds_of_the_last_step", whole[-1]["seconds"])


def _cases() -> dict[str, Case]:
    cases = {
        "1x1x1": layout(),
        "recompute-full": layout(recompute="full", recompute_vision=True),
        "recompute-selective": layout(recompute="selective"),
    }
    return {
        f"{name} {backend} {precision}": replace(
            case, model={**case.model, "backend": backend}, train={"precision": precision}
        )
        for precision in ("fp32", "bf16")
        for backend in ("torch", *(["te"] if have_te() else []))
        for name, case in cases.items()
    }


def parity(figures: Figures) -> None:
    """Compare loss, log-probs and all gradients with Hugging Face's model in fp32 on the CPU."""
    path = str(figures.scratch / "parity")
    write_tiny(path, TinySpec(head_dim=32))
    rows = make_rows(MIXED)
    expected = run_reference(path, rows)
    for name, case in _cases().items():
        backend, precision = name.split()[1:]
        outcome = loss_and_grads(path, replace(case, platform=figures.platform), rows)
        leave()
        case_errors = errors([outcome], expected, case)
        worst = max(case_errors, key=lambda key: case_errors[key])
        figures.check(f"{name} (worst: {worst})", case_errors[worst], TOLERANCE[backend, precision])


def generation(figures: Figures) -> None:
    """Load an exported checkpoint in both. The greedy tokens in fp32 and the log-probs must be
    equal."""
    path = str(figures.scratch / "runs" / "whole" / "export")
    rows = make_rows(MIXED)
    case = Case(platform=figures.platform, train={"precision": "fp32"})
    worker = MegatronWorker(case.config(path), training=False)
    tokens = generate(worker.stage, rows, 10, ())
    scored = worker.forward(rows)
    leave()
    hf_tokens = continue_rows(path, rows)  # no two best tokens were close
    wrong = sum(a != b for a, b in zip(tokens, hf_tokens, strict=True))
    figures.check("answers_that_differ", wrong, 0)
    model = load_reference(path)
    with torch.no_grad():
        expected = [row_log_probs(model, row) for row in rows]
    worst = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(scored, expected, strict=True)
    )
    figures.check("log_probs", worst, TOLERANCE["torch", "fp32"])


def syncs(figures: Figures) -> None:
    """Count how often the host waits for the device in each additional micro-batch. The emulator of
    tests/device counts the same without a device."""
    path = str(figures.scratch / "syncs")
    write_tiny(path, TinySpec(head_dim=32))
    case = Case(platform=figures.platform, train={"micro_batch_size": 2})
    worker = MegatronWorker(case.config(path))
    rows = make_rows(MIXED)
    for _ in range(2):  # the first steps load kernels
        worker.forward_backward(rows)
        worker.optim_step()
    few, many = (_waits(worker, batch) for batch in (rows, rows * 2))
    added = many - few
    count = sum(added.values()) / (len(rows) / 2)
    figures.say("where", dict(added.most_common(20)))
    figures.say("of_a_step_besides", sum(few.values()) - sum(added.values()))
    figures.check("of_a_micro_batch", count, 3)
    leave()


def _waits(worker: MegatronWorker, rows: list[Any]) -> "Counter[str]":
    """Count the places of the program that waited during a step."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.forward_backward(rows)
        worker.optim_step()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
