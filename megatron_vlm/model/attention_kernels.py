"""Torch's attention, and the choice of the kernels that decoder and tower try first:
`model.attention`. On CUDA `auto` measures the kernels once, for all ranks, at the model's shapes.

Shapes: B rows, S tokens, N query heads, G key/value heads, D head size, P patches.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import WIDEST_OF_FLASH, Attention, mask_columns
from megatron_vlm.family.flash_attention import (
    GENERATIONS,
    TORCH,
    activate,
    activated,
    is_flash,
    only_kernel,
)
from megatron_vlm.family.spec import ModelSizes, TextSizes, VisionSizes
from megatron_vlm.family.tower_attention import attend_at_once, attend_by_runs, takes_lengths
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.model.flash_windows import Window, window_attention

MEASURED = ("flash", "efficient", "cudnn")  # math is left out: it stores a matrix of scores
LENGTHS = 3  # number of lengths to try; each is new, as a micro-batch's length is
MAX_TRIED_TOKENS = 2048  # maximum length of a row or picture to try
TOWER = "tower"  # its place among the kinds of attention
GAIN = 0.05  # minimum gain as a share of the time; below it torch's own choice stays

Call = Callable[[str], Tensor]  # attention by this kernel


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
    window: int | None = None  # a window, which needs a mask in other kernels

    def __str__(self) -> str:
        return f"heads of {self.head_dim}{' in a window' * (self.window is not None)}"

    def prepare(self, number: int, device: torch.device) -> Call:
        """Return a call with new inputs. Each number has a length of its own."""
        tokens = max(1, self.tokens - 8 * number - 1)
        zeros = partial(torch.zeros, dtype=self.dtype, device=device, requires_grad=True)
        counts = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = (zeros(self.rows, n, tokens, self.head_dim) for n in counts)
        if self.window is None:
            return lambda kernel: attend(query, key, value)
        window = Window(self.window)

        def call(kernel: str) -> Tensor:
            # Here only this kernel is allowed, where layers would prefer it.
            if is_flash(kernel) and takes_lengths(query):
                query_SBND, *keys = (x.permute(2, 0, 1, 3) for x in (query, key, value))
                return window_attention(query_SBND, keys[0], keys[1], window, None)
            sees = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device)
            mask_B1SS = as_added(sees.expand(self.rows, -1, -1, -1), self.dtype)
            return attend(query, key, value, mask_B1SS)

        return call

    @staticmethod
    def of_kinds(
        cfg: Config, text: TextSizes, dims: ParallelDims, dtype: torch.dtype
    ) -> "dict[tuple[Attention, bool], AttentionShape]":
        """Return the shape that training will have of each kind of attention, causal and in a
        window where both occur, for rows of a usual length."""
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
                each.window if masked else None,
            )
            for each in text.attentions
            for masked in passes_of(each)
        }


@dataclass(frozen=True)
class TowerShape:
    """Shape of the attention of the vision tower for two pictures, a large one and a median one."""

    tokens: int  # patches of the large one
    heads: int
    head_dim: int
    layers: int
    dtype: torch.dtype

    @staticmethod
    def of(cfg: Config, vision: VisionSizes, dtype: torch.dtype) -> "TowerShape":
        """Return the shape of this tower."""
        patches = min(vision.megapixel, cfg.data.max_tokens * vision.merge**2, MAX_TRIED_TOKENS)
        heads = vision.query // vision.head_dim
        return TowerShape(patches, heads, vision.head_dim, vision.depth, dtype)

    def __str__(self) -> str:
        return f"the tower's heads of {self.head_dim}"

    def prepare(self, number: int, device: torch.device) -> Call:
        """Return a call with new inputs. Each number has lengths of its own."""
        lengths = [max(1, size - 16 * number) for size in (self.tokens, self.tokens // 4)]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        zeros = partial(torch.zeros, dtype=self.dtype, device=device, requires_grad=True)
        query, key, value = (zeros(sum(lengths), self.heads, self.head_dim) for _ in range(3))

        def call(kernel: str) -> Tensor:
            # Here only this kernel is allowed, where layers would prefer it.
            if is_flash(kernel) and takes_lengths(query):
                return attend_at_once(query, key, value, lengths, starts)
            return attend_by_runs(query, key, value, lengths)

        return call


Shapes = Mapping[Any, AttentionShape | TowerShape]  # by kind of attention


def attention_shapes(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, dtype: torch.dtype
) -> Shapes:
    """Return the shapes for which torch's kernels compute attention."""
    if BACKENDS[cfg.model.backend].has_own_kernels:
        return {}
    of_decoder = AttentionShape.of_kinds(cfg, sizes.text, dims, dtype)
    return {**of_decoder, TOWER: TowerShape.of(cfg, sizes.vision, dtype)}


def passes_of(attention: Attention) -> tuple[bool, ...]:
    """Return whether its passes are more than causal: a window is, for pictures and long rows."""
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


