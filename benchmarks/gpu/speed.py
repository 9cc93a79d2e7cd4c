"""Speed of a stack of Qwen3-VL 8B's layers, and of a whole model compared with an ordinary Hugging
Face loop, on rows of one length with a photograph each."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu.correct import leave
from gpu.machine import wait
from gpu.step import Figures
from gpu.work import DRY, STACKS, WHOLES, Work, flops, largest, make_rows, write_random
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm import Config, MegatronWorker
from megatron_vlm.config.schema import ModelConfig, TrainConfig
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.family import tower_attention
from megatron_vlm.family.tower_attention import PackedAttention
from megatron_vlm.model.attention import SDPACoreAttention
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.megatron_versions import ChainActivation
from tests.gpu.test_parity_gpu import have_te


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


@contextmanager
def changed(objects: Sequence[Any], **values: Any) -> Iterator[None]:
    """Set attributes of some objects to these values inside the context."""
    assert objects, values
    with ExitStack() as stack:
        for item in objects:
            stack.enter_context(mock.patch.multiple(item, **values))
        yield


@contextmanager
def recompute(worker: MegatronWorker, kind: str) -> Iterator[None]:
    """Recompute as if model.recompute had this value at the build."""
    method, number = ("uniform", 1) if kind == "full" else (None, None)
    config = changed(
        [worker.chunks[0].config],
        recompute_granularity=kind,
        recompute_method=method,
        recompute_num_layers=number,
    )
    layers = [module for module in worker.chunks[0].modules() if hasattr(module, "core_attention")]
    with config, changed(layers, checkpoint_core_attention=kind == "selective"):
        yield


@contextmanager
def not_compiled(worker: MegatronWorker) -> Iterator[None]:
    """Run without compilation, as if model.compile had been false at the build."""
    modules, plain = list(worker.chunks[0].modules()), FusedOps()
    layers = [module for module in modules if hasattr(module, "chains")]
    activations = [module for module in modules if isinstance(module, ChainActivation)]
    norms = [module for module in modules if isinstance(module, Norm)]
    blocks = [module for module in modules if isinstance(module, PackedAttention)]
    with (
        changed(layers, chains=plain),
        changed(activations, chain=plain.swiglu),
        changed(norms, norm=plain.norm),
        changed(blocks, heads=plain.tower_heads),
    ):
        yield


def rounded(worker: MegatronWorker) -> AbstractContextManager[None]:
    """Round weight gradients, as if model.fp32_weight_gradients had been false at the build."""
    modules = worker.chunks[0].modules()
    linears = [m for m in modules if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    return changed(linears, gradient_accumulation_fusion=False)


def attention(worker: MegatronWorker, kernel: str) -> AbstractContextManager[None]:
    """Use a kernel of attention as if model.attention had named it at the build; `torch` is torch's
    own choice."""
    modules = worker.chunks[0].modules()
    layers = [module for module in modules if isinstance(module, SDPACoreAttention)]
    return changed(layers, kernel=kernel)


def image_by_image(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], starts: Tensor
) -> Tensor:
    """Compute the tower's attention as transformers does: one call for each image or frame."""
    split = (x.split(list(lengths)) for x in (query, key, value))
    parts = zip(*split, lengths, strict=True)
    return torch.cat(
        [tower_attention.attend_by_runs(q, k, v, [length]) for q, k, v, length in parts]
    )


def run_by_run(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], starts: Tensor
) -> Tensor:
    """Compute the tower's attention with one call for each run of images of equal size."""
    return tower_attention.attend_by_runs(query, key, value, lengths)


def variants(
    worker: MegatronWorker, dry: bool
) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the variants to measure: the default, then variants with one change each."""
    kernels = ("torch", "math") if dry else ("torch", "flash", "efficient", "cudnn")
    replaced = partial(mock.patch.object, tower_attention, "attend")
    return {
        "default": nullcontext,
        "not compiled": partial(not_compiled, worker),
        "recompute full": partial(recompute, worker, "full"),
        **{f"attention {kernel}": partial(attention, worker, kernel) for kernel in kernels},
        "tower image by image": partial(replaced, image_by_image),
        "tower run by run": partial(replaced, run_by_run),
        "weight gradients in bf16": partial(rounded, worker),
        "recompute selective": partial(recompute, worker, "selective"),
    }


def free() -> None:
    """Free the memory that a failed step has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _worker(figures: Figures, work: Work, path: Path, backend: str) -> MegatronWorker:
    return MegatronWorker(
        Config(
            model=ModelConfig(path=str(path), backend=backend),  # type: ignore[arg-type]
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
    worker = _worker(figures, work, path, "torch")
    rows, total = make_rows(work, path), flops(work, path)
    figures.say("tflop_of_a_step", total / 1e12)
    batches = worker.micro_batches(rows)

    fitting = None
    for name, variant in variants(worker, figures.dry).items():
        with variant():
            fits = _measure(figures, f"ours, {name}", work, total, worker, batches)
        fitting = fitting or (variant if fits else None)
    assert fitting is not None, "no variant fits into memory"
    figures.say("memory_peak_gb", worker.platform.memory_peak() / 2**30)
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


def _prepared(figures: Figures, works: Sequence[Work]) -> tuple[Work, Path] | None:
    """Return the largest of these models that the device can hold, and its weights on the disk."""
    memory = pick_platform(figures.platform).memory_total()
    work = largest([DRY] if figures.dry else works, memory)
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
    if prepared := _prepared(figures, STACKS):
        measure_ours(figures, *prepared)


def whole(figures: Figures) -> None:
    """Measure a model from end to end, in Hugging Face and in this package."""
    if prepared := _prepared(figures, WHOLES):
        measure_theirs(figures, *prepared, pick_platform(figures.platform).peak_flops())
        free()
        measure_ours(figures, *prepared)


def engine(figures: Figures) -> None:
    """Measure the same model where Transformer Engine is installed: each backend, with its
    optimizer."""
    backends = ("torch", "te") if have_te() else ("torch",) if figures.dry else ()
    if not backends or not (prepared := _prepared(figures, WHOLES)):
        return
    work, path = prepared
    for backend in backends:
        worker = _worker(figures, work, path, backend)
        batches = worker.micro_batches(make_rows(work, path))
        _measure(figures, f"model.backend={backend}", work, flops(work, path), worker, batches)
        leave()
        free()
