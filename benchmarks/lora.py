"""Adapters beside full training: the time of a step, by our trainer and by PEFT in an ordinary
Hugging Face loop, which take turns; and the bytes of weights, gradients and optimizer of one rank.

make bench   (or: .venv/bin/python benchmarks/lora.py)
"""

import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from hf_ratio import REPEATS, SPECS, WARM_UP, bench_rows, loop, one_step, serve
from hf_ratio import our_step as full_step
from record import record
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from megatron_vlm.config.schema import Config, LoraConfig, ModelConfig, OptimConfig, TrainConfig
from megatron_vlm.data.encode.row import Row
from megatron_vlm.demo.tiny import SPECIAL_TOKENS, write_tiny
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.worker import MegatronWorker

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_what_fits import MODELS, sizes_of_model

LORA = LoraConfig(rank=16, alpha=32)  # as lora=default
LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
MICRO_BATCH, BF16 = 2, 2


def lora_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """The worker, with adapters in the decoder."""
    worker = MegatronWorker(
        Config(
            model=ModelConfig(path=path),
            lora=LORA,
            train=TrainConfig(micro_batch_size=MICRO_BATCH),
            optim=OptimConfig(lr=lr),
            platform="cpu",
        )
    )

    def step() -> float:
        metrics = worker.forward_backward(rows)
        worker.optim_step()
        return metrics.loss

    return step


def peft_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """The same in the loop that hf_ratio.py has, around PEFT's model."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    settings = PeftConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=LINEARS)
    return loop(get_peft_model(model, settings), rows, lr)


SIDES = {"full": full_step, "lora": lora_step, "peft": peft_step}


def measure(path: str, rows: list[Row]) -> dict[str, float]:
    """Median seconds of a step of each side."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {}
    for side, make in SIDES.items():
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(make, theirs, {}), daemon=True).start()
        ours.send((path, rows))
        pipes[side] = [ours]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(WARM_UP + REPEATS):
        losses = {}
        for side, pipe in pipes.items():
            taken, losses[side] = one_step(pipe)
            if repeat >= WARM_UP:
                seconds[side].append(taken)
        # B begins at zero, so the first losses are the model's; A is random, and others differ.
        if repeat == 0:
            assert max(losses.values()) - min(losses.values()) < 1e-5 * losses["full"], losses
    for found in pipes.values():
        found[0].send(False)
    return {side: statistics.median(taken) for side, taken in seconds.items()}


def gib(name: str, lora: LoraConfig) -> float:
    """Of weights, gradients and optimizer on one GPU in bf16."""
    cfg = Config(model=ModelConfig(path=""), lora=lora)
    sizes = sizes_of_model(name)
    dims = ParallelDims.create(cfg.parallel, 1, sizes.text.layers)
    return stage_memory(cfg, sizes, dims, 0, [], BF16).fixed / 2**30


def main() -> None:
    """Measure, print, write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    spec = SPECS["_2b_shares"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, spec)
        special = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(spec.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        seconds = measure(path, rows)
    figures = {
        "lora_step_of_full": seconds["lora"] / seconds["full"],
        "peft_ratio": seconds["peft"] / seconds["lora"],
    }
    for name in MODELS:
        figures[f"gib_{name}_full"] = gib(name, LoraConfig())
        figures[f"gib_{name}_lora"] = gib(name, LORA)
    record("lora", figures)


if __name__ == "__main__":
    main()
