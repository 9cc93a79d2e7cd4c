"""Host memory beside a device, and copies between the two while the device computes. On the CPU the
same copies run at once, from memory to memory."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# Limits of a container's memory: of the second version of control groups, and of the first.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
Copied = torch.cuda.Event | None  # a point in the order of copies; None on the CPU


def host_memory_total() -> int:
    """Return the bytes of memory that this machine has, or that this container may use."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)


def pinned_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return flat pinned memory. torch rounds its size up to a power of two."""
    memory = torch.empty(count, dtype=dtype)
    return memory.pin_memory() if device.type == "cuda" else memory


class HostStream:
    """A stream of copies between host and device, in their order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Let the copies from now on wait for the work that the device has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        """Copy the second tensor of each pair into the first. Return an event for `wait`."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    @staticmethod
    def wait(event: Copied) -> None:
        """Let the host wait until the copies before this event are done."""
        if event is not None:
            event.synchronize()

    def join(self) -> None:
        """Let the work that the device is given from now on wait for the copies so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
