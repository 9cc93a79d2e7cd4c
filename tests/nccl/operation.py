"""Operation of a rank: a collective, a send, a receive, or a batch of them.

Its results arrive at `wait`. Until then its outputs are NaN, so code that does not wait computes
NaN. Code that writes to its inputs or outputs meanwhile is reported.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._python_dispatch as dispatch
from torch import Tensor

from tests.nccl.link import BrokenRuleError, Link, place

# As getNcclDataType of torch's NCCLUtils.cpp.
_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.bfloat16),
    *(torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn),
}

_NAN = {
    torch.float64: (torch.int64, 0x7FF4 << 48),
    torch.float32: (torch.int32, 0x7FA00000),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float16: (torch.int16, 0x7D00),
}


class RefusedError(RuntimeError):
    """Refusal of ProcessGroupNCCL on one rank alone, before anything is sent."""


def check_tensor(tensor: Tensor, name: str) -> None:
    if tensor.is_sparse:
        raise RefusedError(f"{name}: tensors must be dense")
    if not tensor.is_contiguous():
        shape = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        raise RefusedError(f"{name}: tensors must be contiguous, not {shape}")
    if tensor.dtype not in _TYPES:
        raise RefusedError(f"{name}: unconvertible NCCL type {tensor.dtype}")


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the operations of the emulator from modes of torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return call


class Operation:
    """An operation with `move`, which moves the data: it is called with copies of the inputs,
    buffers of the outputs and a tag. `keeps` says that inputs are parts of the outputs, which stay
    readable."""

    id = 0

    @unseen
    def __init__(
        self,
        link: Link,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        move: Callable[[list[Tensor], list[Tensor], int], Any],
        is_async: bool = True,
        keeps: bool = False,
    ) -> None:
        for tensor in (*inputs, *outputs):
            check_tensor(tensor, name)
        self.link, self.name, self.is_async, self.where = link, name, is_async, place()
        self.finished, self.has_landed = threading.Event(), False
        self.is_awaited = False  # also by a wait that a signal has ended
        self.error: Exception | None = None
        self.signature: list[Any] = []
        self.transfers: list[list[Any]] = []
        # A tensor may receive other memory meanwhile: Megatron gives sent outputs back.
        memories = [tensor.detach().data for tensor in (*inputs, *outputs)]
        sources = [memory.clone() for memory in memories[: len(inputs)]]
        targets = memories[len(inputs) :]
        buffers = [torch.empty_like(target) for target in targets]
        self.results = list(zip(targets, buffers, strict=True))
        self.moves = [lambda tag: move(sources, buffers, tag)]
        self.guarded: list[tuple[Tensor, Tensor]] = []
        if is_async:
            for target in targets:
                _poison(target)
            for memory, source in zip(memories, sources, strict=False):
                if keeps:
                    memory.copy_(source)
            self.guarded = [(memory, memory.clone()) for memory in memories]

    def absorb(self, others: Sequence["Operation"]) -> None:
        """Become the batch of this operation and the others."""
        parts = [self, *others]
        self.signature = [each for part in parts for each in (part.name, part.signature)]
        for part in others:
            self.transfers += part.transfers
            self.results += part.results
            self.guarded += part.guarded
            self.moves += part.moves
        if not self.transfers:  # collectives run one after the other
            moves = self.moves
            self.moves = [lambda tag: [move(tag) for move in moves]]
        self.name = f"batch of {len(parts)}"

    def run(self, index: int, tag: int) -> None:
        try:
            self.moves[index](tag)
        except Exception as error:
            self.error = error
        self.link.tell("done", id=self.id, index=index)

    def wait(self) -> None:
        self.is_awaited = True
        if not self.finished.is_set():
            is_main = threading.current_thread() is threading.main_thread()
            if is_main:
                here = place()
                where = f"waits for {self.name} at {self.where}"
                where += f", in {here}" * (here != self.where)
                self.link.tell("block", id=self.id, where=where)
            self.finished.wait()
            if is_main:
                self.link.tell("unblock")
        if not self.has_landed:
            self._land()

    @unseen
    def _land(self) -> None:
        self.has_landed = True
        if self.link is not None and self.link.verdict is not None:
            raise BrokenRuleError(self.link.verdict)
        if self.error is not None:
            raise self.error
        if not all(_is_same(memory, content) for memory, content in self.guarded):
            self.link.tell(
                "remark",
                text=f"WRITTEN IN FLIGHT: an input or output of {self.name} at {self.where} "
                f"changed before its wait in {place()}",
            )
        for output, buffer in self.results:
            output.copy_(buffer)
        self.guarded, self.results, self.moves = [], [], []


class Handle(dist.Work):
    """Handle that torch returns for an operation."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.operation.wait()
        return True

    def __del__(self) -> None:
        """Report that nothing can wait any more. At the end of the groups some may be in flight."""
        operation, link = self.operation, self.operation.link
        if operation.is_awaited or sys.is_finalizing() or link.verdict or link.is_leaving:
            return
        text = f"NO WAIT: nothing waits for {operation.name} at {operation.where}"
        link.tell("remark", text=text)

    def synchronize(self) -> None:
        self.operation.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self.operation.finished.is_set()

    def is_success(self) -> bool:
        return self.operation.error is None

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        self.operation.wait()
        future.set_result(None)
        return future


def _poison(data: Tensor) -> None:
    """Fill with NaN. It is a signalling one, which each arithmetic operation in place changes."""
    if data.dtype in _NAN:
        integers, value = _NAN[data.dtype]
        data.view(integers).fill_(value)
    elif data.is_floating_point():
        data.fill_(torch.nan)
    else:
        data.fill_(True if data.dtype is torch.bool else torch.iinfo(data.dtype).max)


def _is_same(memory: Tensor, content: Tensor) -> bool:
    if memory.untyped_storage().nbytes() == 0:
        return True  # its owner has given the memory back
    a, b = (each.reshape(-1).view(torch.uint8) for each in (memory, content))
    return torch.equal(a, b)
