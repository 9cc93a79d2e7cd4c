"""Device of the run: CUDA with NCCL, or the CPU with gloo. Nothing outside this subpackage reads
torch.cuda."""

import gc
import os
import re
import shutil
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vlm.distributed.cuda_stand_in import install_cpu_stand_in, stand_in_installed
from megatron_vlm.errors import ConfigError

_DRIVER_FILES = ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/version")
# Limits of a container's memory: of the second version of control groups, and of the first.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MANY_PARAMETERS = 10**8  # more than models for tests have


class DataSheet(NamedTuple):
    """A GPU by its vendor's data sheet."""

    peak: float  # dense bf16 FLOP/s with fp32 accumulation; of fp32 for WITHOUT_BF16
    bandwidth: float  # bytes per second of its memory
    memory: int  # GiB


# The first name that matches counts.
CARDS = {
    "GB200": DataSheet(2500e12, 8.0e12, 186),
    "B200": DataSheet(2250e12, 8.0e12, 180),
    "GH200": DataSheet(989e12, 4.0e12, 96),
    "H200": DataSheet(989e12, 4.8e12, 141),
    "H100 PCIe": DataSheet(756e12, 2.0e12, 80),
    "H100 NVL": DataSheet(835e12, 3.9e12, 94),
    "H100": DataSheet(989e12, 3.35e12, 80),
    "H800 PCIe": DataSheet(756e12, 2.0e12, 80),
    "H800": DataSheet(989e12, 3.35e12, 80),
    "H20": DataSheet(148e12, 4.0e12, 96),
    "A100": DataSheet(312e12, 2.0e12, 80),
    "A800": DataSheet(312e12, 2.0e12, 80),
    "A40": DataSheet(150e12, 0.696e12, 48),
    "A10G": DataSheet(70e12, 0.6e12, 24),
    "A10": DataSheet(125e12, 0.6e12, 24),
    "L40S": DataSheet(362e12, 0.864e12, 48),
    "L4": DataSheet(121e12, 0.3e12, 24),
    "V100": DataSheet(15.7e12, 0.9e12, 32),
    "T4": DataSheet(8.1e12, 0.32e12, 16),
    "RTX PRO 6000 Blackwell": DataSheet(504e12, 1.792e12, 96),
    "RTX 5090": DataSheet(210e12, 1.792e12, 32),
    "RTX 4090": DataSheet(165e12, 1.008e12, 24),
    "RTX 4080 SUPER": DataSheet(104e12, 0.736e12, 16),
    "RTX 4080": DataSheet(97e12, 0.717e12, 16),
    "RTX 4070 Ti SUPER": DataSheet(88e12, 0.672e12, 16),
    "RTX 4070 Ti": DataSheet(80e12, 0.504e12, 12),
    "RTX 4070 SUPER": DataSheet(71e12, 0.504e12, 12),
    "RTX 4070": DataSheet(58e12, 0.504e12, 12),
    "RTX 3090": DataSheet(71e12, 0.936e12, 24),
    "RTX A6000": DataSheet(155e12, 0.768e12, 48),
}
WITHOUT_BF16 = ("V100", "T4")


@dataclass(frozen=True)
class Platform:
    """Device of this rank and settings that depend on it."""

    name: str  # cuda | cpu
    device: torch.device
    dist_backend: str  # nccl | gloo
    default_dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Release unused memory, including that of reference cycles."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Return the bytes in use: of the device, or on the CPU of this process."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def memory_peak(self) -> int:
        """Return the maximum of bytes in use since the start of the process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        # The kernel updates ru_maxrss late.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(peak, self.memory_allocated())

    def memory_figures(self) -> list[tuple[str, int]]:
        """Return the allocator's figures, each as what it counts and the bytes."""
        if not self.is_cuda:
            return [("in use", self.memory_allocated()), ("at its peak", self.memory_peak())]
        stats = torch.cuda.memory_stats(self.device)
        keys = {
            "in use": "allocated_bytes.all.current",
            "at its peak": "allocated_bytes.all.peak",
            "reserved": "reserved_bytes.all.current",
        }
        return [(name, stats.get(key, 0)) for name, key in keys.items()]

    def memory_total(self) -> int:
        """Return the bytes of memory that the device has."""
        if self.is_cuda:
            return torch.cuda.get_device_properties(self.device).total_memory
        return host_memory_total()

    def peak_flops(self) -> float | None:
        """Return the dense bf16 FLOP/s of the device, or None if the table does not have it."""
        return peak_of(self.device_name())

    def device_name(self) -> str:
        """Return the vendor's name of a GPU, or cpu."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else self.name

    def remark(self, device: str, parameters: int) -> str | None:
        """Return a warning about a model of real size on a CPU that nobody chose, or None."""
        if self.is_cuda or device != "auto" or parameters < _MANY_PARAMETERS:
            return None
        return (
            f"there is no GPU here, so a model of {parameters:,} parameters is computed on the "
            "CPU, which is slow; platform=cpu says that this is meant, and megatron-vlm doctor "
            "what this machine has"
        )


def host_memory_total() -> int:
    """Return the bytes of memory that this machine has, or that this container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)


