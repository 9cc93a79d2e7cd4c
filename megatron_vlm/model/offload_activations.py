"""Activations on the host: what decoder layers keep for the backward lies in the memory of the host
between forward and backward (`model.offload_activations`).

Hooks of autograd take each tensor that a layer saves. At the end of the layer its tensors are
copied while the next layer computes, and the device forgets them at the end of that one. In the
backward, the tensors of a layer are requested one layer ahead. Autograd frees what it no longer
needs, and with it the copies: no order of micro-batches, chunks or layers is assumed.

A storage is copied whole and once, with all views of it that are saved, which is also how it would
occupy the device.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vlm.distributed.dims import count_offloaded
from megatron_vlm.distributed.host_copies import HostCopies, PageBlock

SMALLEST = 2**14  # bytes; smaller storages stay on the device


class _Layer:
    """Storages that a layer of one pass was the first to save."""

    def __init__(self, offload: "ActivationOffload", before: "_Layer | None"):
        self.offload, self.before = offload, before
        self.stored: list[weakref.ref[_Stored]] = []
        self.copied: Any = None  # event after the copies to the host
        self.arrived: Any = None  # event after the copies back
        self.is_requested = self.is_fetched = False

    def store(self) -> list[Tensor]:
        """Begin to copy the storages to the host, and return them."""
        stored = self._alive()
        tensors = [each.on_device for each in stored if each.on_device is not None]
        block, self.copied = self.offload.copies.store(tensors)
        start = 0
        for each in stored:
            each.block, each.start = block, start
            start += each.size
        return tensors

    def forget(self) -> None:
        """Free the storages on the device, which waits for the end of the copies first."""
        self.offload.copies.wait(self.copied)
        for each in self._alive():
            each.on_device = None

    def request(self) -> None:
        """Begin to copy the storages back, unless they are on the device."""
        missing = [] if self.is_requested else self._alive()
        missing = [each for each in missing if each.on_device is None]
        if not missing:
            return
        block = missing[0].block
        assert block is not None
        spans = [(each.start, each.size) for each in missing]
        tensors, self.arrived = self.offload.copies.load(block, spans, self.copied)
        for each, tensor in zip(missing, tensors, strict=True):
            each.on_device = tensor
        self.is_requested = True

    def fetch(self) -> None:
        """Let the device have the storages, and request the layer's before it, at the first
        tensor that the layer's backward needs."""
        if self.is_fetched:
            return
        self.is_fetched = True
        self.request()
        self.offload.keep(self)
        self.offload.copies.wait(self.arrived)
        if self.before is not None:
            self.before.request()

    def _alive(self) -> "list[_Stored]":
        stored = (each() for each in self.stored)
        return [each for each in stored if each is not None]


class _Stored:
    """A storage as bytes, on device, host, or both, while autograd keeps a tensor of it."""

    def __init__(self, tensor: Tensor, layer: _Layer):
        storage = tensor.untyped_storage()
        self.layer, self.size = layer, storage.nbytes()
        flat = tensor.detach().new_empty(0, dtype=torch.uint8)
        self.on_device: Tensor | None = flat.set_(storage)
        self.block: PageBlock | None = None
        self.start = 0


class _Saved:
    """A tensor that autograd keeps: a view of a storage."""

    def __init__(self, tensor: Tensor, stored: _Stored):
        self.stored, self.dtype = stored, tensor.dtype
        self.view = tensor.storage_offset(), tensor.size(), tensor.stride()


