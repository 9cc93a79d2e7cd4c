"""Where the run computes: CUDA with NCCL, or the CPU with gloo. Nothing else in the package
asks for "cuda".

Megatron-Core 0.16 calls `torch.cuda` directly. On a machine without CUDA, `install_cpu_stand_in`
answers those calls, once and explicitly; it is never installed where the platform is cuda.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vlm.errors import ConfigError

# Dense bf16 peak of one device, FLOP/s, from the vendor's data sheets, without sparsity.
PEAK_FLOPS_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX A6000": 155e12,
}


@dataclass(frozen=True)
class Platform:
    """The device of this rank and what depends on it."""

    name: str  # cuda | cpu
    device: torch.device
    dist_backend: str  # nccl | gloo
    default_dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def memory_allocated(self) -> int:
        """Bytes in use now: of the device, or the resident set of this process on the CPU."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def memory_peak(self) -> int:
        """The most bytes in use since the start of the process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        # The kernel updates ru_maxrss late.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(peak, self.memory_allocated())

    def memory_total(self) -> int:
        """Bytes the device has."""
        if self.is_cuda:
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of the device; None where the table does not know it."""
        if not self.is_cuda:
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peak for key, peak in PEAK_FLOPS_BF16.items() if key in name), None)


def pick_platform(name: str = "auto") -> Platform:
    """The platform by name, ready to use: on the CPU the stand-in is installed."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"platform={name!r} is not one of auto, cuda, cpu")
    # Megatron overlaps TP's reductions with GEMMs by the order in which kernels are queued: one
    # queue keeps it. Must be set before CUDA starts; what the user set stays.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    has_cuda = torch.cuda.is_available() and not _stand_in_installed()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            f"platform=cuda, but torch {torch.__version__} sees no CUDA device; "
            "set platform=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    if has_cuda and name != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return Platform("cuda", device, "nccl", torch.bfloat16)
    install_cpu_stand_in()
    return Platform("cpu", torch.device("cpu"), "gloo", torch.float32)


def _making_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A torch factory function for which device="cuda" means the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _NoStream:
    """Stands for a CUDA stream or event: on the CPU all work is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _stand_in_installed() -> bool:
    return getattr(torch.cuda, "_megatron_vlm_stand_in", False)


def install_cpu_stand_in() -> None:
    """Answer Megatron-Core's CUDA calls on the CPU. Idempotent.

    A process-wide change, made only where the platform is cpu (picked, or forced on a GPU machine).
    """
    if _stand_in_installed():
        return
    import megatron.core.tensor_parallel.random as megatron_random

    cuda: Any = torch.cuda
    # Buffers are made with device=torch.cuda.current_device() (p2p, mappings, layers).
    cuda.current_device = lambda: torch.device("cpu")
    # Ordering points between streams: nothing to wait for.
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = _NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # Random state: the CPU generator is the device's generator, for recomputation too.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # Tensors made with device="cuda": schedules, optimizer, gradient clipping, checkpoints. Wrapped
    # one by one: a TorchFunctionMode would do it too, but it taxes every attribute of every tensor
    # (10,600 calls in a step of 8 rows). `with torch.device(...)` looks the functions up in a set
    # that is built at its first use: build it now, while it still finds the real ones.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "full", "empty", "empty_like", "zeros_like"):
        setattr(torch, name, _making_on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    # The optimizers sort parameters by comparing with the names of CUDA's tensor types.
    real_type = tensor.type
    tensor.type = lambda self, *args, **kwargs: (
        real_type(self, *args, **kwargs)
        if args or kwargs
        else real_type(self).replace("torch.", "torch.cuda.", 1)
    )
    cuda._megatron_vlm_stand_in = True
