"""AdamW in one Triton kernel: it scales the gradients, or skips the step, updates weights and
moments, and writes the weights in bf16. It reads and writes each of them once.

The formulas, their order and the rounding of each operation are training/adamw.py's on a CPU, so
that both give the same bits there. torch computes a first moment by a fused multiply-add, except
for the last few values of a tensor, which do not fill a vector; here all are computed so.

Imported only where there is Triton, which comes with torch for CUDA.

Shapes: R blocks of a program, R x Q their weights."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vlm.config.optimizer_spec import QUANTIZED_BLOCK, STATE_NAMES
from megatron_vlm.training.adamw import Int8Moment, Moment, Scaling, noise_seed

_BLOCKS = 4  # in a program


@triton.jit
def _noise_bits(places, seed):
    """Return the bits of adamw.noise_of, before they become a number between 0 and 1."""
    hashed = places + seed
    hashed = hashed ^ (hashed >> 29)
    hashed = hashed * -4658895280553007687  # 0xBF58476D1CE4E5B9
    hashed = hashed ^ (hashed >> 29)
    hashed = hashed * -7723592293110705685  # 0x94D049BB133111EB
    return ((hashed >> 32) & 0xFFFF).to(tl.int32)


@triton.jit
def _bf16_bits(values):
    """Return the bits of the nearest values in bf16, which are even in a tie."""
    bits = values.to(tl.int32, bitcast=True)
    # Rounding up would carry some NaNs past the sign, and they would become zeros.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, nearest, 0x7FC0).to(tl.int16)


@triton.jit
def _read(moment, scales, values_of, rows, places, live, STATES: tl.constexpr):
    values = tl.load(moment + places, mask=live, other=0)
    if STATES == "bf16":
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif STATES == "int8":
        values = tl.load(values_of + values.to(tl.int32)) * tl.load(scales + rows)
        values = tl.where(live, values, 0.0)
    return values


@triton.jit
def _write_codes(values, noise, moment, tables, rows, places, live, IS_ROOT: tl.constexpr):
    scales, values_of, codes_of = tables
    largest = tl.max(tl.abs(values), axis=1)[:, None]
    shares = tl.div_rn(values, tl.broadcast_to(largest, values.shape))
    shares = tl.where(shares == shares, shares, 0.0)  # a block of zeros has no shares
    # An entry of the table is at most 1 too low, and no code is above 255.
    below = tl.load(codes_of + ((shares.to(tl.int32, bitcast=True) >> 16) & 0xFFFF))
    below += (tl.load(values_of + below + 1) <= shares).to(tl.int32)
    below = tl.minimum(below, 254)
    low, high = tl.load(values_of + below), tl.load(values_of + below + 1)
    is_up = noise < tl.div_rn(shares - low, high - low)
    if IS_ROOT:
        is_up = is_up | ((below == 0) & (shares > 0))
    tl.store(moment + places, (below + is_up.to(tl.int32)).to(tl.uint8), mask=live)
    tl.store(scales + rows, largest, mask=tl.max(live.to(tl.int32), axis=1)[:, None] > 0)


# Both change all the time. Triton would compile anew for a 1 and for a multiple of 16.
@triton.jit(do_not_specialize=["start", "seed"])
def adamw_kernel(  # noqa: PLR0913
    weights,
    copies,  # the model's weights, as bits of bf16
    grads,
    means,
    mean_scales,
    mean_values_of,
    mean_codes_of,
    squares,
    square_scales,
    square_values_of,
    square_codes_of,
    factor,
    skip,
    count,
    start,
    seed,
    keep,
    share,
    beta2,
    square_share,
    root,
    eps,
    rate,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # In 64 bits: a stack of experts may have more than 2^31 weights on a rank.
    rows = (tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    places = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    # A mask, not a branch of the host, which would wait for the norm of the gradients.
    live = (places < count) & (tl.load(skip) == 0)
    grad = tl.load(grads + places, mask=live, other=0.0) * tl.load(factor)
    weight = tl.load(weights + places, mask=live, other=0.0) * keep
    mean = _read(means, mean_scales, mean_values_of, rows, places, live, STATES)
    square = _read(squares, square_scales, square_values_of, rows, places, live, STATES)
    if STATES == "int8":
        square = square * square
    share = tl.cast(share, tl.float32)
    is_small = share < 0.5
    nearer = tl.where(is_small, mean, grad)  # as in lerp
    mean = tl.fma(grad - mean, tl.where(is_small, share, share - 1.0), nearer)
    square = tl.fma(square_share * grad, grad, square * beta2)
    divisor = tl.div_rn(tl.sqrt_rn(square), tl.zeros_like(square) + root) + eps
    weight = weight + tl.div_rn(rate * mean, divisor)
    tl.store(weights + places, weight, mask=live)
    if copies is not None:
        tl.store(copies + places, _bf16_bits(weight), mask=live)
    if STATES == "fp32":
        tl.store(means + places, mean, mask=live)
        tl.store(squares + places, square, mask=live)
    else:
        noise = _noise_bits(places + start, seed)
        if STATES == "bf16":
            tl.store(means + places, _bf16_bits(mean), mask=live)
            bits = square.to(tl.int32, bitcast=True) + noise
            tl.store(squares + places, (bits >> 16).to(tl.int16), mask=live)
        else:
            noise = (noise.to(tl.float32) + 0.5) * (1.0 / 65536.0)
            half = tl.zeros_like(noise) + 0.5
            tables = mean_scales, mean_values_of, mean_codes_of
            _write_codes(mean, half, means, tables, rows, places, live, False)
            tables = square_scales, square_values_of, square_codes_of
            _write_codes(tl.sqrt_rn(square), noise, squares, tables, rows, places, live, True)


def fused_step(
    main: Tensor,
    moments: Mapping[str, Moment],
    group: Mapping[str, Any],
    start: int,
    scaling: Scaling,
    copy: Tensor | None,
) -> None:
    """Update a part of a parameter that is contiguous and starts at `start`, and its copy in
    bf16."""
    assert main.grad is not None and main.grad.dtype == main.dtype == torch.float32
    mean, square = (moments[name] for name in STATE_NAMES)
    (beta1, beta2), lr, step, count = group["betas"], group["lr"], group["step"], main.numel()
    adamw_kernel[(triton.cdiv(count, _BLOCKS * QUANTIZED_BLOCK),)](
        main.detach(),
        None if copy is None else copy.view(torch.int16),
        main.grad,
        *_tensors(mean),
        *_tensors(square),
        scaling.factor,
        scaling.skip,
        count,
        start,
        noise_seed(step),
        1 - lr * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        group["eps"],
        -lr / (1 - beta1**step),
        STATES=_states_of(mean),
        BLOCK=QUANTIZED_BLOCK,
        BLOCKS=_BLOCKS,
        enable_fp_fusion=False,  # each operation is rounded, as it is by separate kernels
    )


def _tensors(moment: Moment) -> tuple[Tensor | None, ...]:
    """Return the values or codes of a moment, and what codes need: scales, map and table."""
    if isinstance(moment, Int8Moment):
        return moment.codes_W, moment.scales_B, moment.map, moment.table
    is_bf16 = moment.values_W.dtype == torch.bfloat16
    return moment.values_W.view(torch.int16) if is_bf16 else moment.values_W, None, None, None


def _states_of(moment: Moment) -> str:
    if isinstance(moment, Int8Moment):
        return "int8"
    return "bf16" if moment.values_W.dtype == torch.bfloat16 else "fp32"
