"""Names of attention kernels, the order in which torch tries them, and torch's switch among the
generations of FlashAttention, which holds for the whole process: decoder and tower alike."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_vlm.errors import error_line

TORCH = "torch"  # torch's own choice
# Name of torch for a generation that is not its own, and the package that has it.
GENERATIONS = {"fa4": ("FA4", "flash-attn-4"), "fa3": ("FA3", "flash-attn-3")}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    **dict.fromkeys(GENERATIONS, SDPBackend.FLASH_ATTENTION),
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def is_flash(kernel: str) -> bool:
    """Return whether torch would take FlashAttention where it can run."""
    return kernel == TORCH or KERNELS[kernel] is SDPBackend.FLASH_ATTENTION


def only_kernel(kernel: str) -> AbstractContextManager[None]:
    """Allow no other kernel inside the context."""
    return nullcontext() if kernel == TORCH else sdpa_kernel(KERNELS[kernel])


def prefer_kernel(kernel: str) -> AbstractContextManager[None]:
    """Prefer this kernel for attention inside the context, where it can run."""
    if kernel == TORCH:
        return nullcontext()
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order = [KERNELS[kernel], *(other for other in others if other is not KERNELS[kernel])]
    return sdpa_kernel(order, set_priority=True)


def activated() -> str:
    """Return the generation that this process takes: `flash` is torch's own."""
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return next((name for name, (impl, _) in GENERATIONS.items() if impl == current), "flash")


def activate(kernel: str) -> str | None:
    """Take the generation of this kernel from now on. Return why it cannot be taken, if so. Torch's
    own is taken for all kernels that name no other."""
    wanted = kernel if kernel in GENERATIONS else "flash"
    if wanted == activated():
        return None
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot switch to it"
    if wanted == "flash":
        attention.restore_flash_attention_impl()
        return None
    impl, package = GENERATIONS[wanted]
    try:
        attention.activate_flash_attention_impl(impl)
    except Exception as error:  # the import of a package of kernels may raise anything
        return f"it needs the package {package}: {error_line(error)}"
    return None


def installed() -> list[str]:
    """Return the generations that torch can switch to here, and leave the present one."""
    before = activated()
    found = [kernel for kernel in GENERATIONS if activate(kernel) is None]
    activate(before)
    return found
