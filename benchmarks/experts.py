"""A step of a model with experts, compared with that of a dense model whose layers do the same
number of operations per token, and with the Hugging Face loop on the same experts. They take turns.

    make bench   (or: .venv/bin/python benchmarks/experts.py)
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hf_ratio import SPECS, Sides, bench_rows, loop, measure, our_step, worker_step
from record import record
from transformers import AutoTokenizer, Qwen3VLMoeForConditionalGeneration
from transformers.utils import logging

from megatron_vlm import Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint

DENSE = SPECS["_2b_shares"]
# Four of the 16 experts together are as wide as the dense model's MLP.
MOE = replace(DENSE, experts=16, top_k=4, expert_intermediate=DENSE.intermediate // 4)


def dense_step(folder: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker on the dense model."""
    return our_step(f"{folder}/dense", rows, lr)


def experts_step(folder: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker on the model with experts."""
    return our_step(f"{folder}/experts", rows, lr)


def hf_step(folder: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of an ordinary loop on Hugging Face's model with experts."""
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        f"{folder}/experts", dtype=torch.float32
    )
    return loop(model, rows, lr)


def dp2_step(folder: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker on one of two replicas, each with all experts."""
    return _half(folder, rows, lr, ParallelConfig(overlap_grad_reduce=True))


def ep2_step(folder: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker on one of two replicas that share the experts between them."""
    return _half(folder, rows, lr, ParallelConfig(ep=2, overlap_grad_reduce=True))


def _half(folder: str, rows: list[Row], lr: float, parallel: ParallelConfig) -> Callable[[], float]:
    return worker_step(f"{folder}/experts", rows[int(os.environ["RANK"]) :: 2], lr, parallel)


ALIKE: Sides = {
    "experts": (experts_step, 1),
    "hf": (hf_step, 1),
    "dp2": (dp2_step, 2),
    "ep2": (ep2_step, 2),
}
SIDES: Sides = {"experts": (experts_step, 1), "dense": (dense_step, 1)}


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in (("dense", DENSE), ("experts", MOE)):
            write_tiny(Path(folder) / name, spec)
        tokenizer = AutoTokenizer.from_pretrained(f"{folder}/dense")
        special = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(DENSE.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        work = {
            name: WorkModel.from_sizes(HFCheckpoint(f"{folder}/{name}").sizes).per_token
            for name in ("dense", "experts")
        }
        against_dense = measure(folder, rows, SIDES, alike=0, tolerance=0)
        seconds = measure(folder, rows, ALIKE, alike=3, tolerance=1e-5)
    alone, dense = (statistics.median(against_dense[side]) for side in ("experts", "dense"))
    median = {side: statistics.median(taken) for side, taken in seconds.items()}
    record(
        "experts",
        {
            "operations_of_dense": work["experts"] / work["dense"],
            "experts_step_of_dense": alone / dense,
            "hf_ratio_experts": median["hf"] / median["experts"],
            "ep2_step_of_dp2": median["ep2"] / median["dp2"],
        },
    )


if __name__ == "__main__":
    main()
