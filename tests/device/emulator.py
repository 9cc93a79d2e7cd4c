"""A CUDA device emulated on the CPU. Tensors compute with real values, and each storage carries a
mark that says in which memory it would lie. An operation that would fail or wait on a GPU becomes a
finding with its place in our code: operations that mix host and device, host tensors in
collectives, streams that do not wait for each other, and host syncs, where the host waits until the
device has finished its work.

    with emulated() as findings:
        ...  # uses torch.device("cuda", 0)
    assert not [each for each in findings.all if each.kind is Kind.mixed]

A function mode replaces the decisions that torch makes by a tensor's device. A dispatch mode sees
each operation, also in the backward pass. The emulator is stricter than CUDA: a copy from memory
that is not pinned counts as a sync, however small it is. It sees neither the work of compiled or
external kernels (torch.compile runs eagerly here, and there is no Transformer Engine) nor time.
"""

import contextlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_vlm.distributed.cuda_stand_in import answer_cuda_calls
from megatron_vlm.hf.block_weight import BlockCodes, BlockWeight
from tests.device.findings import Findings, Kind
from tests.device.streams import Event, Stream, Streams
from tests.support import varlen

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Place(StrEnum):
    """The memory in which a storage would lie."""

    host = "host"
    pinned = "pinned"
    device = "device"


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor, one object for all of its tensors, which carries marks. A
    weight in blocks lies where its codes do."""
    if isinstance(tensor, BlockWeight):
        tensor = tensor.codes.codes_K
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def place_of(tensor: Tensor) -> Place:
    return getattr(storage_of(tensor), "emulated_place", Place.host)


def put(tensor: Tensor, place: Place) -> Tensor:
    """Mark the memory in which a tensor lies."""
    storage_of(tensor).emulated_place = place
    return tensor


def on_device(tensor: Tensor) -> bool:
    return place_of(tensor) is Place.device


# These methods of Tensor read its values or its memory without a call of the dispatcher.
_READ = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
# These functions take only the shape of their tensor, not its values.
_SHAPED = ("_like", "new_empty", "new_zeros", "new_ones", "new_full")


class _DeviceApi(TorchFunctionMode):
    """Tensors and functions of torch as they behave where a device exists."""

    def __init__(self, findings: Findings, streams: Streams) -> None:
        super().__init__()
        self.findings, self.streams = findings, streams
        self.answers: dict[Any, Callable[..., Any]] = {
            Tensor.is_pinned: lambda t, *_: place_of(t) is Place.pinned,
            Tensor.pin_memory: self._pin,
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
            for value in tree_iter(args):
                if isinstance(value, Tensor) and on_device(value):
                    self.findings.add(Kind.sync, "item, by torch.tensor")
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        return self._made_on(_device(kwargs.pop("device")), func, args, kwargs)

    def _made_on(self, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that has a `device` argument, and mark its result."""
        result = func(*args, device=CPU, **kwargs)
        if not isinstance(result, Tensor):
            return result
        name = getattr(func, "__name__", "")
        is_shape = name.endswith(_SHAPED)
        if device.type == "cuda" and args and not is_shape:
            from_host = isinstance(args[0], Tensor) and not on_device(args[0])
            if name in ("tensor", "as_tensor", "new_tensor") or from_host:
                self.findings.add(Kind.sync, f"{name}(..., device=cuda)")
        return put(result, Place.device if device.type == "cuda" else Place.host)

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        assert not on_device(tensor), "only memory of the host can be pinned"
        return tensor if place_of(tensor) is Place.pinned else put(tensor.clone(), Place.pinned)

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        type_name = tensor.type(*args, **kwargs)
        if isinstance(type_name, str) and on_device(tensor):
            return type_name.replace("torch.", "torch.cuda.", 1)
        return type_name

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Move a tensor as Tensor.to does. Its target is a device, a dtype, both or a tensor."""
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
        if going:
            self.streams.made(storage_of(moved))
        return put(moved, Place.device if going else Place.host)

    def copied(
        self, source: Tensor, to_device: bool, non_blocking: bool, target: Tensor | None = None
    ) -> None:
        """Record a copy between host and device. That of an empty tensor does not wait."""
        if not source.numel():
            return
        if not to_device:
            if target is None or place_of(target) is not Place.pinned or not non_blocking:
                self.findings.add(Kind.sync, "copy to the host")
            else:
                self.findings.to_host += source.nbytes
        elif not non_blocking or place_of(source) is not Place.pinned:
            memory = "pinned" if place_of(source) is Place.pinned else "pageable"
            self.findings.add(Kind.sync, f"copy from {memory} memory, {non_blocking=}")


def _device(said: Any) -> torch.device:
    return torch.device("cuda", said) if isinstance(said, int) else torch.device(said)


# The number of results of these operations depends on values, so the host must wait for it.
_COUNTING = ("nonzero", "masked_select", "_unique", "unique_", "is_nonzero", "equal", "bincount")


class _Kernels(TorchDispatchMode):
    """Operations as it would run on the device."""

    def __init__(self, findings: Findings, api: _DeviceApi) -> None:
        super().__init__()
        self.findings, self.api = findings, api

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        places = [place_of(t) for t in tensors]
        with torch._C.DisableTorchFunction():
            if func.namespace == "c10d":
                self._check_collective(func, args, tensors, places)
                return func(*args, **kwargs)
            if Place.device not in places:
                return func(*args, **kwargs)
            for tensor, place in zip(tensors, places, strict=True):
                if place is Place.device:
                    self.api.streams.used(tensor.untyped_storage())
            self._check(func, args, kwargs, tensors)
            results = func(*args, **kwargs)
        input_storages = {id(t.untyped_storage()) for t in tensors}
        for tensor in tree_iter(results):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in input_storages:
                put(tensor, Place.device)
                self.api.streams.written(tensor.untyped_storage())
        return results

    def _check_collective(
        self, func: Any, args: Any, given: list[Tensor], places: list[Place]
    ) -> None:
        groups = [
            arg for arg in args if str(getattr(arg, "_type", str)()).endswith(".ProcessGroup")
        ]
        hosts_meet = any(
            c10d.ProcessGroup.unbox(each).group_desc.endswith("HOST_GROUP") for each in groups
        )
        wrong = [
            t for t, at in zip(given, places, strict=True) if (at is Place.device) is hosts_meet
        ]
        if any(t.numel() for t in wrong) and "barrier" not in func._opname:
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
                self.api.copied(source, on_device(to), non_blocking, to)
                self.api.streams.used(storage_of(source))
                self.api.streams.written(storage_of(to))
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
    """A generator that accepts any device."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


