"""Ratio of the tokens per second of this package's step to those of an ordinary Hugging Face
training loop, with the same weights, rows and work. The loop has one process; this package has one
or two (stages, replicas). They take turns step by step, so that a noisy machine slows all of them.

    make bench   (or: .venv/bin/python benchmarks/hf_ratio.py)
"""

import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from record import record
from row_sizes import sizes_of_row
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

from megatron_vlm import Config, MegatronWorker, Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.schema import (
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.family.cpu_matmul import enable_onednn
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.planner.auto_layout import decide, with_layers
from megatron_vlm.planner.row_sizes import RowSample

WARM_UP, REPEATS = 2, 10
LEARNING_RATE = 1e-5
MICRO_BATCH = 2
NUM_ROWS = 8
PEAK_S = 10.0  # seconds; other users load the machine for a second or two at a time
NO_ADAPTERS = LoraConfig()
# The models have about 30 M parameters. In the first one, the head is a large part, as in any small
# model. In the second one, head, decoder and tower have the shares of Qwen3-VL 2B (head 15 % of the
# parameters).
BASE = TinySpec(
    layers=6,
    hidden=384,
    intermediate=1152,
    heads=6,
    kv_heads=2,
    head_dim=64,
    vocab=32768,
    vision_depth=4,
    vision_hidden=224,
    vision_heads=4,
    vision_intermediate=896,
    tied=True,
)
# The third model has gated delta nets, whose heads are as wide together as in Qwen3.5.
SPECS = {
    "": BASE,
    "_2b_shares": replace(BASE, layers=10, vocab=10240),
    "_qwen3_5": replace(
        BASE,
        family="qwen3_5",
        layers=8,
        vocab=10240,
        linear_key_heads=6,
        linear_value_heads=6,
        linear_key_dim=128,
        linear_value_dim=128,
    ),
}


def bench_rows(vocab: int, special: dict[str, int]) -> list[Row]:
    """Return chats of about 200 tokens with an image each; the last 30 % of a row is supervised."""
    generator = torch.Generator().manual_seed(0)
    image_id = special["<|image_pad|>"]
    rows = []
    for index in range(NUM_ROWS):
        h, w = ((12, 16), (16, 12), (14, 14), (20, 10))[index % 4]
        image = [special["<|vision_start|>"], *[image_id] * (h * w // 4)]
        text = torch.randint(0, vocab - 20, (140 + 8 * (index % 3),), generator=generator).tolist()
        ids = torch.tensor([*text[:8], *image, special["<|vision_end|>"], *text[8:]])
        labels = ids.clone()
        labels[: int(len(ids) * 0.7)] = IGNORE
        pixels = torch.randn(h * w, 3 * 2 * BASE.patch_size**2, generator=generator)
        rows.append(Row(ids, labels, pixels, torch.tensor([[1, h, w]])))
    return rows


def hf_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the ordinary loop on Hugging Face's model."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return loop(model, rows, lr)


def loop(model: Any, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the loop that a user would write: the model's own loss per micro-batch,
    AdamW, clipping."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    batches = []
    for start in range(0, len(rows), MICRO_BATCH):
        part = rows[start : start + MICRO_BATCH]
        ids = pad_sequence([row.ids_S for row in part], batch_first=True)
        lengths = torch.tensor([len(row.ids_S) for row in part])
        batches.append(
            dict(
                input_ids=ids,
                labels=pad_sequence(
                    [row.labels_S for row in part], batch_first=True, padding_value=IGNORE
                ),
                attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                pixel_values=torch.cat([row.pixel_values_PC for row in part]),  # type: ignore[misc]
                image_grid_thw=torch.cat([row.image_grid_I3 for row in part]),  # type: ignore[misc]
            )
        )
    count = sum(sizes_of_row(row).supervised for row in rows)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=torch.tensor(count)).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def hf_same_products_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of Hugging Face's model with the library of this package for matrix
    products."""
    enable_onednn(BASE.hidden, has_experts=False)
    return hf_step(path, rows, lr)


def our_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of the worker, as the trainer calls it."""
    return worker_step(path, rows, lr, ParallelConfig())


def pp2_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of one of two pipeline stages, split as a run splits them: by its rows. A
    micro-batch has one row, because stages wait less for each other with more micro-batches."""
    cfg = Config(
        model=ModelConfig(path=path),
        parallel=ParallelConfig(pp=2, layers_per_stage="auto"),
        train=TrainConfig(micro_batch_size=1, global_batch_size=len(rows)),
    )
    mix = RowSample(tuple(map(sizes_of_row, rows)), "these")
    layers = decide(cfg, HFCheckpoint(path).sizes, 2, pick_platform("cpu"), mix)[0]
    return worker_step(path, rows, lr, with_layers(cfg, layers).parallel, micro_batch=1)


def dp2_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """Return a step of one of two replicas, with its half of the rows."""
    half = rows[int(os.environ["RANK"]) :: 2]
    return worker_step(path, half, lr, ParallelConfig(overlap_grad_reduce=True))


def worker_step(
    path: str,
    rows: list[Row],
    lr: float,
    parallel: ParallelConfig,
    lora: LoraConfig = NO_ADAPTERS,
    micro_batch: int = MICRO_BATCH,
) -> Callable[[], float]:
    """Return a step of a worker."""
    worker = MegatronWorker(
        Config(
            model=ModelConfig(path=path),
            lora=lora,
            parallel=parallel,
            train=TrainConfig(micro_batch_size=micro_batch),
            optim=OptimConfig(lr=lr),
            platform="cpu",
        )
    )

    def step() -> float:
        metrics = worker.forward_backward(rows)
        worker.optim_step()
        return metrics.loss

    return step


# Sides that take turns, and the number of processes of each.
Sides = dict[str, tuple[Callable[..., Callable[[], float]], int]]
SIDES: Sides = {
    "hf": (hf_step, 1),
    "hf_same_products": (hf_same_products_step, 1),
    "1proc": (our_step, 1),
    "2proc_pp": (pp2_step, 2),
    "2proc_dp": (dp2_step, 2),
}


def serve(
    make: Callable[[str, list[Row], float], Callable[[], float]],
    pipe: Connection,
    environment: dict[str, str],
) -> None:
    """Serve a side in a process of its own: the stand-in for CUDA that this package installs on the
    CPU would slow down Hugging Face's loop. Answer each message with (seconds, loss) of a step."""
    os.environ.update(environment)
    if environment:
        torch.set_num_threads(1)  # one thread each, because two processes share two cores
    logging.disable_progress_bar()
    path, rows = pipe.recv()
    step = make(path, rows, LEARNING_RATE)
    while pipe.recv():
        start = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - start, loss))


def start(
    make: Callable[..., Callable[[], float]], count: int, path: str, rows: list[Row]
) -> list[Connection]:
    """Start the processes of a side and send the work to them."""
    context, pipes = multiprocessing.get_context("spawn"), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for rank in range(count):
        parent, child = context.Pipe()
        launched: dict[str, str] = {}
        if count > 1:
            launched = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
            launched |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        context.Process(target=serve, args=(make, child, launched), daemon=True).start()
        parent.send((path, rows))
        pipes.append(parent)
    return pipes


def one_step(pipes: list[Connection]) -> tuple[float, float]:
    """Return the seconds of the slowest process, and the loss."""
    for pipe in pipes:
        pipe.send(True)
    results = [pipe.recv() for pipe in pipes]
    return max(seconds for seconds, _ in results), results[0][1]


def measure(
    path: str, rows: list[Row], given: Sides, alike: int, tolerance: float
) -> dict[str, list[float]]:
    """Measure the seconds of each step of all sides, which take turns. The losses of the first
    `alike` steps must agree, because the work is the same."""
    sides = {side: start(make, count, path, rows) for side, (make, count) in given.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(WARM_UP + REPEATS):
        losses = {}
        for side, pipes in sides.items():
            time_s, losses[side] = one_step(pipes)
            if repeat >= WARM_UP:
                seconds[side].append(time_s)
        apart = max(losses.values()) - min(losses.values())
        assert repeat >= alike or apart < tolerance * min(losses.values()), losses
    for pipes in sides.values():
        for pipe in pipes:
            pipe.send(False)
    return seconds


def gemm_peak() -> float:
    """Return the FLOP/s of this CPU's fastest fp32 matrix product, with all of its cores: either
    with torch's default library or with that of this package."""
    before = torch.get_float32_matmul_precision()
    peak = _fastest_product()
    enable_onednn(BASE.hidden, has_experts=False)
    peak = max(peak, _fastest_product())
    torch.set_float32_matmul_precision(before)
    return peak


def _fastest_product() -> float:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best, until = math.inf, time.perf_counter() + PEAK_S
    while time.perf_counter() < until:
        start_s = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start_s)
    return 2 * 2048**3 / best


def flops(path: str, rows: list[Row]) -> float:
    """Return the operations of a step, as for MFU: three times the forward, with the head and the
    last MLP on supervised tokens and no padding."""
    work = WorkModel.from_sizes(HFCheckpoint(path).sizes)
    sizes = map(sizes_of_row, rows)
    return 3.0 * sum(
        work.row((row.tokens,), row.supervised, row.patches, row.patch_pairs) for row in sizes
    )


def figures_of(spec: TinySpec, suffix: str) -> dict[str, float]:
    """Measure one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, spec)
        special = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(spec.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        seconds = measure(path, rows, SIDES, alike=WARM_UP + REPEATS, tolerance=1e-4)
        peak = gemm_peak()
        values, work = sum(math.prod(shape) for shape in shapes(path)), flops(path, rows)
    hf_s, our_s = seconds["hf"], seconds["1proc"]
    ratio = {side: _median(hf_s) / _median(taken) for side, taken in seconds.items()}
    sizes = list(map(sizes_of_row, rows))
    tokens, supervised = sum(row.tokens for row in sizes), sum(row.supervised for row in sizes)
    figures = {
        # The fastest step of each side, because other users of the machine can only slow a step
        # down.
        "hf_tokens_per_s": tokens / min(hf_s),
        "ours_tokens_per_s_1proc": tokens / min(our_s),
        "hf_ratio_1proc_of_fastest": min(hf_s) / min(our_s),
        "hf_ratio_1proc": ratio["1proc"],
        "hf_ratio_1proc_same_products": ratio["1proc"] / ratio["hf_same_products"],
        "hf_ratio_2proc": min(ratio["2proc_pp"], ratio["2proc_dp"]),
        "hf_ratio_2proc_pp": ratio["2proc_pp"],
        "hf_ratio_2proc_dp": ratio["2proc_dp"],
        "gemm_peak_gflops": peak / 1e9,
        "gemm_peak_fraction": work / min(our_s) / peak,
        "gemm_peak_fraction_hf": work / min(hf_s) / peak,
        "million_parameters": values / 1e6,
        "head_share_of_parameters": spec.vocab * spec.hidden / values,
        "tokens_per_step": tokens,
        "supervised_share": supervised / tokens,
    }
    return {key + suffix: value for key, value in figures.items()}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    figures: dict[str, float] = {}
    for suffix, spec in SPECS.items():
        figures |= figures_of(spec, suffix)
    record("hf_ratio", figures)


def shapes(path: str) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint."""
    source = HFCheckpoint(path)
    source.read_headers()
    return [info.shape for info in source.tensors.values()]


if __name__ == "__main__":
    main()