def choose_kernels(setting: str, shapes: Shapes, platform: Platform) -> dict[Any, str]:
    """Return a kernel for each kind of attention. `auto` on CUDA is a collective."""
    if setting != "auto":
        for shape in shapes.values():
            _check_named(setting, shape, platform)
        return dict.fromkeys(shapes, setting)
    if not platform.is_cuda or not shapes:
        return dict.fromkeys(shapes, TORCH)
    tried: list[dict[str, float]] = [{} for _ in shapes]
    before = activated()
    for kernel in (*GENERATIONS, TORCH, *MEASURED):
        # Another model of this process may have chosen already: its layers keep what they have.
        is_taken = before in GENERATIONS and is_flash(kernel) and kernel != before
        if not is_taken and activate(kernel) is None:
            for times, shape in zip(tried, shapes.values(), strict=True):
                if isinstance(took := _try(kernel, shape, platform), float):
                    times[kernel] = took
    chosen = fastest_kernels(all_gather_json(tried))
    generations = [name for name in chosen if name in GENERATIONS]
    activate(generations[0] if generations else before)
    if torch.distributed.get_rank() == 0 and any(len(times) > 1 for times in tried):
        lines = []
        for name, shape, times in zip(chosen, shapes.values(), tried, strict=True):
            listed = ", ".join(f"{kernel} {1e3 * took:.2f} ms" for kernel, took in times.items())
            lines.append(f"{name} for {shape} (a micro-batch's attention: {listed})")
        print_to_user(f"model.attention=auto takes {'; '.join(lines)}")
    return dict(zip(shapes, chosen, strict=True))


def kept_kernels(names: Sequence[str], shapes: Shapes, platform: Platform) -> dict[Any, str] | str:
    """Return these kernels of the kinds of attention, or why a rank cannot run them. A
    collective."""
    before = activated()
    reason = activate(next((name for name in names if name in GENERATIONS), "flash"))
    if len(names) != len(shapes):
        reason = f"the model has {len(shapes)} kinds of attention"
    for name, shape in zip(names, shapes.values(), strict=False):
        reason = reason or _failure(name, shape, platform)
    if reasons := [each for each in all_gather_json(reason) if each]:
        activate(before)
        return str(reasons[0])
    return dict(zip(shapes, names, strict=True))


def _failure(kernel: str, shape: AttentionShape | TowerShape, platform: Platform) -> str | None:
    """Return why a kernel cannot run, if so."""
    small = replace(shape, tokens=min(shape.tokens, 256))  # its speed says nothing here
    found = _try(kernel, small, platform)
    return found if isinstance(found, str) else None


def _check_named(kernel: str, shape: AttentionShape | TowerShape, platform: Platform) -> None:
    """Refuse a kernel of the user that cannot run here."""
    facts: dict[str, Any] = dict(key="model.attention", found=kernel)
    remedy = "set model.attention=auto"
    if kernel in GENERATIONS:
        lacking = activate(kernel) if platform.is_cuda else "it needs a GPU of NVIDIA"
        if lacking:
            package = f"install {GENERATIONS[kernel][1]}, or {remedy}"
            raise ConfigError(f": {lacking}", **facts, remedy=package)
    elif platform.is_cuda:
        activate(kernel)
    if reason := _failure(kernel, shape, platform):
        where = f"{platform.name} in {shape.dtype} for {shape}"
        problem = f": torch {torch.__version__} cannot compute it on {where} ({reason})"
        raise ConfigError(problem, **facts, remedy=remedy)


def fastest_kernels(times_of_ranks: Sequence[Sequence[Mapping[str, float]]]) -> list[str]:
    """Return the kernel of each kind of attention, from the times of each rank for each kind. All
    kinds share one generation of FlashAttention: that with the least time for all together."""
    best: list[str] = []
    least = float("inf")
    for generation in ("flash", *GENERATIONS):
        allowed = {generation, *MEASURED[1:]} | ({TORCH} if generation == "flash" else set())
        names, total = [], 0.0
        for kind in zip(*times_of_ranks, strict=True):
            kept = [{k: took for k, took in times.items() if k in allowed} for times in kind]
            names.append(fastest_kernel(kept))
            total += max(times.get(names[-1], float("inf")) for times in kept)
        if not best or total < (1 - GAIN) * least:
            best, least = names, total
    return best


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


def _try(kernel: str, shape: AttentionShape | TowerShape, platform: Platform) -> float | str:
    """Return the seconds of forward and backward of a micro-batch, as the mean over new lengths, or
    why the kernel fails. A kernel prepares itself for a new length once, not in each layer."""
    total = 0.0
    for number in range(LENGTHS):
        try:
            with warnings.catch_warnings():  # torch warns of each reason against a kernel
                warnings.simplefilter("ignore")
                first, *again = (_seconds(kernel, shape, number, platform) for _ in range(3))
        except Exception as error:  # packages of kernels raise errors of their own
            return next(iter(str(error).splitlines()), type(error).__name__)
        if number > 0:  # the first length loads what every length needs
            total += first + (shape.layers - 1) * min(again)
    return total / (LENGTHS - 1)


def _seconds(
    kernel: str, shape: AttentionShape | TowerShape, number: int, platform: Platform
) -> float:
    call = shape.prepare(number, platform.device)
    platform.wait()  # kernels are only queued: without both waits, launches would be timed
    start = time.perf_counter()
    with only_kernel(kernel), torch.enable_grad():
        out = call(kernel)
        out.backward(out.detach())
    platform.wait()
    return time.perf_counter() - start
