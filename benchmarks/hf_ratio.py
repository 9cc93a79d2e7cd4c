"""Tokens per second of our step over those of an ordinary Hugging Face training loop: the same
weights, rows and work, one process each. They take turns step by step, so a noisy machine slows
both.

make bench   (or: .venv/bin/python benchmarks/hf_ratio.py)
"""

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from record import record
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from megatron_vlm.config.schema import Config, ModelConfig, OptimConfig, TrainConfig
from megatron_vlm.data.encode.row import IGNORE, Row
from megatron_vlm.demo.tiny import SPECIAL_TOKENS, TinySpec, write_tiny
from megatron_vlm.hf.source import HFCheckpoint
from megatron_vlm.worker import MegatronWorker

WARM_UP, REPEATS = 2, 10
LEARNING_RATE = 1e-5
MICRO_BATCH = 2
NUM_ROWS = 8
# 30 M parameters. In the first the head is a large part, as in any small model; in the second
# head, decoder and tower have the shares of Qwen3-VL 2B (head 15 % of the parameters).
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
SPECS = {"": BASE, "_2b_shares": replace(BASE, layers=10, vocab=10240)}


def bench_rows(vocab: int, special: dict[str, int]) -> list[Row]:
    """Chats of about 200 tokens with an image each; the last 30 % of a row is supervised."""
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
    """What a user would write: the model's own loss per micro-batch, AdamW, clipping."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).train()
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
    count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)

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


def our_step(path: str, rows: list[Row], lr: float) -> Callable[[], float]:
    """The worker, as the trainer calls it."""
    worker = MegatronWorker(
        Config(
            model=ModelConfig(path=path),
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


def serve(make: Callable[[str, list[Row], float], Callable[[], float]], pipe: Connection) -> None:
    """Each side has its own process: the stand-in for CUDA that ours installs on the CPU would slow
    theirs down. Answers each message with (seconds, loss) of one step."""
    logging.disable_progress_bar()
    path, rows = pipe.recv()
    step = make(path, rows, LEARNING_RATE)
    while pipe.recv():
        start = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - start, loss))


def start(make: Callable[..., Callable[[], float]], path: str, rows: list[Row]) -> Connection:
    """Start one side and hand it the work."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(make, theirs), daemon=True).start()
    ours.send((path, rows))
    return ours


def measure(path: str, rows: list[Row]) -> tuple[list[float], list[float]]:
    """Seconds of each step of both sides, which take turns."""
    sides = [start(make, path, rows) for make in (hf_step, our_step)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(WARM_UP + REPEATS):
        losses = []
        for side, taken in zip(sides, seconds, strict=True):
            side.send(True)
            time_s, loss = side.recv()
            losses.append(loss)
            if repeat >= WARM_UP:
                taken.append(time_s)
        # The same work: equal losses, step after step.
        assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
    for side in sides:
        side.send(False)
    return seconds


def figures_of(spec: TinySpec, suffix: str) -> dict[str, float]:
    """Measure one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, spec)
        special = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(SPECIAL_TOKENS)
        rows = bench_rows(spec.vocab, dict(zip(SPECIAL_TOKENS, special, strict=True)))
        hf_s, our_s = measure(path, rows)
        values = sum(math.prod(shape) for shape in shapes(path))
    tokens = sum(len(row.ids_S) for row in rows)
    supervised = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)
    figures = {
        # The fastest step of each side: other users of the machine can only slow a step down.
        "hf_tokens_per_s": tokens / min(hf_s),
        "ours_tokens_per_s_1proc": tokens / min(our_s),
        "hf_ratio_1proc": min(hf_s) / min(our_s),
        "hf_ratio_1proc_of_medians": statistics.median(hf_s) / statistics.median(our_s),
        "million_parameters": values / 1e6,
        "head_share_of_parameters": spec.vocab * spec.hidden / values,
        "tokens_per_step": tokens,
        "supervised_share": supervised / tokens,
    }
    return {key + suffix: value for key, value in figures.items()}


def main() -> None:
    """Measure, print, write docs/benchmarks.md and .bench/latest.json."""
    logging.disable_progress_bar()
    figures: dict[str, float] = {}
    for suffix, spec in SPECS.items():
        figures |= figures_of(spec, suffix)
    record("hf_ratio", figures)


def shapes(path: str) -> list[tuple[int, ...]]:
    """The tensors of a checkpoint."""
    source = HFCheckpoint(path)
    source.read_headers()
    return [info.shape for info in source.tensors.values()]


if __name__ == "__main__":
    main()