class ActivationOffload:
    """Offloading for all chunks of a stage."""

    def __init__(self, share: float, device: torch.device):
        self.share, self.copies = share, HostCopies(device)
        # The layer that is being copied to the host, with its storages.
        self.leaving: tuple[_Layer, list[Tensor]] | None = None
        self.open_pass: OffloadPass | None = None

    def watch(self, decoder: Any, is_fused: bool) -> None:
        """Register what the layers of a chunk need. `is_fused`: the backward of Megatron's linears
        adds to the gradients of weights itself. It also marks the parameter, and tensors that were
        saved through hooks have no marks. So the hooks see only the input of such a linear."""
        if decoder.final_layernorm is not None:
            decoder.final_layernorm.register_forward_pre_hook(self._end_layers)
        for linear in decoder.layers.modules() if is_fused else ():
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                linear.register_forward_pre_hook(self._pause)
                linear.register_forward_hook(self._take_input, always_call=True)

    def _end_layers(self, *_: Any) -> None:
        """End the last layer of the pass: what follows is not offloaded."""
        if self.open_pass is not None:
            self.open_pass.end_layer()

    def _pause(self, *_: Any) -> None:
        if self.open_pass is not None:
            self.open_pass.hooks.__exit__()

    def _take_input(self, linear: nn.Module, args: Any, outputs: Any) -> None:
        """Offload the input of a linear, the first tensor that its backward needs."""
        if self.open_pass is None:
            return
        self.open_pass.hooks.__enter__()
        node = None if outputs is None else outputs[0].grad_fn  # None after an error
        while node is not None and not hasattr(node, "main_grad"):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            self.open_pass.take(node._raw_saved_tensors[0])

    def leave(self, layer: _Layer | None) -> None:
        """Free the storages of the layer that left before, and begin to copy this layer's."""
        if self.leaving is not None:
            self.leaving[0].forget()
        self.leaving = None if layer is None else (layer, layer.store())

    def keep(self, layer: _Layer) -> None:
        """Leave the storages of a layer on the device if its backward begins already."""
        if self.leaving is not None and self.leaving[0] is layer:
            self.copies.wait(layer.copied)  # their memory may be used again from now on
            self.leaving = None


class OffloadPass:
    """Forward of one micro-batch through the layers of one chunk. The storages of tensors that are
    `staying` on the device anyway are not copied."""

    def __init__(
        self, offload: ActivationOffload, layers: Sequence[nn.Module], staying: Sequence[Tensor]
    ):
        self.offload = offload
        self.offloaded = set(layers[: count_offloaded(offload.share, len(layers))])
        self.hooks = saved_tensors_hooks(self._pack, _unpack)
        self.staying = _addresses(staying)
        self.layer: _Layer | None = None  # the layer that saves; None: its tensors stay
        self.before: _Layer | None = None
        self.is_in_layer = False
        self.own: set[int] = set()  # addresses of storages that are not copied
        # A storage has one entry. The references keep its address from being used again.
        self.stored: dict[tuple[StorageWeakRef, int], weakref.ref[_Stored]] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take the tensors that are saved in the body."""
        self.offload.open_pass = self
        try:
            with self.hooks:
                yield
            self.end_layer()
        finally:
            self.layer = self.offload.open_pass = None

    def begin_layer(self, layer: nn.Module) -> None:
        """Take what is saved from now on as that of this layer. Recomputed layers save their input
        after their forward, so a layer ends where the next one begins. Layers that are recomputed
        in the backward are outside of `saving`."""
        if self.offload.open_pass is not self:
            return
        self.end_layer()
        self.is_in_layer = True
        if layer in self.offloaded:
            self.layer = _Layer(self.offload, self.before)
            self.own = self.staying | _addresses([*layer.parameters(), *layer.buffers()])

    def end_layer(self) -> None:
        """Begin to copy what the layer has saved."""
        if self.is_in_layer:
            self.offload.leave(self.layer)
            self.before = self.layer or self.before
        self.layer, self.is_in_layer = None, False

    def take(self, saved: Any) -> None:
        """Take a tensor that was saved while the hooks were paused."""
        saved.register_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        layer = self.layer
        if layer is None or not self._is_taken(tensor):
            # The graph of an output that is saved as it is would keep itself alive.
            return tensor.detach()
        storage = tensor.untyped_storage()
        # With the version: bytes that were overwritten between two saves are other bytes.
        key = StorageWeakRef(storage), tensor._version
        stored = self.stored[key]() if key in self.stored else None
        if stored is None:
            stored = _Stored(tensor, layer)
            layer.stored.append(weakref.ref(stored))
            self.stored[key] = weakref.ref(stored)
        return _Saved(tensor, stored)

    def _is_taken(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False  # a quantised weight, for example
        storage = tensor.untyped_storage()
        is_here = tensor.device.type == self.offload.copies.device.type
        return is_here and storage.nbytes() >= SMALLEST and storage.data_ptr() not in self.own


def _unpack(saved: Any) -> Tensor:
    """Return what autograd keeps, on the device."""
    if not isinstance(saved, _Saved):
        return saved
    saved.stored.layer.fetch()
    flat = saved.stored.on_device
    assert flat is not None
    return flat.new_empty(0, dtype=saved.dtype).set_(flat.untyped_storage(), *saved.view)


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}
