"""Time of a step in milliseconds by kind of work, with torch's profiler: of this package's step and
of an ordinary Hugging Face loop, on the rows and with the model of hf_ratio.py (2B's shares).

    make bench   (or: .venv/bin/python benchmarks/profile_step.py)
"""

import functools
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_ratio import SPECS, WARM_UP, bench_rows, hf_step, one_step, our_step, start
from record import record
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.utils import logging

from megatron_vlm import MegatronWorker, Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS

REPEATS = 5
SPEC = SPECS["_2b_shares"]
GROUPS = (
    "gemm_forward",
    "gemm_backward",
    "attention",
    "elementwise",  # norms, rotary, SwiGLU, residuals, copies
    "head_and_loss",  # with the embedding, which shares its weight
    "tower",
    "optimizer",  # with the norm of the gradient
    "data",  # from rows to micro-batches
    "rest",  # time between operations: Python, autograd
)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
BACKWARD = "autograd::engine::evaluate_function"


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a name that the profiler shows."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def profiled(
    make: Callable[..., Callable[[], float]], path: str, rows: list[Row], lr: float
) -> Callable[[], tuple[float, dict[str, float]]]:
    """Return a step whose result is its loss and the milliseconds of each group."""
    # Both sides run this tower. The functions are set before the models are made, in a process of
    # their own.
    Qwen3VLVisionModel.forward = ranged("tower", Qwen3VLVisionModel.forward)
    torch.nn.utils.clip_grad_norm_ = ranged("optimizer", torch.nn.utils.clip_grad_norm_)
    MegatronWorker.optim_step = ranged("optimizer", MegatronWorker.optim_step)  # type: ignore
    MegatronWorker.micro_batches = ranged("data", MegatronWorker.micro_batches)  # type: ignore
    step = ranged("step", make(path, rows, lr))

    def measured() -> tuple[float, dict[str, float]]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            loss = step()
        return loss, by_group(profiler.events())

    return measured


def hf_profiled(
    path: str, rows: list[Row], lr: float
) -> Callable[[], tuple[float, dict[str, float]]]:
    """Return a profiled step of Hugging Face's loop."""
    return profiled(hf_step, path, rows, lr)


def our_profiled(
    path: str, rows: list[Row], lr: float
) -> Callable[[], tuple[float, dict[str, float]]]:
    """Return a profiled step of this package."""
    return profiled(our_step, path, rows, lr)


def by_group(events: Any) -> dict[str, float]:
    """Return the milliseconds that each group spends itself, summed over all operations of a
    step."""
    # A backward operation has the number of its forward operation.
    of_tower = {
        event.sequence_nr for event in events if event.sequence_nr >= 0 and _under(event, "tower")
    }
    spent: Counter[str] = Counter()
    for event in events:
        if event.name == "step" or _under(event, "step"):
            spent[_group(event, of_tower)] += event.self_cpu_time_total / 1e3
    return {group: spent[group] for group in GROUPS}


def _group(event: Any, of_tower: set[int]) -> str:
    above = [event, *_ancestors(event)]
    backward = next((each for each in above if each.name.startswith(BACKWARD)), None)
    if any(each.name == "optimizer" or each.name.startswith("Optimizer.") for each in above):
        return "optimizer"
    if _under(event, "data"):
        return "data"
    if _under(event, "tower") or (backward is not None and backward.sequence_nr in of_tower):
        return "tower"
    if any("_Predict" in each.name or _has_vocabulary(each) for each in above):
        return "head_and_loss"
    if event.name in PRODUCTS:
        return "gemm_forward" if backward is None else "gemm_backward"
    if any("scaled_dot_product" in each.name for each in above):
        return "attention"
    return "elementwise" if event.name.startswith("aten::") else "rest"


def _ancestors(event: Any) -> list[Any]:
    ancestors = []
    while (event := event.cpu_parent) is not None:
        ancestors.append(event)
    return ancestors


def _under(event: Any, name: str) -> bool:
    return any(each.name == name for each in _ancestors(event))


def _has_vocabulary(event: Any) -> bool:
    """Return whether a shape of the operation has the size of the vocabulary. Hidden states do
    not."""
    shapes = [shape for shape in event.input_shapes or [] if isinstance(shape, (list, tuple))]
    return any(size == SPEC.vocab for shape in shapes for size in shape)


def measure(path: str, rows: list[Row]) -> dict[str, float]:
    """Measure both sides in turns: medians of each group, and of steps without the profiler."""
    makers: dict[str, Any] = {
        "hf": hf_step,
        "ours": our_step,
        "hf_profiled": hf_profiled,
        "ours_profiled": our_profiled,
    }
    pipes = {name: start(make, 1, path, rows) for name, make in makers.items()}
    sides = ("hf", "ours")
    steps: dict[str, list[float]] = {side: [] for side in sides}
    groups: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(WARM_UP + REPEATS):
        for side in sides:
            seconds, loss = one_step(pipes[side])
            answer: Any = one_step(pipes[f"{side}_profiled"])
            _, (same, spent) = answer
            assert abs(loss - same) < 1e-4 * loss, (side, loss, same)
            if repeat >= WARM_UP:
                steps[side].append(1e3 * seconds)
                groups[side].append(spent)
    for (pipe,) in pipes.values():
        pipe.send(False)
    figures = {}
    for group in GROUPS:
        for side in sides:
            figures[f"{group}_ms_{side}"] = statistics.median(each[group] for each in groups[side])
    for side in sides:
        figures[f"profiled_step_ms_{side}"] = statistics.median(
            sum(each.values()) for each in groups[side]
        )
        figures[f"step_ms_{side}"] = statistics.median(steps[side])
    return figures


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, SPEC)
        special = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(SPEC.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        record("profile_step", measure(path, rows))


if __name__ == "__main__":
    main()
