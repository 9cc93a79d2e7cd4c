"""Speed of a stack of Qwen3-VL 8B's layers, and of a whole model compared with an ordinary Hugging
Face loop, on rows of one length with a photograph each."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.machine import ABSENT, version, wait
from gpu.parity import leave
from gpu.step import Figures
from gpu.variants import variants
from gpu.work import (
    DRY,
    DRY_HYBRID,
    HYBRIDS,
    STACKS,
    WHOLES,
    Work,
    flops,
    largest,
    make_rows,
    needs,
    write_random,
)
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm import Config, MegatronWorker
from megatron_vlm.config.schema import ModelConfig, OptimConfig, TrainConfig
from megatron_vlm.distributed.device import pick_platform
from tests.gpu.test_parity_gpu import have_te

EMPTY: Mapping[str, Any] = {}


def timed(step: Callable[[], Any], count: int) -> float:
    """Return the median seconds of a step, after one step that is not counted."""
    times = []
    for _ in range(count + 1):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def timed_if_it_fits(step: Callable[[], Any], count: int) -> float | None:
    """Return the result of `timed`, or None if memory runs out."""
    with suppress(torch.OutOfMemoryError):
        return timed(step, count)
    free()  # releases the memory of the failed step, whose frames are gone now
    return None


def free() -> None:
    """Free the memory that a failed step has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def worker_of(
    figures: Figures, work: Work, path: Path, optim: Mapping[str, Any] = EMPTY, **model: Any
) -> MegatronWorker:
    """Return a worker whose micro-batch has all rows."""
    return MegatronWorker(
        Config(
            model=ModelConfig(path=str(path), **model),
            optim=OptimConfig(**optim),
            train=TrainConfig(micro_batch_size=work.rows),
            platform=figures.platform,
        )
    )


def _do_step(worker: MegatronWorker, batches: Any) -> None:
    worker.forward_backward(batches)
    worker.optim_step(0.0)


def _measure(
    figures: Figures, name: str, work: Work, total: float, worker: MegatronWorker, batches: Any
) -> bool:
    """Measure a step of a worker, and return whether it fits into memory."""
    took = timed_if_it_fits(partial(_do_step, worker, batches), work.steps)
    if took is None:
        figures.say(name, "out of memory")
        return False
    alone = timed(partial(worker.forward_backward, batches), work.steps)
    _say_speed(figures, name, work, total, took, alone, worker.platform.peak_flops())
    return True


def measure_ours(figures: Figures, work: Work, path: Path) -> None:
    """Measure a step of each variant, and profile a step of the first variant that fits."""
    worker = worker_of(figures, work, path)
    rows, total = make_rows(work, path), flops(work, path)
    figures.say("tflop_of_a_step", total / 1e12)
    batches = worker.micro_batches(rows)

    fitting = None
    for name, variant in variants(worker, figures.dry).items():
        with variant():
            fits = _measure(figures, f"ours, {name}", work, total, worker, batches)
        if fitting is None and fits:
            fitting = variant
            gib = worker.platform.memory_peak() / 2**30, needs(work, "none") / 2**30
            figures.say(f"memory, {name}", {"peak_gib": gib[0], "planned_gib": gib[1]})
    assert fitting is not None, "no variant fits into memory"
    activities = [ProfilerActivity.CPU]
    if not figures.dry:
        activities.append(ProfilerActivity.CUDA)
    with fitting(), profile(activities=activities) as profiled:
        _do_step(worker, batches)
        wait()
    key = "self_cpu_time_total" if figures.dry else "self_device_time_total"
    table = profiled.key_averages().table(sort_by=key, row_limit=40)
    (figures.out / f"profile_{figures.step}.txt").write_text(table)
    leave()


def _say_speed(
    figures: Figures,
    name: str,
    work: Work,
    total: float,
    took: float,
    alone: float,
    peak: float | None,
) -> None:
    figures.say(
        name,
        {
            "step_ms": 1e3 * took,
            "forward_backward_ms": 1e3 * alone,
            "tokens_per_s": work.rows * work.tokens / took,
            "mfu": None if peak is None else total / took / peak,
            "mfu_forward_backward": None if peak is None else total / alone / peak,
        },
    )


