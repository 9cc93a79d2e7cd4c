"""Torch's attention, and the choice of its kernel that the decoder tries first: `model.attention`.
On CUDA `auto` measures the kernels once, for all ranks, at the model's own shape.

Shapes: B rows, S tokens, N query heads, G key/value heads, D head size.
"""

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.attention_limits import WIDEST_OF_FLASH, mask_columns
from megatron_vlm.family.decoder_layers import Attention
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
    masked: bool = False

    @staticmethod
    def of_kinds(
        cfg: Config, text: TextSizes, dims: ParallelDims, dtype: torch.dtype
    ) -> "dict[tuple[Attention, bool], AttentionShape]":
        """Return the shape that training will have of each kind of attention, with and without a
        mask where both occur, for rows of a usual length."""
        tokens = min(cfg.data.max_tokens, MAX_TRIED_TOKENS)
        rows, max_batch_tokens = cfg.train.micro_batch_size, cfg.train.micro_batch_tokens
        if max_batch_tokens is not None:
            rows = max(1, max_batch_tokens // tokens)
        stages: list[Counter[object]] = [
            Counter(text.layers[number].mixer for number in dims.layers_at(place))
            for place in range(len(dims.layers_per_stage))
        ]
        return {
            (each, masked): AttentionShape(
                *(rows, each.heads // dims.tp, each.kv_heads // dims.tp, tokens, each.head_dim),
                max(stage[each] for stage in stages),
                dtype,
                masked,
            )
            for each in text.attentions
            for masked in passes_of(each)
        }


def passes_of(attention: Attention) -> tuple[bool, ...]:
    """Return whether its passes have a mask: a window needs one for pictures and long rows."""
    return (False,) if attention.window is None else (False, True)


def attend(
    query_BNSD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    mask_B1SS: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend with a mask that is added to the scores, or causally without one. Rows are padded on
    the right, where padding changes no real token.

    Keys are repeated where flash attention cannot run, since it alone always takes fewer key heads
    than query heads: with those, torch would silently compute the whole matrix of scores in place
    of efficient attention."""
    repeats = query_BNSD.shape[1] // key_BGSD.shape[1]
    if repeats > 1 and (mask_B1SS is not None or query_BNSD.shape[3] > WIDEST_OF_FLASH):
        key_BGSD = key_BGSD.repeat_interleave(repeats, dim=1)
        value_BGSD = value_BGSD.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(
        query_BNSD,
        key_BGSD,
        value_BGSD,
        attn_mask=mask_B1SS,
        is_causal=mask_B1SS is None,
        scale=scale,
        enable_gqa=query_BNSD.shape[1] != key_BGSD.shape[1],
    )


def as_added(sees_B1SS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to the scores. Torch would make it from `sees_B1SS` in each
    layer again, and keep each for the backward."""
    *shape, columns = sees_B1SS.shape
    # Cut from aligned rows: efficient attention would copy any other mask in every layer.
    mask = torch.full(
        (*shape, mask_columns(columns)), float("-inf"), dtype=dtype, device=sees_B1SS.device
    )
    return mask[..., :columns].masked_fill_(sees_B1SS, 0.0)


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
    rank_times = all_gather_json(local_times)
    chosen = fastest_kernel(rank_times)
    if torch.distributed.get_rank() == 0 and len(local_times) > 1:
        times = ", ".join(f"{kernel} {1e3 * took:.2f} ms" for kernel, took in local_times.items())
        kind = f"heads of {shape.head_dim}{' with a mask' * shape.masked}"
        print_to_user(
            f"model.attention=auto takes {chosen} for {kind} (a micro-batch's attention: {times})"
        )
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
    why the kernel fails. A kernel prepares itself for a new length once, not in each layer."""
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
    mask_B1SS = None
    if shape.masked:
        sees = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=platform.device)
        mask_B1SS = as_added(sees.expand(shape.rows, -1, -1, -1), shape.dtype)
    only = nullcontext() if kernel == TORCH else sdpa_kernel(KERNELS[kernel])
    platform.wait()  # kernels are only queued: without both waits, launches would be timed
    start = time.perf_counter()
    with only, torch.enable_grad():
        out = attend(query, key, value, mask_B1SS)
        out.backward(out.detach())
    platform.wait()
    return time.perf_counter() - start
