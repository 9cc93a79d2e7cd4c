"""Images per second against Hugging Face's processor; collation; balance of micro-batches.

make bench   (or: .venv/bin/python benchmarks/data_path.py)
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from record import record
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_vlm import Row
from megatron_vlm.data.batches.balance import Limits, RowSize, measure, naive_plan, plan_batch
from megatron_vlm.data.batches.collate import collate
from megatron_vlm.family.qwen.images import ImageSettings

SIZES = ((480, 640), (768, 1024), (333, 500), (1080, 1920), (224, 224), (600, 400))
ROWS, RANKS = 1024, 64


def fastest(*works: Callable[[], Any], rounds: int = 9) -> list[float]:
    """Return the seconds of the fastest round of each function. They take turns, so that a noisy
    machine slows all of them."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for index, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def images() -> dict[str, float]:
    """Measure decoded pictures to patches."""
    generator = np.random.default_rng(0)
    settings = ImageSettings(max_pixels=1024 * 1024)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    table = settings.table()
    pictures = [
        PIL.Image.fromarray(
            generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        ).resize((width, height))
        for height, width in SIZES
    ]

    def hf_pixels() -> list[torch.Tensor]:
        return [processor(images=[p], return_tensors="pt")["pixel_values"] for p in pictures]

    def as_bytes() -> list[torch.Tensor]:
        return [torch.from_numpy(settings.patches(picture)) for picture in pictures]

    def as_floats() -> list[torch.Tensor]:
        return [settings.pixel_values(patches, table) for patches in as_bytes()]

    assert all(torch.equal(a, b) for a, b in zip(hf_pixels(), as_floats(), strict=True))
    seconds = fastest(hf_pixels, as_bytes, as_floats)
    rates = [len(pictures) / value for value in seconds]
    return {
        "images_per_s_hf": rates[0],
        "images_per_s_bytes": rates[1],
        "images_per_s_floats": rates[2],
        "image_ratio_bytes": rates[1] / rates[0],
        "image_ratio_floats": rates[2] / rates[0],
    }


def collation() -> dict[str, float]:
    """Measure the collation of 1,024 rows into micro-batches."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(700), 0.8, ROWS).astype(int), 16, 6000)
    empty = torch.zeros(0, dtype=torch.long)
    rows = [
        Row(empty, empty).with_table(generator.integers(0, 1000, (length, 5), np.int32), {})
        for length in np.sort(lengths)
    ]

    def work() -> None:
        for start in range(0, ROWS, 8):
            collate(rows[start : start + 8], range(start, start + 8))

    (seconds,) = fastest(work, rounds=30)
    return {
        "collate_mean_tokens": float(lengths.mean()),
        "collate_ms": 1e3 * seconds,
        "collate_ms_per_1000_tokens": 1e6 * seconds / float(lengths.mean()),
    }


def balance() -> dict[str, float]:
    """Measure the balance of a heavy-tailed global batch over 64 ranks."""
    generator = np.random.default_rng(0)
    sizes = []
    for count in np.clip(generator.zipf(1.6, RANKS * 16), 1, 47):
        patches = int((generator.integers(8, 40, count) * generator.integers(8, 40, count)).sum())
        tokens = int(patches // 4 + generator.lognormal(4.5, 0.7) + 20)
        cost = 2.8e9 * tokens + 1.2e5 * tokens**2 + 8e8 * patches
        sizes.append(RowSize(tokens, cost, patches))
    (seconds,) = fastest(lambda: plan_batch(sizes, RANKS, Limits(tokens=8192)), rounds=3)
    planned = measure(plan_batch(sizes, RANKS, Limits(tokens=8192)), sizes)
    naive = measure(naive_plan(sizes, RANKS, 4), sizes)
    return {
        "padding_ours": planned.padding,
        "padding_naive": naive.padding,
        "max_over_mean_cost_ours": float(planned.imbalance),
        "max_over_mean_cost_naive": float(naive.imbalance),
        "plan_ms": 1e3 * seconds,
    }


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    torch.set_num_threads(1)
    record("data_path", images() | collation() | balance())


if __name__ == "__main__":
    main()
