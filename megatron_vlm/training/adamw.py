"""AdamW that updates a range of a tensor at a time, with moments in fp32, bf16 or 8 bits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_vlm.config.optimizer_spec import QUANTIZED_BLOCK, OptimizerSpec
from megatron_vlm.training.moments import FloatMoment, Moment, moments_of, noise_of

# Weights whose moments are in fp32 at once: few kernels on a device, and a CPU's cache.
_AT_ONCE = {"cuda": 2**14 * QUANTIZED_BLOCK, "cpu": 2**10 * QUANTIZED_BLOCK}


class RangedAdamW(torch.optim.Optimizer):
    """AdamW that computes in fp32: torch's, where moments are stored in fp32. A parameter is a part
    of a flattened one; `starts` has its offset there."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], spec: OptimizerSpec, starts: Mapping[Tensor, int]
    ):
        super().__init__([{"params": []}], {})
        # Megatron's parts of parameters are views, which torch would not take from outside.
        self.param_groups = list(groups)
        self.spec, self.starts = spec, starts

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
                if param.grad is not None:
                    self.update(param, group, 0, param.grad.detach().view(-1))

    def count_step(self) -> None:
        """Begin a step, in which each weight is updated at most once."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def update(self, param: Tensor, group: Mapping[str, Any], start: int, grads: Tensor) -> None:
        """Update the weights from `start` on, which have these gradients, by whole blocks of 8
        bits."""
        flat, end = param.detach().view(-1), start + len(grads)
        if self.spec.states == "fp32":
            self._update_at_once(param, group, start, grads)
            return
        flat[start:end].mul_(1 - group["lr"] * group["weight_decay"])
        at_once = _AT_ONCE[flat.device.type]
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            self._update_moments(param, group, first, grads[first - start : last - start].float())

    def _update_at_once(
        self, param: Tensor, group: Mapping[str, Any], start: int, grads: Tensor
    ) -> None:
        """Update weights by torch's fused kernel."""
        values = [param.detach().view(-1)]
        for moment in self.moments(param).values():
            assert isinstance(moment, FloatMoment)
            values.append(moment.values_W)
        weights, means, squares = ([each[start : start + len(grads)]] for each in values)
        # The kernel adds 1 to the count, which is of this call alone.
        step = torch.tensor(float(group["step"] - 1), device=param.device)
        (beta1, beta2), lr = group["betas"], group["lr"]
        adamw(
            weights,
            [grads],
            means,
            squares,
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

    def _update_moments(
        self, param: Tensor, group: Mapping[str, Any], start: int, grad: Tensor
    ) -> None:
        moments, step, end = self.moments(param), group["step"], start + len(grad)
        (beta1, beta2), lr = group["betas"], group["lr"]
        mean = moments["exp_avg"].read(start, end).lerp_(grad, 1 - beta1)
        square = moments["exp_avg_sq"].read(start, end).mul_(beta2)
        square.addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        flat = param.detach().view(-1)
        flat[start:end].addcdiv_(mean, root, value=-lr / (1 - beta1**step))
        moments["exp_avg"].write(start, mean, None)
        noise = noise_of(self.starts[param] + start, end - start, step, flat.device)
        moments["exp_avg_sq"].write(start, square, noise)