def _add_product(total: Tensor, a: Tensor, b: Tensor, dtype: Any, *, out: Tensor) -> Tensor:
    """Add a product of bf16 matrices to an fp32 tensor, as an operation of CUDA does."""
    assert total is out and out.dtype is dtype is torch.float32
    return out.add_(a.float() @ b.float())


@cache
def _register_kernels() -> None:
    """Register the operations that torch has for CUDA alone. This runs once in a process."""
    varlen.register()
    torch.library.register_kernel("aten::addmm.dtype_out", "cpu", _add_product)


@contextlib.contextmanager
def emulated() -> Iterator[Findings]:
    """Emulate a CUDA device within the block. The replacements in torch are permanent: use a
    separate process, in which the stand-in for CUDA was never installed."""
    findings = Findings()
    streams = Streams(findings)
    api = _DeviceApi(findings, streams)
    _replace_cuda(findings, streams)
    _replace_attributes(streams)
    _register_kernels()
    torch.compiler.set_stance("force_eager")

    run_backward = torch.autograd._engine_run_backward

    def with_device(*args: Any, **kwargs: Any) -> Any:
        # torch disables a mode while the mode's handler runs, for example during `backward`, which
        # runs hooks, and in the handlers of a weight in blocks.
        inside = torch._C._len_torch_function_stack() > 0
        with contextlib.nullcontext() if inside else api:
            return run_backward(*args, **kwargs)

    _replace(torch.autograd, _engine_run_backward=with_device)
    decode = BlockCodes.decode

    def decode_on_device(codes: BlockCodes, dtype: torch.dtype) -> Tensor:
        with torch._C._EnableTorchFunction(), api:
            return decode(codes, dtype)

    _replace(BlockCodes, decode=decode_on_device)
    with api, _Kernels(findings, api):
        yield findings


def _replace_cuda(findings: Findings, streams: Streams) -> None:
    """Replace the functions of a device and those of the collectives that use one."""
    answer_cuda_calls()

    def wait(*_: Any) -> None:
        findings.add(Kind.sync, "synchronize")

    _replace(Stream, synchronize=wait)
    _replace(Event, synchronize=wait)
    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=streams.within,
        current_stream=lambda *_: streams.current,
        default_stream=lambda *_: streams.default,
        synchronize=wait,
        current_device=lambda: CUDA,
        memory_allocated=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        memory_stats=lambda *_: {"allocated_bytes.all.peak": 79 * 2**30},
        device=lambda _: contextlib.nullcontext(),
        get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: "an emulated device",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=80 * 2**30),
    )
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices).items()
        return {(lists[0][0].device, dtype): of_dtype for (_, dtype), of_dtype in found}

    _replace(torch.optim.Optimizer, _group_tensors_by_device_and_dtype=staticmethod(grouped))
    # As with NCCL, a collective puts the tensors that it creates on the device.
    _replace(
        c10d,
        _get_object_coll_device=lambda group=None: CUDA,
        _get_pg_default_device=lambda group=None: CUDA,
    )
    _replace(c10d.Work, wait=lambda work, *args: findings.wait(work, *args))


def _replace_attributes(streams: Streams) -> None:
    """Replace attributes of tensors, also where no mode is active, as in a handler."""
    _replace(torch, Generator=_Generator)
    _replace(
        Tensor,
        device=property(lambda t: CUDA if on_device(t) else CPU),
        is_cuda=property(on_device),
        is_cpu=property(lambda t: not on_device(t)),
        get_device=lambda t: 0 if on_device(t) else -1,
        record_stream=lambda t, stream: streams.kept_for(stream, storage_of(t)),
    )


def _replace(owner: Any, **new: Any) -> None:
    for name, value in new.items():
        setattr(owner, name, value)
