"""Copies between the device and the memory of the host while the device computes. On the CPU both
are memory of this process: the copies are made at once, and there are no streams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.distributed.device import to_device

PAGE = 2**22  # bytes; torch rounds pinned memory up to a power of two
_MOST_ARRIVING = 4  # loads at a time; a backward has two
Copied = torch.cuda.Event | None  # a point in the order of copies; None on the CPU


def pinned_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return flat pinned memory. torch rounds its size up to a power of two."""
    memory = torch.empty(count, dtype=dtype)
    return memory.pin_memory() if device.type == "cuda" else memory


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class HostPages:
    """Pinned memory in pages of one size. A page that is returned is used again, so that pages for
    rows of any length take no more memory than the most that were in use at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.free: list[Tensor] = []
        self.allocated = 0  # pages that exist

    def take(self, size: int) -> "PageBlock":
        """Return pages for this many bytes, which are returned when nothing refers to the block."""
        return PageBlock(self, [self._page() for _ in range(-(-size // PAGE))])

    def _page(self) -> Tensor:
        if self.free:
            return self.free.pop()
        self.allocated += 1
        return pinned_memory(PAGE, torch.uint8, self.device)


class PageBlock:
    """Pages that hold bytes one after another."""

    def __init__(self, owner: HostPages, pages: list[Tensor]):
        self.owner, self.pages = owner, pages

    def __del__(self) -> None:
        # A load may still read the pages: `store` waits for the loads before it fills any.
        self.owner.free += self.pages

    def spans(self, start: int, size: int) -> Iterator[Tensor]:
        """Yield the parts of the pages that hold the bytes from `start` on."""
        end = start + size
        while start < end:
            page, offset = divmod(start, PAGE)
            length = min(PAGE - offset, end - start)
            yield self.pages[page][offset : offset + length]
            start += length


class HostCopies:
    """Copies to the host and back, each direction on a stream of its own. The host never waits.
    Events are None on the CPU."""

    def __init__(self, device: torch.device):
        self.device, self.pages = device, HostPages(device)
        self.on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self.to_host, self.to_device = _new_stream(device), _new_stream(device)
        # Tensors that are being copied back, even if nobody wants them after an error.
        self.arriving: dict[Any, list[Tensor]] = {}

    def store(self, tensors: Sequence[Tensor]) -> tuple[PageBlock, Any]:
        """Copy flat tensors of bytes to the host. Return where they lie, and the event after the
        copies. Until the event, the tensors must not be freed."""
        block = self.pages.take(sum(map(len, tensors)))
        # After the loads too: a page that was just returned may still be read by one.
        with self._on(self.to_host, self.to_device):
            start = 0
            for tensor in tensors:
                _copy(tensor, block, start, is_store=True)
                start += len(tensor)
        return block, self.to_host and self.to_host.record_event()

    def load(
        self, block: PageBlock, spans: Sequence[tuple[int, int]], after: Any
    ) -> tuple[list[Tensor], Any]:
        """Copy bytes back. `spans` are the first byte and the number of bytes of each tensor, and
        `after` is the event of their `store`. Return the tensors, and the event after the copies,
        which the work on the tensors has to wait for."""
        while len(self.arriving) > _MOST_ARRIVING:
            self.wait(next(iter(self.arriving)))
        # The memory belongs to the compute stream, which may still use what lay there before.
        tensors = [self.on_device.new_empty(size) for _, size in spans]
        if self.to_device is not None:
            self.to_device.wait_event(after)
        with self._on(self.to_device):
            for tensor, (start, _) in zip(tensors, spans, strict=True):
                _copy(tensor, block, start, is_store=False)
        if self.to_device is None:
            return tensors, None
        event = self.to_device.record_event()
        self.arriving[event] = tensors
        return tensors, event

    def wait(self, event: Any) -> None:
        """Let the work that is queued on the device from now on wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
            self.arriving.pop(event, None)

    @contextmanager
    def _on(self, stream: Any, other: Any = None) -> Iterator[None]:
        """Queue the body's copies after the compute stream and the other stream so far."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if other is not None:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield


def _copy(tensor: Tensor, block: PageBlock, start: int, is_store: bool) -> None:
    done = 0
    for span in block.spans(start, len(tensor)):
        part = tensor[done : done + len(span)]
        target, source = (span, part) if is_store else (part, span)
        target.copy_(source, non_blocking=True)
        done += len(span)


class CopyStream:
    """Stream of copies to the device while it computes. On the CPU nothing is copied."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, _new_stream(device)

    @contextmanager
    def copying(self) -> Iterator["Copies"]:
        """Queue copies on this stream."""
        copies = Copies(self.device)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield copies
        copies.copied = self.stream.record_event() if self.stream else None


class Copies:
    """Tensors on their way to the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.tensors: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def move(self, tensor: Tensor) -> Tensor:
        """Send a tensor to the device."""
        self.tensors.append(to_device(tensor, self.device))
        return self.tensors[-1]

    def arrive(self) -> None:
        """Let the device wait for the copies; the host does not wait."""
        if self.copied is None:
            return
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_event(self.copied)
        for tensor in self.tensors:
            # The memory belongs to the copy stream. Without this, the next copy could overwrite it
            # before the compute stream has used it.
            tensor.record_stream(compute_stream)


class DeferredFigures:
    """Figures that the device computes. The host reads them at first use, or with others when it
    waits for the device anyway."""

    def __init__(self, on_device: Tensor):
        self.on_device = on_device.double().flatten()

    @cached_property
    def values(self) -> list[float]:
        values: list[float] = self.on_device.tolist()
        return values


def read_together(figures: Sequence[DeferredFigures]) -> None:
    """Read all of these figures in one copy."""
    joined = DeferredFigures(torch.cat([each.on_device for each in figures])).values
    for each in reversed(figures):
        each.values = [joined.pop() for _ in range(len(each.on_device))][::-1]


class HostStream:
    """A stream of copies between host and device, in their order."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, _new_stream(device)

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
