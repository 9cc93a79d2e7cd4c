"""Parity with Hugging Face's models on this GPU, family by family, and over NCCL."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu.step import Figures, MissingError
from megatron.core import parallel_state

from megatron_vlm import Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec
from tests.gpu.test_parity_gpu import CASES, TOLERANCE, have_te
from tests.model.test_gemma4 import DENSE, EXPERTS, without_constants
from tests.model.test_parity import errors, layout
from tests.model.test_qwen3_5 import is_of_decay
from tests.support import gemma4
from tests.support.batches import MIXED, make_rows
from tests.support.reference import Reference, run_exact_reference, run_reference
from tests.support.runs import Case, Outcome, loss_and_grads

ROOT = Path(__file__).parents[2]
HYBRID = {"family": "qwen3_5", "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-VL with experts": {"experts": 8},
    "Qwen3.5": HYBRID,
    "Qwen3.5 with experts": {**HYBRID, "experts": 8},
}
FP32, BF16 = {"precision": "fp32"}, {"precision": "bf16"}
# flash-linear-attention takes heads of a power of two, and may multiply fp32 as TF32.
WITH_FLA = {**HYBRID, "linear_key_dim": 64, "linear_value_dim": 64}
FLA_BOUND = 1e-2
GEMMA4 = {"Gemma 4": DENSE, "Gemma 4 with experts": EXPERTS}
CARDS = ("tp2", "pp2", "tp2-pp2")  # cases of tests/gpu for a second device and more


def leave() -> None:
    """Leave the process groups, so that the next worker joins afresh, as in a process of its
    own."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()


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
    expected = run_reference(path, make_rows(MIXED))
    for name, case in _cases().items():
        backend, precision = name.split()[1:]
        outcome = _outcome(figures, path, case, make_rows(MIXED))
        _compare(figures, name, outcome, case, expected, TOLERANCE[backend, precision])


def _outcome(figures: Figures, path: str, case: Case, rows: list[Row]) -> Outcome:
    """Return what a case computes on this device."""
    outcome = loss_and_grads(path, replace(case, platform=figures.platform), rows)
    leave()
    return outcome


def _compare(
    figures: Figures, name: str, outcome: Outcome, case: Case, expected: Reference, bound: float
) -> None:
    """Check the worst error of loss, log-probs and gradients."""
    case_errors = errors([outcome], expected, case)
    worst = max(case_errors, key=lambda key: case_errors[key])
    figures.check(f"{name} (worst: {worst})", case_errors[worst], bound)


def families(figures: Figures) -> None:
    """Compare the other families with Hugging Face's models in fp32 on the CPU. References for the
    decay of Qwen3.5 and for Gemma 4 are in fp64, since transformers loses digits of these in
    fp32."""
    rows, plain = make_rows(MIXED), replace(layout(), train=FP32)
    for name, sizes in FAMILIES.items():
        path, expected = _tiny(figures, name, sizes)
        outcome = _outcome(figures, path, plain, rows)
        _compare(figures, name, outcome, plain, expected, TOLERANCE["torch", "fp32"])
    for name, tiny in GEMMA4.items():
        path = tiny.write(figures.scratch / name)
        exact = gemma4.exact_reference_of(tiny)
        # Only in bf16 FlashAttention computes the windows; experts of rounded scores are others.
        for train in (FP32, BF16) if tiny is DENSE else (FP32,):
            case, precision = replace(layout(), train=train), train["precision"]
            outcome = _outcome(figures, path, case, gemma4.make_rows())
            [found] = without_constants([outcome])
            bound = TOLERANCE["torch", precision]
            _compare(figures, f"{name} {precision}", found, case, exact, bound)
    for name, case in _with_fla(figures):
        path, expected = _tiny(figures, name, WITH_FLA)
        outcome = _outcome(figures, path, case, rows)
        bound = FLA_BOUND if case.train is FP32 else TOLERANCE["torch", "bf16"]
        _compare(figures, name, outcome, case, expected, bound)


def _tiny(figures: Figures, name: str, sizes: dict[str, Any]) -> tuple[str, Reference]:
    """Return a tiny checkpoint and its reference."""
    path, rows = str(figures.scratch / name), make_rows(MIXED)
    write_tiny(path, TinySpec(**sizes))
    expected = run_reference(path, rows)
    if "family" in sizes:
        exact = run_exact_reference(path, rows)
        expected.grads.update({k: v for k, v in exact.grads.items() if is_of_decay(k)})
    return path, expected


def _with_fla(figures: Figures) -> Iterator[tuple[str, Case]]:
    """Yield the cases of Qwen3.5 in which flash-linear-attention computes the delta rule."""
    if figures.dry or importlib.util.find_spec("fla") is None:
        lacking = "the CPU has no CUDA for it" if figures.dry else "it is not installed"
        figures.say("Qwen3.5 by flash-linear-attention", f"not run: {lacking}")
        return
    for precision in (FP32, BF16):
        case = replace(layout(), model={"delta_rule": "fla"}, train=precision)
        yield f"Qwen3.5 by flash-linear-attention {precision['precision']}", case


def nccl(figures: Figures) -> None:
    """Play the parity of tests/gpu over NCCL at layouts of two devices and more."""
    count = 0 if figures.dry else torch.cuda.device_count()
    names = [name for name in CARDS if CASES[name].world <= count]
    if not names:
        raise MissingError(f"a second GPU: torch sees {count}")
    chosen = " or ".join(f"[{name}-" for name in names)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", chosen]
    done = subprocess.run(command, cwd=ROOT, check=False)
    figures.check(f"failures over NCCL at {', '.join(names)}", done.returncode, 0)
