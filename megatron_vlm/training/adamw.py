"""AdamW that updates a range of a tensor at a time, with moments in fp32, bf16 or 8 bits.

The second moment changes by a small share of itself in a step: by 1 - beta2, a thousandth. Rounding
to the nearest value would undo that, because neighbouring values of bf16 are 0.4 % to 0.8 % apart,
and 8-bit values more. So it is rounded up or down at random, with the value itself as its mean.
The random numbers are a function of the step and of the place in the tensor, so that copies of a
weight stay equal and a run can be repeated. The first moment changes by a tenth, and is rounded to
the nearest value, which loses less.

8 bits are codes of a block of weights that have a scale in common, with the dynamic map of
bitsandbytes: seven decades, and in each twice as many values as in the one below. Two things differ
from it. The largest value of a block is exact with either sign, so that reading and writing a
moment again changes nothing. And the code of the second moment is that of its root, which spans as
many decades as the first moment: a weight with small gradients would else be divided by zero.

Shapes: W weights of a part of a tensor, B blocks of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_vlm.config.optimizer_spec import MIN_INT8_WEIGHTS, QUANTIZED_BLOCK, OptimizerSpec

_DECADES = 7
_NOISE_BITS = 16


class FloatMoment:
    """A moment of the weights of a flat tensor, in fp32 or bf16."""

    def __init__(self, weights: int, dtype: torch.dtype, device: torch.device):
        self.values_W = torch.zeros(weights, dtype=dtype, device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Return the values of the weights from `start` to `end`, in fp32, as a copy."""
        return self.values_W[start:end].to(torch.float32, copy=True)

    def write(self, start: int, values: Tensor, noise: Tensor | None) -> None:
        """Store values from `start` on. `noise` has a random number between 0 and 1 for each, and
        None rounds to the nearest value."""
        if self.values_W.dtype == torch.bfloat16 and noise is not None:
            values = round_to_bf16(values, noise)
        self.values_W[start : start + len(values)] = values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are in memory."""
        return (self.values_W,)


class Int8Moment:
    """A moment in 8 bits, which is read and written like a FloatMoment, but from blocks on."""

    def __init__(self, weights: int, is_root: bool, device: torch.device):
        self.is_root = is_root  # the codes are of the root, which has no sign
        self.map, self.table = (each.to(device) for each in code_tables(not is_root))
        zero = int((self.map == 0).nonzero())
        self.codes_W = torch.full((weights,), zero, dtype=torch.uint8, device=device)
        self.scales_B = torch.zeros(-(-weights // QUANTIZED_BLOCK), device=device)

    def read(self, start: int, end: int) -> Tensor:
        assert start % QUANTIZED_BLOCK == 0
        scales_B = self.scales_B[start // QUANTIZED_BLOCK : -(-end // QUANTIZED_BLOCK)]
        scales_W = scales_B.repeat_interleave(QUANTIZED_BLOCK)[: end - start]
        values = self.map.index_select(0, self.codes_W[start:end].int()) * scales_W
        return values.square_() if self.is_root else values

    def write(self, start: int, values: Tensor, noise: Tensor | None) -> None:
        assert start % QUANTIZED_BLOCK == 0
        if self.is_root:  # in fp32 MKL now and then returns a neighbour of the nearest root
            values = values.double().sqrt_().float()
        padding = -len(values) % QUANTIZED_BLOCK
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, QUANTIZED_BLOCK)
        scales_B = blocks.abs().amax(dim=1)
        self.scales_B[start // QUANTIZED_BLOCK :][: len(scales_B)] = scales_B
        scales_W = scales_B.repeat_interleave(QUANTIZED_BLOCK)[: len(values)]
        shares = (values / scales_W).nan_to_num_(0.0)  # a block of zeros has no shares
        below = self.table.index_select(0, (shares.view(torch.int32) >> 16) & 0xFFFF)
        below += self.map.index_select(0, below + 1) <= shares
        below.clamp_(max=254)
        low, high = self.map.index_select(0, below), self.map.index_select(0, below + 1)
        is_up = (0.5 if noise is None else noise) < (shares - low) / (high - low)
        if self.is_root:
            is_up |= (below == 0) & (shares > 0)  # never zero, which would divide by nothing
        self.codes_W[start : start + len(values)] = (below + is_up).to(torch.uint8)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes_W, self.scales_B


Moment = FloatMoment | Int8Moment


def make_moment(name: str, weights: int, states: str, device: torch.device) -> Moment:
    """Return a moment of this name and type, zero everywhere."""
    if states == "int8" and weights >= MIN_INT8_WEIGHTS:
        return Int8Moment(weights, name == "exp_avg_sq", device)
    dtype = torch.bfloat16 if states == "bf16" else torch.float32
    return FloatMoment(weights, dtype, device)


def moments_of(
    state: dict[str, Moment], names: Sequence[str], param: Tensor, states: str
) -> dict[str, Moment]:
    """Return the moments of a parameter, which its state has from the first call on."""
    if not state:
        for name in names:
            state[name] = make_moment(name, param.numel(), states, param.device)
    return state


def dynamic_map(signed: bool) -> Tensor:
    """Return the 256 values of the codes, in rising order, with 0 and 1 among them. With signs the
    first is there twice."""
    positive = []
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        bounds = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        positive += ((bounds[1:] + bounds[:-1]) / 2 * 10.0 ** (decade + 1 - _DECADES)).tolist()
    if signed:
        positive[-1] = 1.0
        values = [-1.0, *(-value for value in reversed(positive)), 0.0, *positive]
    else:
        values = [0.0, *positive, 1.0]
    return torch.tensor(values, dtype=torch.float32)


@cache
def code_tables(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the dynamic map, and a table to find the code of the largest value in it that is not
    above a number, by the upper 16 bits of the number. Its entry is at most 1 too low. A search in
    the map takes 40 times as long on a CPU."""
    values = dynamic_map(signed)
    upper = torch.arange(2**16, dtype=torch.int32)
    upper = torch.where(upper < 2**15, upper, upper - 2**16) << 16  # as signed numbers
    first, last = upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)
    ends = torch.stack([first, torch.where(last.isnan(), first, last)]).clamp(-1, 1)
    codes = torch.searchsorted(values, ends, right=True).sub_(1).clamp_(max=254)
    assert int((codes[0] - codes[1]).abs().max()) <= 1
    return values, codes.amin(dim=0).int()


