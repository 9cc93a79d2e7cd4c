"""Choice of torch's attention kernel that the decoder tries first: `model.attention`. On CUDA
`auto` measures the kernels once, for all ranks, at the model's own shape."""

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import FullAttention
from megatron_vlm.family.spec import TextSizes

TORCH = "torch"  # torch's own choice
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MEASURED = ("flash", "efficient", "cudnn")  # math is left out: it stores a matrix of scores
LENGTHS = 3  # number of lengths to try; each is new, as a micro-batch's length is
MAX_TRIED_TOKENS = 2048  # maximum length of a row to try
GAIN = 0.05  # minimum gain as a share of the time; below it torch's own choice stays


@dataclass(frozen=True)
class AttentionShape:
    """Shape of the attention of one rank."""

    rows: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    layers: int  # layers of a stage
    dtype: torch.dtype

    @staticmethod
    def from_config(
        cfg: Config, text: TextSizes, dims: ParallelDims, dtype: torch.dtype
    ) -> "AttentionShape":
        """Return the shape that training will have, for rows of a usual length."""
        tokens = min(cfg.data.max_tokens, MAX_TRIED_TOKENS)
        rows, max_batch_tokens = cfg.train.micro_batch_size, cfg.train.micro_batch_tokens
        if max_batch_tokens is not None:
            rows = max(1, max_batch_tokens // tokens)
        attention = text.attention
        heads, kv_heads = attention.heads // dims.tp, attention.kv_heads // dims.tp
        is_full = [isinstance(layer.mixer, FullAttention) for layer in text.layers]
        layers = max(
            sum(is_full[number] for number in dims.layers_at(place))
            for place in range(len(dims.layers_per_stage))
        )
        return AttentionShape(rows, heads, kv_heads, tokens, attention.head_dim, layers, dtype)


def prefer_kernel(kernel: str) -> AbstractContextManager[None]:
    """Prefer this kernel for attention inside the context, where it can run."""
    if kernel == TORCH:
        return nullcontext()
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order = [KERNELS[kernel], *(other for other in others if other is not KERNELS[kernel])]
    return sdpa_kernel(order, set_priority=True)


def choose_kernel(setting: str, shape: AttentionShape, platform: Platform) -> str:
    """Return one of KERNELS or TORCH. `auto` on CUDA is a collective."""
    if setting != "auto":
        if isinstance(seconds := _try(setting, shape, platform), str):
            raise ConfigError(
                f": torch {torch.__version__} cannot compute it on {platform.name} in "
                f"{shape.dtype} ({seconds})",
                key="model.attention",
                found=setting,
                remedy="set model.attention=auto",
            )
        return setting
    if not platform.is_cuda:
        return TORCH
    tried = {kernel: _try(kernel, shape, platform) for kernel in (TORCH, *MEASURED)}
    local_times = {kernel: result for kernel, result in tried.items() if isinstance(result, float)}
    rank_times = all_gather_json(local_times, None, platform.device)
    chosen = fastest_kernel(rank_times)
    if torch.distributed.get_rank() == 0 and len(local_times) > 1:
        times = ", ".join(f"{kernel} {1e3 * took:.2f} ms" for kernel, took in local_times.items())
        print_to_user(f"model.attention=auto takes {chosen} (a micro-batch's attention: {times})")
    return chosen


def fastest_kernel(seconds_of_ranks: Sequence[Mapping[str, float]]) -> str:
    """Return the kernel whose slowest rank is the fastest, among those that every rank has seconds
    for. Torch's own choice stays unless that gains something."""
    slowest = {
        kernel: max(times[kernel] for times in seconds_of_ranks)
        for kernel in seconds_of_ranks[0]
        if all(kernel in times for times in seconds_of_ranks)
    }
    best = min(slowest, key=lambda kernel: slowest[kernel], default=TORCH)
    gains = TORCH not in slowest or slowest[best] < (1 - GAIN) * slowest[TORCH]
    return best if gains else TORCH


def _try(kernel: str, shape: AttentionShape, platform: Platform) -> float | str:
    """Return the seconds of forward and backward of a micro-batch, as the mean over new lengths, or
    why the kernel fails. A kernel that prepares itself for each new length does so once for all
    layers."""
    total = 0.0
    for number in range(LENGTHS):
        tokens = max(1, shape.tokens - 8 * number - 1)
        try:
            with warnings.catch_warnings():  # torch warns of each reason against a kernel
                warnings.simplefilter("ignore")
                first, *again = (_seconds(kernel, shape, tokens, platform) for _ in range(3))
        except RuntimeError as error:
            return str(error).splitlines()[0]
        if number > 0:  # the first length loads what every length needs
            total += first + (shape.layers - 1) * min(again)
    return total / (LENGTHS - 1)


def _seconds(kernel: str, shape: AttentionShape, tokens: int, platform: Platform) -> float:
    zeros = partial(torch.zeros, dtype=shape.dtype, device=platform.device, requires_grad=True)
    query, key, value = (
        zeros(shape.rows, heads, tokens, shape.head_dim)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    shared = shape.heads != shape.kv_heads
    only = nullcontext() if kernel == TORCH else sdpa_kernel(KERNELS[kernel])
    platform.wait()
    start = time.perf_counter()
    with only, torch.enable_grad():
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        out.backward(out.detach())
    platform.wait()
    return time.perf_counter() - start
