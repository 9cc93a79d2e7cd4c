"""Adapters compared with full training: the time of a step, by this trainer and by PEFT in an
ordinary Hugging Face loop, which take turns; and the bytes of weights, gradients and optimizer of a
rank.

    make bench   (or: .venv/bin/python benchmarks/lora.py)
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hf_ratio import SPECS, Sides, bench_rows, loop, measure, our_step, worker_step
from record import record
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from megatron_vlm import Config, Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.schema import LoraConfig, ModelConfig, ParallelConfig
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import stage_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_what_fits import MODELS, sizes_of_model

LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
BF16 = 2


def lora_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker, with adapters in the decoder."""
    return worker_step(path, rows, lr, ParallelConfig(), USUAL)


def peft_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of PEFT's model in the loop of hf_ratio.py."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    settings = PeftConfig(r=USUAL.rank, lora_alpha=int(USUAL.alpha), target_modules=LINEARS)
    return loop(get_peft_model(model, settings), rows, lr)


SIDES: Sides = {"full": (our_step, 1), "lora": (lora_step, 1), "peft": (peft_step, 1)}


def gib(name: str, lora: LoraConfig) -> float:
    """Return the GiB of weights, gradients and optimizer on one GPU in bf16."""
    cfg = Config(model=ModelConfig(path=""), lora=lora)
    sizes = sizes_of_model(name)
    dims = ParallelDims.create(cfg.parallel, 1, sizes.text.num_layers)
    return stage_memory(ModelLayout(cfg, sizes, dims, BF16), 0, []).fixed / 2**30


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    spec = SPECS["_2b_shares"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, spec)
        special = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(spec.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        # B is zero at the start, so the first losses are those of the model. A is random, so later
        # losses differ.
        turns = measure(path, rows, SIDES, alike=1, tolerance=1e-5)
    seconds = {side: statistics.median(taken) for side, taken in turns.items()}
    figures = {
        "lora_step_of_full": seconds["lora"] / seconds["full"],
        "peft_ratio": seconds["peft"] / seconds["lora"],
    }
    for name in MODELS:
        figures[f"gib_{name}_full"] = gib(name, LoraConfig())
        figures[f"gib_{name}_lora"] = gib(name, USUAL)
    record("lora", figures)


if __name__ == "__main__":
    main()
