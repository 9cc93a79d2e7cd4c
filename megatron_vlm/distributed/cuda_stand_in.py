"""Stand-in on the CPU for the calls of `torch.cuda` that Megatron-Core 0.16 makes."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device  # torch itself does not load it


def _making_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch factory function, with device="cuda" replaced by the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _NoStream:
    """Replacement of a CUDA stream or event: on the CPU all work is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def stand_in_installed() -> bool:
    return getattr(torch.cuda, "_megatron_vlm_stand_in", False)


def install_cpu_stand_in() -> None:
    """Replace Megatron-Core's CUDA calls by calls on the CPU, once, in the whole process."""
    if stand_in_installed():
        return
    answer_cuda_calls()
    # Schedules, optimizer, gradient clipping and checkpoints make tensors with device="cuda". The
    # factory functions are wrapped one by one: a TorchFunctionMode would work too, but it slows
    # down every attribute of every tensor (10,600 calls in a step of 8 rows). `with
    # torch.device(...)` looks the functions up in a set that is built at its first use. The set is
    # built here, before they are wrapped.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "full", "empty", "empty_like", "zeros_like"):
        setattr(torch, name, _making_on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    # The optimizers sort parameters by the names of CUDA's tensor types.
    real_type = tensor.type
    tensor.type = lambda self, *args, **kwargs: (
        real_type(self, *args, **kwargs)
        if args or kwargs
        else real_type(self).replace("torch.", "torch.cuda.", 1)
    )
    cuda._megatron_vlm_stand_in = True


def answer_cuda_calls() -> None:
    """Replace the functions of `torch.cuda` that Megatron-Core calls. They need no device."""
    import megatron.core.tensor_parallel.random as megatron_random

    cuda: Any = torch.cuda
    # Megatron makes buffers with device=torch.cuda.current_device() (p2p, mappings, layers).
    cuda.current_device = lambda: torch.device("cpu")
    # Streams are ordering points, and here there is nothing to wait for.
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = _NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # The CPU generator replaces the device's random state, in recomputation too.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