def measure_theirs(figures: Figures, work: Work, path: Path, peak: float | None) -> None:
    """Measure the loop that a user would write with transformers: fp32 weights under bf16 autocast,
    AdamW, clipping, the model's own loss."""
    device = figures.platform
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=not figures.dry)
    rows = make_rows(work, path)
    ids = torch.stack([row.ids_S for row in rows]).to(device)
    labels = torch.stack([row.labels_S for row in rows]).to(device)
    patches = torch.cat([row.pixel_values_PC for row in rows]).to(device)  # type: ignore[misc]
    pixels = patches.view(len(patches), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1) / 127.5 - 1
    grids = torch.cat([row.image_grid_I3 for row in rows]).to(device)  # type: ignore[misc]
    types = (ids == model.config.image_token_id).int()

    def forward_backward() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(
                input_ids=ids,
                labels=labels,
                mm_token_type_ids=types,
                pixel_values=pixels,
                image_grid_thw=grids,
            ).loss
        loss.backward()

    def step() -> None:
        forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    name, took = "Hugging Face", timed_if_it_fits(step, work.steps)
    if took is None:
        name += ", gradient checkpointing (out of memory without)"
        optimizer.zero_grad()
        model.gradient_checkpointing_enable()
        took = timed(step, work.steps)
    alone = timed(forward_backward, work.steps)
    _say_speed(figures, name, work, flops(work, path), took, alone, peak)


def prepared_model(
    figures: Figures, works: Sequence[Work], dry: Work = DRY
) -> tuple[Work, Path] | None:
    """Return the largest of these models that the device can hold, and its weights on the disk."""
    memory = pick_platform(figures.platform).memory_total()
    work = largest([dry] if figures.dry else works, memory)
    if work is None:
        figures.say("not measured", f"{memory / 2**30:.0f} GiB hold none of these models")
        return None
    figures.say("model", work.name)
    path = figures.scratch / f"random_{figures.step}"
    start = time.perf_counter()
    write_random(path, work.spec, figures.platform)
    figures.say("seconds_to_write_the_weights", time.perf_counter() - start)
    return work, path


def stack(figures: Figures) -> None:
    """Measure the maximum number of 8B layers that fit without recomputation, with tower, embedding
    and head."""
    if prepared := prepared_model(figures, STACKS):
        measure_ours(figures, *prepared)


def hybrid(figures: Figures) -> None:
    """Measure layers of Qwen3.5 9B, of which three in four are gated delta nets, by each program
    for these that is installed."""
    if not (prepared := prepared_model(figures, HYBRIDS, DRY_HYBRID)):
        return
    work, path = prepared
    for rule in ("torch",) if figures.dry or version("fla-core") == ABSENT else ("fla", "torch"):
        worker = worker_of(figures, work, path, delta_rule=rule)
        batches = worker.micro_batches(make_rows(work, path))
        name = f"model.delta_rule={rule}"
        if _measure(figures, name, work, flops(work, path), worker, batches):
            gib = worker.platform.memory_peak() / 2**30, needs(work, "none") / 2**30
            figures.say(f"memory, {name}", {"peak_gib": gib[0], "planned_gib": gib[1]})
        leave()
        free()


def whole(figures: Figures) -> None:
    """Measure a model from end to end, in Hugging Face and in this package."""
    if prepared := prepared_model(figures, WHOLES):
        measure_theirs(figures, *prepared, pick_platform(figures.platform).peak_flops())
        free()
        measure_ours(figures, *prepared)


def engine(figures: Figures) -> None:
    """Measure the same model where Transformer Engine is installed: each backend, with its
    optimizer."""
    backends = ("torch", "te") if have_te() else ("torch",) if figures.dry else ()
    if not backends or not (prepared := prepared_model(figures, WHOLES)):
        return
    work, path = prepared
    for backend in backends:
        worker = worker_of(figures, work, path, backend=backend)
        batches = worker.micro_batches(make_rows(work, path))
        _measure(figures, f"model.backend={backend}", work, flops(work, path), worker, batches)
        leave()
        free()