def lacks_memory(error: BaseException) -> bool:
    """Return whether the memory of a device, or of its machine, has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The first is torch's allocator for the CPU, and the second is pinned memory.
    texts = ("can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def card_of(name: str) -> str | None:
    """Return the entry of CARDS for a device with this name, matched by whole words: an
    H200 is no H20, and a GB200 no B200. Case, spaces and RTX do not matter: rtx4090 and 4070ti are
    known. Variants with another power limit, such as Max-Q or Laptop, are other devices."""
    if re.search(r"\b(Max-Q|Laptop|MIG)\b", name):
        return None
    return next((key for key in CARDS if _pattern_of(key).search(name)), None)


def _pattern_of(card: str) -> re.Pattern[str]:
    words = card.removeprefix("RTX ").replace(" ", "[ _-]?")
    return re.compile(rf"(?<![a-z0-9])(rtx)?{words}(?![a-z0-9])", re.IGNORECASE)


def peak_of(name: str) -> float | None:
    """Return the peak of a device with this name, or None if the table does not have it."""
    card = card_of(name)
    return None if card is None else CARDS[card].peak


def pick_platform(name: str = "auto") -> Platform:
    """Return the platform of this name, ready for use. On the CPU the stand-in is installed."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError("is unknown", key="platform", found=name, allowed=("auto", "cuda", "cpu"))
    # Megatron overlaps TP's reductions with GEMMs by the order in which kernels are queued, and one
    # queue keeps this order. The variable must be set before CUDA starts. A value of the user
    # stays.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # torch prefers cuDNN's attention on Hopper and Blackwell, which builds a plan for each shape,
    # and every micro-batch, picture and generated token has a new shape.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    has_cuda = torch.cuda.is_available() and not stand_in_installed()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            f": torch {torch.__version__} sees no CUDA device",
            key="platform",
            found="cuda",
            remedy="set platform=cpu, or install a CUDA build of torch and check nvidia-smi",
        )
    is_fallback = name == "auto" and not has_cuda and not stand_in_installed()
    if is_fallback and (evidence := find_unseen_gpu()) is not None:
        raise ConfigError(
            f": torch {torch.__version__} sees no GPU, though {evidence} is there",
            key="platform",
            found="auto",
            remedy=f"{why_unseen()}; or set platform=cpu to compute on the CPU",
        )
    if has_cuda and name != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return Platform("cuda", device, "nccl", torch.bfloat16)
    install_cpu_stand_in()
    return Platform("cpu", torch.device("cpu"), "gloo", torch.float32)


def find_unseen_gpu() -> str | None:
    """Return evidence, such as a driver file, of a GPU that torch does not see; None without."""
    files = (path for pattern in _DRIVER_FILES for path in sorted(glob(pattern)))
    return next(files, None) or shutil.which("nvidia-smi")


def why_unseen() -> str:
    """Return a remedy for a GPU that torch does not see."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA: install one that has"
    if (visible_devices := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={visible_devices!r} may hide it, as where a job asked for no GPU"
        )
    return "check that nvidia-smi lists it, and that its driver is new enough for this torch"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device without blocking. A copy from pinned memory is only queued on
    the device, and torch keeps the memory until it is done."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


@dataclass(frozen=True)
class Gpu:
    """Properties of one device that a run depends on."""

    name: str
    memory: int  # bytes
    bf16: bool
    peak_flops: float | None


def memory_outside(platform: Platform) -> int:
    """Return the bytes of a GPU in use outside torch's allocator, by any process; else 0."""
    if not platform.is_cuda:
        return 0
    free, total = torch.cuda.mem_get_info(platform.device)
    return total - free - torch.cuda.memory_reserved(platform.device)


def count_gpus() -> int:
    """Return the number of devices that torch sees."""
    return torch.cuda.device_count()


def find_gpus() -> list[Gpu]:
    """Return every device that torch sees."""
    gpus = []
    for number in range(count_gpus()):
        device = Platform("cuda", torch.device("cuda", number), "nccl", torch.bfloat16)
        properties = torch.cuda.get_device_properties(number)
        bf16 = properties.major >= 8
        gpus.append(Gpu(properties.name, device.memory_total(), bf16, device.peak_flops()))
    return gpus


def nccl_version() -> str | None:
    """Return the NCCL version of this build of torch, or None if it has no NCCL."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
