"""A CUDA device emulated on the CPU: tensors compute with real values, and each storage carries a
mark of where it would lie. What would fail or wait on a GPU becomes a finding, with its place in
our code: operations that mix host and device, host tensors in collectives, and host syncs, where
the host waits until the device has done what it was given.

    with emulated() as findings:
        ...  # uses torch.device("cuda", 0)
    findings.of(Kind.sync, Phase.forward)

A function mode stands for what torch decides by a tensor's device; a dispatch mode sees each
operation, also those of the backward pass. Stricter than CUDA: a copy from memory that is not
pinned counts as a sync, however small. Not seen: what compiled or external kernels do
(torch.compile runs eagerly here, there is no Transformer Engine), the order of streams, and time.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_vlm.distributed.cpu_stand_in import answer_cuda_calls

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
HERE = Path(__file__)
ROOT = HERE.parents[2]
_WAIT = torch.distributed.Work.wait


class Place(StrEnum):
    """Where a storage would lie."""

    host = "host"
    pinned = "pinned"
    device = "device"


class Kind(StrEnum):
    sync = "sync"
    mixed = "mixed devices"
    collective = "host tensor in a collective"


class Phase(StrEnum):
    """What a step was doing, by the functions on the stack."""

    forward = "forward"  # of a micro-batch
    backward = "backward"
    exchange = "exchange"  # between pipeline stages
    optimizer = "optimizer"
    step = "step"  # once for all micro-batches of a step
    other = "other"


# The innermost function on the stack that is listed decides. (file, function): phase.
_PHASES = {
    ("step/arrival.py", "arrivals"): Phase.forward,
    ("pipeline_parallel/schedules.py", "forward_step"): Phase.forward,
    ("pipeline_parallel/schedules.py", "backward_step"): Phase.backward,
    ("pipeline_parallel/p2p_communication.py", "_communicate"): Phase.exchange,
    ("step/optimizer.py", "finalize_grads"): Phase.step,
    ("megatron_vlm/worker.py", "optim_step"): Phase.optimizer,
    ("megatron_vlm/worker.py", "forward_backward"): Phase.step,
}


@dataclass(frozen=True)
class Finding:
    kind: Kind
    phase: Phase
    what: str
    where: str  # file:line of ours, below it the library's that it called

    def __str__(self) -> str:
        return f"{self.kind} ({self.phase}): {self.what} at {self.where}"


@dataclass
class Findings:
    """All that was found, in order."""

    all: list[Finding] = field(default_factory=list)
    is_waiting: bool = False  # for gloo, which moves what arrives about on the host

    def add(self, kind: Kind, what: str) -> None:
        if not self.is_waiting:
            phase, where = _look_around()
            self.all.append(Finding(kind, phase, what, where))

    def wait(self, work: Any, *args: Any) -> bool:
        """In place of `Work.wait`."""
        self.is_waiting = True
        try:
            return _WAIT(work, *args)
        finally:
            self.is_waiting = False

    def of(self, kind: Kind, *phases: Phase) -> list[Finding]:
        return [f for f in self.all if f.kind is kind and (not phases or f.phase in phases)]


def _look_around() -> tuple[Phase, str]:
    """The phase, and the nearest line of ours with the library's line that it had called."""
    phase, library, ours = Phase.other, "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (phase is Phase.other or not ours):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        line = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        if phase is Phase.other:
            found = (p for (end, n), p in _PHASES.items() if n == name and file.endswith(end))
            phase = next(found, Phase.other)
        if not ours and file.startswith(str(ROOT)) and file != str(HERE):
            if "site-packages" not in file and "/.venv" not in file:
                ours = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
            elif not library and "/torch/" not in file:
                library = f" (in {line})"
        elif not ours and not library and "site-packages" in file and "/torch/" not in file:
            library = f" (in {line})"
        frame = frame.f_back
    return phase, ours + library


def place_of(tensor: Tensor) -> Place:
    """The mark lies on the storage, which torch keeps as one object for as long as any tensor
    uses it, and dies with it."""
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), "emulated_place", Place.host)


