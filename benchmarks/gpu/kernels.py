"""Products of experts on this GPU: torch's grouped product, which this package takes, beside those
of Megatron-Core and Transformer Engine, at the shapes of Qwen3.5 35B-A3B.

Shapes: M token-expert pairs, e experts, I inputs and O outputs of a layer."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu.machine import seconds
from gpu.step import Figures
from torch import Tensor

from megatron_vlm.model.experts import times_grouped, times_in_turn
from megatron_vlm.model.router import RowCounts

# bf16 has three digits. Measured on a CPU: 1.7e-3.
BOUND = 5e-3
Times = Callable[[Tensor, Sequence[int]], Tensor]
# What prepares a product for given weights, and the parameters that get their gradients.
Program = Callable[[Tensor], tuple[Times, list[Tensor]]]


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a layer, and the tokens that go to them."""

    experts: int = 256
    hidden: int = 2048
    width: int = 512
    pairs: int = 4096 * 8  # two rows of 2,048 tokens, each of which goes to 8 experts


DRY = ExpertShape(experts=8, hidden=64, width=32, pairs=256)


def experts(figures: Figures) -> None:
    """Compare each program's product with fp64, and time forward and backward of both layers of an
    expert MLP. Some experts have many tokens, and some have none."""
    shape = DRY if figures.dry else ExpertShape()
    generator = torch.Generator().manual_seed(0)
    shares = torch.randn(shape.experts, generator=generator).exp()
    shares[0] = 0
    chosen = torch.multinomial(shares, shape.pairs, replacement=True, generator=generator)
    counts = torch.bincount(chosen, minlength=shape.experts).tolist()
    layers = {"gate and up": (shape.hidden, 2 * shape.width), "down": (shape.width, shape.hidden)}
    for layer, (inputs, outputs) in layers.items():
        device = torch.device(figures.platform)
        x_MI = torch.randn(shape.pairs, inputs, device=device, dtype=torch.bfloat16)
        weight_eOI = torch.randn(shape.experts, outputs, inputs, device=device).bfloat16()
        slope_MO = torch.randn(shape.pairs, outputs, device=device, dtype=torch.bfloat16)
        in_turn = _own(times_in_turn)
        wide = [x_MI.double(), weight_eOI.double(), slope_MO.double()]
        exact = _results(*in_turn(wide[1]), wide[0], counts, wide[2])
        for name, program in _programs(figures, layer).items():
            given = weight_eOI, x_MI, counts, slope_MO
            _measure(figures, f"{layer}, {name}", program, given, exact)


def _own(times: Callable[[Tensor, Tensor, RowCounts], Tensor]) -> Program:
    """Return one of this package's products."""

    def prepare(weight_eOI: Tensor) -> tuple[Times, list[Tensor]]:
        weight = weight_eOI.detach().requires_grad_()

        def call(x_MI: Tensor, counts: Sequence[int]) -> Tensor:
            return times(x_MI, weight, RowCounts(torch.tensor(counts, device=x_MI.device)))

        return call, [weight]

    return prepare


def _programs(figures: Figures, layer: str) -> dict[str, Program]:
    """Return the programs that are installed, by name, and say which are not."""
    found = {"torch grouped_mm": _own(times_grouped), "in turn": _own(times_in_turn)}
    others = {
        "Megatron-Core": ("grouped_gemm", _own(_times_megatron)),
        "Transformer Engine": ("transformer_engine", _transformer_engine),
    }
    for name, (package, program) in others.items():
        if importlib.util.find_spec(package) is None:
            figures.say(f"{layer}, {name}", f"not run: {package} is not installed")
        else:
            found[name] = program
    return found


def _times_megatron(x_MI: Tensor, weight_eOI: Tensor, counts: RowCounts) -> Tensor:
    from megatron.core.transformer.moe.grouped_gemm_util import ops

    out_MO: Tensor = ops.gmm(x_MI, weight_eOI, counts.counts_E.cpu(), trans_b=True)
    return out_MO


def _transformer_engine(weight_eOI: Tensor) -> tuple[Times, list[Tensor]]:
    from transformer_engine.pytorch import GroupedLinear

    experts, outputs, inputs = weight_eOI.shape
    like = {"params_dtype": weight_eOI.dtype, "device": weight_eOI.device}
    layer = GroupedLinear(experts, inputs, outputs, bias=False, **like)
    weights = [getattr(layer, f"weight{number}") for number in range(experts)]
    with torch.no_grad():
        for weight, values in zip(weights, weight_eOI, strict=True):
            weight.copy_(values)
    return lambda x_MI, counts: layer(x_MI, list(counts)), weights


def _results(
    times: Times, weights: list[Tensor], x_MI: Tensor, counts: Sequence[int], slope_MO: Tensor
) -> tuple[Tensor, ...]:
    """Return the product, and the gradients of both factors."""
    x = x_MI.detach().requires_grad_()
    out_MO = times(x, counts)
    d_x, *d_weights = torch.autograd.grad(out_MO, (x, *weights), slope_MO)
    return out_MO.detach(), d_x, d_weights[0] if len(weights) == 1 else torch.stack(d_weights)


def _measure(
    figures: Figures, name: str, program: Program, given: tuple[Any, ...], exact: tuple[Tensor, ...]
) -> None:
    weight_eOI, x_MI, counts, slope_MO = given
    try:
        prepared = program(weight_eOI)
        found = _results(*prepared, x_MI, counts, slope_MO)
        first, fastest = seconds(lambda: _results(*prepared, x_MI, counts, slope_MO), 5)
    except Exception as error:  # the others' programs may raise anything
        if name.endswith(("grouped_mm", "in turn")):
            raise
        line = next(iter(str(error).splitlines()), "")
        figures.say(name, f"not run: {type(error).__name__}: {line}")
        return
    pairs = zip(found, exact, strict=True)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    figures.check(f"{name}: error", max(errors), BOUND)
    operations = 3 * 2 * len(x_MI) * weight_eOI.shape[1] * weight_eOI.shape[2]
    rate = operations / fastest / 1e12
    figures.say(name, {"first_ms": 1e3 * first, "ms": 1e3 * fastest, "tflops": rate})