def noise_seed(step: int) -> int:
    """Return what is added to the place of a weight before it is hashed."""
    return step * 0x9E3779B97F4A7C15 % 2**64 - 2**63


def noise_of(start: int, count: int, step: int, device: torch.device) -> Tensor:
    """Return a random number between 0 and 1 for each weight of the whole tensor from `start` on,
    in this step. It is a hash, the same on every device."""
    hashed = torch.arange(start, start + count, device=device) + noise_seed(step)
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        hashed ^= hashed >> 29
        hashed *= multiplier - 2**64
    numbers = (hashed >> 32) & (2**_NOISE_BITS - 1)
    return (numbers.float() + 0.5) / 2**_NOISE_BITS


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return the values in bf16, each rounded up if its remainder is above its noise."""
    lost_bits = 16  # bf16 lacks these bits of fp32
    bits = values.contiguous().view(torch.int32) + (noise * 2**lost_bits).int()
    return ((bits >> lost_bits) << lost_bits).view(torch.float32).to(torch.bfloat16)


@dataclass(frozen=True)
class Scaling:
    """Change of a gradient by a step, as the device has computed it."""

    factor: Tensor  # by which they are multiplied, in fp32
    skip: Tensor  # not 0: leave weights and moments as they are

    @staticmethod
    def without_effect(device: torch.device) -> "Scaling":
        """Return the scaling of gradients that are applied as they are."""
        factor = torch.ones((), device=device)
        return Scaling(factor, torch.zeros_like(factor, dtype=torch.int))


# The kernel of fused_adamw.py, which updates a part of a parameter.
Kernel = Callable[
    [Tensor, Mapping[str, Moment], Mapping[str, Any], int, Scaling, Tensor | None], None
]

# Weights whose moments are in fp32 at once: few kernels on a device, and a CPU's cache.
_AT_ONCE = {"cuda": 2**14 * QUANTIZED_BLOCK, "cpu": 2**10 * QUANTIZED_BLOCK}


class RangedAdamW(torch.optim.Optimizer):
    """AdamW that computes in fp32: torch's, where moments are stored in fp32. A parameter is a part
    of a flattened one; `starts` has its offset there. With a kernel a step also writes `copies`,
    the weights of the model in bf16, and does what `scalings` say."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        spec: OptimizerSpec,
        starts: Mapping[Tensor, int],
        kernel: Kernel | None = None,
        copies: Mapping[Tensor, Tensor] | None = None,
    ):
        super().__init__([{"params": []}], {})
        # Megatron's parts of parameters are views, which torch would not take from outside.
        self.param_groups = list(groups)
        self.spec, self.starts = spec, starts
        self.kernel, self.copies = kernel, copies or {}
        self.scalings: Mapping[Tensor, Scaling] = {}  # other gradients are taken as they are

    def moments(self, param: Tensor) -> dict[str, Moment]:
        """Return the moments of a parameter, which are zero before the first step."""
        return moments_of(self.state[param], self.spec.state_names, param, self.spec.states)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        assert closure is None
        self.count_step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self.kernel is None:
                    self.update(param, group, 0, param.grad.detach().view(-1))
                    continue
                scaling = self.scalings.get(param) or Scaling.without_effect(param.device)
                given = self.moments(param), group, self.starts[param], scaling
                self.kernel(param, *given, self.copies.get(param))

    def count_step(self, steps: int = 1) -> None:
        """Begin a step, in which each weight is updated at most once; -1: it was skipped."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + steps

    def update(self, param: Tensor, group: Mapping[str, Any], start: int, grads: Tensor) -> None:
        """Update the weights from `start` on by these gradients, in whole blocks of 8 bits."""
        flat, end = param.detach().view(-1), start + len(grads)
        if self.spec.states == "fp32":
            moments = (each.tensors[0][start:end] for each in self.moments(param).values())
            self._update_values(param, group, start, grads, *moments)
            return
        at_once = _AT_ONCE[flat.device.type]
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            self._update_moments(param, group, first, grads[first - start : last - start].float())

    def _update_moments(
        self, param: Tensor, group: Mapping[str, Any], start: int, grad: Tensor
    ) -> None:
        moments, step, end = self.moments(param), group["step"], start + len(grad)
        mean, square = (each.read(start, end) for each in moments.values())
        self._update_values(param, group, start, grad, mean, square)
        moments["exp_avg"].write(start, mean, None)
        noise = noise_of(self.starts[param] + start, end - start, step, param.device)
        moments["exp_avg_sq"].write(start, square, noise)

    def _update_values(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        start: int,
        grad: Tensor,
        mean: Tensor,
        square: Tensor,
    ) -> None:
        """Update the weights from `start` on, and these moments, by torch's fused kernel."""
        weights = param.detach().view(-1)[start : start + len(grad)]
        # The kernel adds 1 to the count, which is of this call alone.
        step = torch.full((), float(group["step"] - 1), device=param.device)
        (beta1, beta2), lr = group["betas"], group["lr"]
        adamw(
            [weights],
            [grad],
            [mean],
            [square],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