def put(tensor: Tensor, place: Place) -> Tensor:
    """Say where a tensor lies."""
    with torch._C.DisableTorchFunction():
        tensor.untyped_storage().emulated_place = place  # type: ignore[attr-defined]
    return tensor


def on_device(tensor: Tensor) -> bool:
    return place_of(tensor) is Place.device


# Methods of Tensor that answer from its values or its memory, which the dispatcher never hears of.
_READ = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
# They take a shape from their tensor and no values.
_SHAPED = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")


class _DeviceApi(TorchFunctionMode):
    """Tensors and functions of torch as they are where there is a device."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self.findings = findings
        self.answers: dict[Any, Callable[..., Any]] = {
            Tensor.is_pinned: lambda t, *_: place_of(t) is Place.pinned,
            Tensor.pin_memory: self._pin,
            Tensor.record_stream: lambda t, _: None,
            Tensor.type: self._type,
            Tensor.to: self._to,
            Tensor.cpu: lambda t, **_: self._to(t, CPU),
            Tensor.cuda: lambda t, *_, non_blocking=False, **__: self._to(
                t, CUDA, non_blocking=non_blocking
            ),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (answer := self.answers.get(func)) is not None:
            return answer(*args, **kwargs)
        if func in _READ and on_device(args[0]):
            self.findings.add(Kind.sync, _READ[func])
        if func is torch.tensor:
            for given in tree_iter(args):
                if isinstance(given, Tensor) and on_device(given):
                    self.findings.add(Kind.sync, "item, by torch.tensor")
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        return self._made_on(_device(kwargs.pop("device")), func, args, kwargs)

    def _made_on(self, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function with a `device` makes."""
        made = func(*args, device=CPU, **kwargs)
        if not isinstance(made, Tensor):
            return made
        name = getattr(func, "__name__", "")
        is_shape = name.endswith(_SHAPED)
        if device.type == "cuda" and args and not is_shape:
            from_host = isinstance(args[0], Tensor) and not on_device(args[0])
            if name in ("tensor", "as_tensor", "new_tensor") or from_host:
                self.findings.add(Kind.sync, f"{name}(..., device=cuda)")
        return put(made, Place.device if device.type == "cuda" else Place.host)

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        assert not on_device(tensor), "only memory of the host can be pinned"
        return tensor if place_of(tensor) is Place.pinned else put(tensor.clone(), Place.pinned)

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor.type(*args, **kwargs)
        if isinstance(answer, str) and on_device(tensor):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Tensor.to, whose target may be a device, a dtype, both or another tensor."""
        target = kwargs.pop("device", None)
        rest: list[Any] = []
        for value in args:
            if isinstance(value, Tensor):
                target, value = CUDA if on_device(value) else CPU, value.dtype
            if isinstance(value, torch.device | str):
                target = value
            else:
                rest.append(value)
        if rest and isinstance(rest[0], bool):
            kwargs["non_blocking"] = rest.pop(0)
        going = None if target is None else _device(target).type == "cuda"
        if going is None or going == on_device(tensor):
            kwargs.pop("non_blocking", None)
            return tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        self.copied(tensor, going, kwargs.get("non_blocking", False))
        kwargs["copy"] = True
        moved = tensor.to(CPU, *rest, **kwargs)
        return put(moved, Place.device if going else Place.host)

    def copied(self, source: Tensor, to_device: bool, non_blocking: bool) -> None:
        """A copy between host and device; of an empty tensor there is nothing to wait for."""
        if not source.numel():
            return
        if not to_device:
            self.findings.add(Kind.sync, "copy to the host")
        elif not non_blocking or place_of(source) is not Place.pinned:
            memory = "pinned" if place_of(source) is Place.pinned else "pageable"
            self.findings.add(Kind.sync, f"copy from {memory} memory, {non_blocking=}")


def _device(said: Any) -> torch.device:
    return torch.device("cuda", said) if isinstance(said, int) else torch.device(said)


# Operations whose number of results depends on values: the host must wait to know it.
_COUNTING = ("nonzero", "masked_select", "_unique", "unique_", "is_nonzero", "equal", "bincount")


class _Kernels(TorchDispatchMode):
    """Each operation as it would run on the device."""

    def __init__(self, findings: Findings, api: _DeviceApi) -> None:
        super().__init__()
        self.findings, self.api = findings, api

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        places = [place_of(t) for t in given]
        with torch._C.DisableTorchFunction():
            if func.namespace == "c10d":
                self._check_collective(func, given, places)
                return func(*args, **kwargs)
            if Place.device not in places:
                return func(*args, **kwargs)
            self._check(func, args, kwargs, given)
            made = func(*args, **kwargs)
        kept = {id(t.untyped_storage()) for t in given}
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in kept:
                put(tensor, Place.device)
        return made

    def _check_collective(self, func: Any, given: list[Tensor], places: list[Place]) -> None:
        host = [t for t, at in zip(given, places, strict=True) if at is not Place.device]
        if any(t.numel() for t in host) and "barrier" not in func._opname:
            self.findings.add(Kind.collective, str(func))

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
        name = func._opname
        if name == "_local_scalar_dense":
            self.findings.add(Kind.sync, "item, bool, int or float")
        elif name.startswith(_COUNTING) or (
            name == "repeat_interleave" and kwargs.get("output_size") is None
        ):
            self.findings.add(Kind.sync, name)
        elif name == "copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            to, source = args[:2]
            if on_device(to) != on_device(source):
                self.api.copied(source, on_device(to), non_blocking)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            self._check_index(name, args)
        elif any(t.dim() and t.numel() and not on_device(t) for t in given):
            self.findings.add(Kind.mixed, str(func))

    def _check_index(self, name: str, args: Any) -> None:
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        others = [args[0], *(args[2:3])]
        is_fill = len(args) > 2 and args[2].numel() == 1 and not on_device(args[2])
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not is_fill:
            self.findings.add(Kind.sync, f"{name} with a mask")
        if any(not on_device(index) and index.numel() for index in indices):
            self.findings.add(Kind.sync, f"{name} with an index on the host")
        if not all(on_device(t) or not t.dim() for t in others):
            self.findings.add(Kind.mixed, name)


class _Generator(torch.Generator):
    """Of a device, too."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


