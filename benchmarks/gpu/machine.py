"""The machine and its limits: versions, bandwidth, GEMM, attention."""

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu.step import Figures

from megatron_vlm.family.flash_attention import GENERATIONS, activate, only_kernel

PACKAGES = ("torch", "transformers", "megatron-core", "triton", "transformer-engine", "fla-core")
ABSENT = "not installed"


def wait() -> None:
    """Wait until the device has completed all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """Return the seconds of the first call, and those of the fastest call after it."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - start)
    return times[0], min(times[1:])


def version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def ceilings(figures: Figures) -> None:
    """Measure the limits that no program can exceed here."""
    figures.say("versions", {name: version(name) for name in PACKAGES})
    device = torch.device(figures.platform)
    if figures.dry:
        figures.say("device", "the CPU, dry")
    else:
        properties = torch.cuda.get_device_properties(0)
        figures.say("device", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        figures.say("cuda", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    size = 2**20 if figures.dry else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures.say("copy_gb_per_s", 2 * size / seconds(lambda: target.copy_(source))[1] / 1e9)
    width = 256 if figures.dry else 8192
    a = torch.randn(width, width, device=device).bfloat16()
    b = torch.randn(width, width, device=device).bfloat16()
    fastest = seconds(lambda: a @ b)[1]
    figures.say("gemm_bf16_tflops", 2 * width**3 / fastest / 1e12)


@dataclass(frozen=True)
class Shape:
    """Shape of a call of attention. It is causal in the decoder and not causal in the tower."""

    rows: int
    heads: int
    key_heads: int
    tokens: int
    width: int
    causal: bool

    def attend(self, device: str, dtype: torch.dtype) -> Callable[[], None]:
        """Return a function that runs forward and backward."""
        query, key, value = (
            torch.randn(self.rows, count, self.tokens, self.width, device=device, dtype=dtype)
            for count in (self.heads, self.key_heads, self.key_heads)
        )
        query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        shared = self.heads != self.key_heads

        def call() -> None:
            F.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, enable_gqa=shared
            ).sum().backward()

        return call

    @property
    def flops(self) -> float:
        """The operations of two products in forward and four in backward, without recomputation."""
        whole = 3 * 4 * self.rows * self.heads * self.tokens**2 * self.width
        return whole / 2 if self.causal else whole


def attention(figures: Figures) -> None:
    """Measure torch's attentions at the shapes of decoder and tower: the first call with a new
    shape, and the fastest call after it."""
    shrink = 32 if figures.dry else 1
    shapes = {
        "decoder": Shape(4, 32, 8, 2048 // shrink, 128, True),
        "tower": Shape(1, 16, 16, 4096 // shrink, 72, False),
    }
    kernels, dtype = ("flash", "efficient", "cudnn", *GENERATIONS), torch.bfloat16
    if figures.dry:
        kernels, dtype = ("math", *GENERATIONS), torch.float
    for where, shape in shapes.items():
        for name in kernels:
            if lacking := activate(name):
                figures.say(f"{where} {name}", f"not run: {lacking}")
                continue
            try:
                with only_kernel(name):
                    first, fastest = seconds(shape.attend(figures.platform, dtype), 5)
            except RuntimeError as error:
                figures.say(f"{where} {name}", str(error).splitlines()[0])
                continue
            rate = shape.flops / fastest / 1e12
            values = {"first_ms": 1e3 * first, "ms": 1e3 * fastest, "tflops": rate}
            figures.say(f"{where} {name}", values)
    activate("flash")
