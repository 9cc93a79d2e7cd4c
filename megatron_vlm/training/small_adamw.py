"""AdamW whose moments are stored in bf16 or in 8 bits, and computed in fp32."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.config.optimizer_spec import QUANTIZED_BLOCK, OptimizerSpec
from megatron_vlm.training.small_moments import Moment, make_moment, noise_of

_AT_ONCE = 2**14 * QUANTIZED_BLOCK  # weights whose moments are in fp32 at once


class SmallAdamW(torch.optim.Optimizer):
    """AdamW with small moments. With those in fp32 it would be torch's AdamW. A parameter is a part
    of a flattened one; `starts` has its offset there."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        spec: OptimizerSpec,
        starts: Mapping[Tensor, int],
    ):
        super().__init__([{"params": []}], {})
        # Megatron's parts of parameters are views, which torch would not take from outside.
        self.param_groups = list(groups)
        self.spec, self.starts = spec, starts

    def moments(self, param: Tensor) -> dict[str, Moment]:
        """Return the moments of a parameter, which are zero before the first step."""
        state: dict[str, Moment] = self.state[param]
        if not state:
            for name in self.spec.state_names:
                state[name] = make_moment(name, param.numel(), self.spec.states, param.device)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: Mapping[str, Any]) -> None:
        moments, first, step = self.moments(param), self.starts[param], group["step"]
        (beta1, beta2), lr = group["betas"], group["lr"]
        flat, grads = param.detach().view(-1), param.grad.detach().view(-1)  # type: ignore[union-attr]
        flat.mul_(1 - lr * group["weight_decay"])
        for start in range(0, len(flat), _AT_ONCE):
            end = min(start + _AT_ONCE, len(flat))
            grad = grads[start:end].float()
            mean = moments["exp_avg"].read(start, end).lerp_(grad, 1 - beta1)
            square = moments["exp_avg_sq"].read(start, end).mul_(beta2)
            square.addcmul_(grad, grad, value=1 - beta2)
            root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            flat[start:end].addcdiv_(mean, root, value=-lr / (1 - beta1**step))
            moments["exp_avg"].write(start, mean, None)
            noise = noise_of(first + start, end - start, step, flat.device)
            moments["exp_avg_sq"].write(start, square, noise)