@contextlib.contextmanager
def emulated() -> Iterator[Findings]:
    """A CUDA device within. What it replaces in torch it does not put back: use a process of its
    own, in which the stand-in for CUDA was never installed."""
    import torch.distributed.distributed_c10d as c10d

    findings, cuda = Findings(), torch.cuda
    answer_cuda_calls()
    replaced: Any = torch
    replaced.Generator = _Generator
    # Also where no mode is active: torch leaves one while it runs what the mode answered with.
    replaced = Tensor
    replaced.device = property(lambda t: CUDA if on_device(t) else CPU)
    replaced.is_cuda = property(on_device)
    replaced.is_cpu = property(lambda t: not on_device(t))
    replaced.get_device = lambda t: 0 if on_device(t) else -1
    replaced = cuda
    replaced.current_device = lambda: CUDA
    replaced.synchronize = lambda *_: findings.add(Kind.sync, "torch.cuda.synchronize")
    replaced.memory_allocated = replaced.max_memory_allocated = lambda *_: 0
    replaced.device = lambda _: contextlib.nullcontext()
    replaced.get_device_capability = lambda *_: (9, 0)
    replaced.get_device_name = lambda *_: "an emulated device"
    # As with NCCL: what becomes a tensor for a collective lies on the device.
    replaced = c10d
    replaced._get_object_coll_device = lambda group=None: CUDA
    replaced._get_pg_default_device = lambda group=None: CUDA
    replaced = c10d.Work
    replaced.wait = lambda work, *args: findings.wait(work, *args)
    torch.compiler.set_stance("force_eager")
    api = _DeviceApi(findings)
    replaced, run_backward = torch.autograd, torch.autograd._engine_run_backward

    def with_device(*args: Any, **kwargs: Any) -> Any:
        # torch leaves a mode while the mode answers, as to `backward`, which runs hooks.
        inside = torch._C._len_torch_function_stack() > 0
        with contextlib.nullcontext() if inside else api:
            return run_backward(*args, **kwargs)

    replaced._engine_run_backward = with_device
    with api, _Kernels(findings, api):
        yield findings
