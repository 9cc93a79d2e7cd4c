"""Variants of a worker that was built once: each changes one thing within a context."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_vlm import MegatronWorker
from megatron_vlm.family import tower_attention
from megatron_vlm.family.flash_attention import activate, activated, installed
from megatron_vlm.family.tower_attention import PackedAttention
from megatron_vlm.model.attention import SDPACoreAttention
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.megatron_versions import ChainActivation


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


@contextmanager
def attention(worker: MegatronWorker, kernel: str) -> Iterator[None]:
    """Use a kernel of attention in decoder and tower, as if model.attention had named it at the
    build; `torch` is torch's own choice."""
    modules, before = list(worker.chunks[0].modules()), activated()
    layers = [module for module in modules if isinstance(module, SDPACoreAttention)]
    blocks = [module for module in modules if isinstance(module, PackedAttention)]
    activate(kernel)
    try:
        with (
            changed(layers, kernels=dict.fromkeys(worker.chunks[0].kernels, kernel)),
            changed(blocks, kernel=kernel),
        ):
            yield
    finally:
        activate(before)


def image_by_image(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], starts: Tensor, **_: Any
) -> Tensor:
    """Compute the tower's attention as transformers does: one call for each image or frame."""
    split = (x.split(list(lengths)) for x in (query, key, value))
    parts = zip(*split, lengths, strict=True)
    return torch.cat(
        [tower_attention.attend_by_runs(q, k, v, [length]) for q, k, v, length in parts]
    )


def run_by_run(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], starts: Tensor, **_: Any
) -> Tensor:
    """Compute the tower's attention with one call for each run of images of equal size."""
    return tower_attention.attend_by_runs(query, key, value, lengths)


def variants(
    worker: MegatronWorker, dry: bool
) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the variants to measure: the default, then variants with one change each."""
    kernels = ("torch", "math") if dry else ("torch", "flash", "efficient", "cudnn", *installed())
    replaced = partial(mock.patch.object, tower_attention, "attend_in_frames")
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
