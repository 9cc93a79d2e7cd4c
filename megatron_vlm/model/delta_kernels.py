"""Choice of the program for the gated delta rule: this package's, or flash-linear-attention's on
CUDA. The choice is printed, and never falls back silently."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.decoder_layers import GatedDeltaNet
from megatron_vlm.model.delta_rule import gated_delta_rule

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_KEY = "model.delta_rule"
_TRIED_TOKENS = 100
_MAX_ERROR = 0.02  # relative to the norm: bf16 has three digits


def choose_delta_rule(
    setting: str, sizes: GatedDeltaNet, dtype: torch.dtype, platform: Platform
) -> DeltaRule:
    """Return the function that computes the rule. This is a collective on CUDA: all ranks compute
    the same. flash-linear-attention is never imported where the device is a CPU: with Triton it
    would take CPU tensors and fail, and without it, it does not import."""
    if setting == "torch" or (setting == "auto" and not platform.is_cuda):
        return gated_delta_rule
    lacking = _try_fla(sizes, dtype, platform) if platform.is_cuda else "it needs CUDA"
    if setting == "fla" and lacking:
        raise ConfigError(
            f": flash-linear-attention cannot compute the delta rule here ({lacking})",
            key=_KEY,
            found=setting,
            remedy="pip install flash-linear-attention on a CUDA machine, or set "
            f"{_KEY}=auto, which takes the slower rule of this package instead",
        )
    is_first = torch.distributed.get_rank() == 0
    if all_reduce_max(int(lacking is not None), platform.device):
        reason = lacking or "another rank cannot run flash-linear-attention"
        if is_first:
            print_to_user(f"{_KEY}={setting} is torch: {reason}; linear attention runs slower")
        return gated_delta_rule
    if is_first:
        print_to_user(
            f"{_KEY}={setting} is fla, whose backward is not deterministic: set {_KEY}=torch "
            "for runs that resume bit for bit"
        )
    return fla_rule


def fla_rule(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, g_BSV: Tensor, beta_BSV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` by flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out_BSVE, state_BVDE = chunk_gated_delta_rule(
        *(x.contiguous() for x in (q_BSKD, k_BSKD, v_BSVE)),
        g=g_BSV,
        beta=beta_BSV,
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
    )
    return out_BSVE, state_BVDE


def _try_fla(sizes: GatedDeltaNet, dtype: torch.dtype, platform: Platform) -> str | None:
    """Compare forward and backward with this package's rule on the device. Return the reason why
    flash-linear-attention cannot be used, or None."""
    generator = torch.Generator().manual_seed(0)
    heads, widths = (sizes.key_heads, sizes.value_heads), (sizes.key_dim, sizes.value_dim)
    copies = heads[1] // heads[0]

    def random(*shape: int) -> Tensor:
        return torch.randn(1, _TRIED_TOKENS, *shape, generator=generator).to(platform.device)

    q, k, v = random(1, widths[0]), random(1, widths[0]), random(copies, widths[1])
    g, beta = -random(copies).abs(), random(copies).sigmoid()
    results = []
    for rule in (gated_delta_rule, fla_rule):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        try:
            with torch.enable_grad():
                out, _state = rule(inputs[0], inputs[1], inputs[2], g, beta)
                out.float().square().sum().backward()
        except Exception as error:  # a kernel that does not compile may raise anything
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        results.append([out.detach(), *(x.grad for x in inputs)])
    for right, tried in zip(*results, strict=True):
        assert right is not None and tried is not None
        distance = float((tried.float() - right.float()).norm() / right.float().norm())
        if not distance < _MAX_ERROR:
            return f"its result differs by {distance:.1e} from this package's"
    return None
