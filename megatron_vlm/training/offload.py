"""Main weights and moments in host memory, where they are updated too: `optim.offload`.

A step goes over buckets of weights. The gradients of a bucket are copied to the host while the one
before is updated there, and its new weights are copied back behind the next one. Everything before
that, such as the norm of the gradients and their clipping, remains work of the device.

Megatron has an optimizer for this (HybridDeviceOptimizer in 0.16.1). It is not used because it
keeps the main weights on the device, unless Transformer Engine's AdamW is there, because it does
nothing on a CPU, and because it has pinned memory for all gradients.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vlm.config.optimizer_spec import OFFLOAD_BUCKET, OptimizerSpec
from megatron_vlm.distributed.host_copies import Copied, HostStream, pinned_memory
from megatron_vlm.training import optimizer_step
from megatron_vlm.training.adamw import Kernel, RangedAdamW


class MainsWithoutMemory(TorchDispatchMode):
    """Lets Megatron make its fp32 main weights of bf16 ones without memory for their values. All of
    them at once would not fit where only a part of them shall be on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            # One value with strides of 0: nobody may write to it before it gets its own memory.
            return args[0].new_empty((), dtype=kwargs["dtype"]).expand(args[0].shape)
        return func(*args, **kwargs)


def choose_offloaded(
    weights: Sequence[optimizer_step.MainWeight], fraction: float
) -> list[optimizer_step.MainWeight]:
    """Return some that have at least this fraction of all values, and hardly more: the largest that
    fit, and at last the smallest that is left. Two stages treat a weight that both have alike."""
    if fraction == 1:
        return list(weights)
    left = fraction * sum(each.main.numel() for each in weights)
    rest, chosen = [], []
    for weight in sorted(weights, key=lambda each: -each.main.numel()):
        if _is_tied(weight.param) or weight.main.numel() > left:
            rest.append(weight)
        else:
            chosen.append(weight)
            left -= weight.main.numel()
    return chosen + [each for each in rest if not _is_tied(each.param)][-1:] * (left > 0)


def _is_tied(param: nn.Parameter) -> bool:
    return getattr(param, "shared_embedding", False)


def offload_optimizer(
    optimizer: MegatronOptimizer,
    params: Collection[nn.Parameter],
    fraction: float,
    spec: OptimizerSpec,
    kernel: Kernel | None,
) -> None:
    """Move this fraction of the main weights and moments of an optimizer that was built with
    MainsWithoutMemory to the host. The other main weights get their values here."""
    for chained in optimizer.chained_optimizers:
        if chained.is_stub_optimizer:
            continue
        weights = list(optimizer_step.main_weights_of(chained, params))
        offloaded = choose_offloaded(weights, fraction)
        mains = {each.main for each in offloaded}
        rounded = [
            each for each in weights if each.main not in mains and each.param.dtype != torch.float32
        ]
        for each in rounded:
            each.main.data = each.model_part.float().view_as(each.main)
        kept = [each for each in weights if each.main not in mains]
        chained.optimizer = OffloadedAdamW(chained.optimizer, kept, offloaded, spec, kernel)
        # Megatron would copy all main weights to the model. The step copies the host's, and a
        # kernel writes its own.
        copied = [] if kernel else rounded
        chained._copy_main_params_to_model_params = partial(optimizer_step.copy_to_model, copied)


class OffloadedAdamW(optimizer_step.SplitOptimizer):
    """AdamW over weights on the device and weights on the host."""

    def __init__(
        self,
        megatrons: torch.optim.Optimizer,
        kept: Sequence[optimizer_step.MainWeight],
        offloaded: Sequence[optimizer_step.MainWeight],
        spec: OptimizerSpec,
        kernel: Kernel | None,
    ):
        """Divide the parameters of Megatron's optimizer into those that the device keeps, which a
        kernel may update, and those that are offloaded."""
        groups: list[dict[str, Any]] = megatrons.param_groups
        on_device = optimizer_step.groups_with(groups, {each.main: each.main for each in kept})
        device: torch.optim.Optimizer = megatrons
        if spec.states == "fp32" and kernel is None:
            megatrons.param_groups = on_device
        else:
            device = optimizer_step.ranged_adamw(on_device, kept, spec, kernel)
        # These fp32 copies are not pinned: what the device copies goes through other memory.
        values = {
            each.main: torch.empty(each.main.numel()).copy_(each.model_part) for each in offloaded
        }
        host_starts = {values[each.main]: each.start for each in offloaded}
        self.host = RangedAdamW(optimizer_step.groups_with(groups, values), spec, host_starts)
        super().__init__(groups, (device, self.host), values)
        group_of = {each: group for group in self.host.param_groups for each in group["params"]}
        ranges = [
            _Range(each, values[each.main], group_of[values[each.main]], start)
            for each in offloaded
            for start in range(0, each.main.numel(), OFFLOAD_BUCKET)
        ]
        self.transfers = _Transfers(ranges) if ranges else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients."""
        assert closure is None
        self.share_settings()
        self.members[0].step()  # on a GPU this is only queued
        self.host.count_step()
        if self.transfers is not None:
            for part, grads in self.transfers.exchange():
                self.host.update(part.values, part.group, part.start, grads)


@dataclass(frozen=True)
class _Range:
    """Neighbouring values of an offloaded weight, at most OFFLOAD_BUCKET."""

    weight: optimizer_step.MainWeight
    values: Tensor  # the whole main weight, flat, on the host
    group: dict[str, Any]
    start: int

    @property
    def size(self) -> int:
        return min(OFFLOAD_BUCKET, len(self.values) - self.start)

    def of(self, whole: Tensor) -> Tensor:
        """Return these values of a whole tensor."""
        return whole.view(-1)[self.start : self.start + self.size]

    @property
    def grads(self) -> Tensor | None:
        """The gradients on the device, after clipping."""
        grads = self.weight.main.grad
        return None if grads is None else self.of(grads)


class _Transfers:
    """Gradients to the host and weights to the device, in buckets. Two of each are in progress."""

    def __init__(self, ranges: Sequence[_Range]):
        device = ranges[0].weight.param.device
        self.stream = HostStream(device)
        self.buckets: list[list[_Range]] = [[]]
        for each in ranges:
            if _size(self.buckets[-1]) + each.size > OFFLOAD_BUCKET:
                self.buckets.append([])
            self.buckets[-1].append(each)
        size = max(map(_size, self.buckets))
        most = {
            dtype: max(_size(_of_dtype(bucket, dtype)) for bucket in self.buckets)
            for dtype in {each.weight.param.dtype for each in ranges}
        }
        self.grads = [pinned_memory(size, torch.float32, device) for _ in range(2)]
        self.weights = [
            {dtype: pinned_memory(count, dtype, device) for dtype, count in most.items()}
            for _ in range(2)
        ]

    def exchange(self) -> Iterator[tuple[_Range, Tensor]]:
        """Yield each range with its gradients, and send the weights of a bucket after it."""
        self.stream.follow()  # clipping is queued on the device, and may not be done yet
        arriving = self._fetch(0)
        sent: list[Copied] = [None, None]
        for number, bucket in enumerate(self.buckets):
            self.stream.wait(arriving)
            # Into the memory of bucket `number - 1`: its ranges were used before we came back here.
            if number + 1 < len(self.buckets):
                arriving = self._fetch(number + 1)
            for each, grads in _with_slices(bucket, self.grads[number % 2]):
                if each.grads is not None:
                    yield each, grads
            self.stream.wait(sent[number % 2])  # The next weights need its memory.
            sent[number % 2] = self._send(number)
        self.stream.join()  # the next forward must not read weights that are on their way

    def _fetch(self, number: int) -> Copied:
        """Let the gradients of a bucket be copied to the host."""
        staged = _with_slices(self.buckets[number], self.grads[number % 2])
        return self.stream.copy(
            [(place, each.grads) for each, place in staged if each.grads is not None]
        )

    def _send(self, number: int) -> Copied:
        """Let the weights of a bucket be copied to the device, in the type of the model."""
        pairs = []
        for dtype, memory in self.weights[number % 2].items():
            for each, place in _with_slices(_of_dtype(self.buckets[number], dtype), memory):
                pairs.append((each.of(each.weight.model_part), place.copy_(each.of(each.values))))
        return self.stream.copy(pairs)


def _of_dtype(bucket: Sequence[_Range], dtype: torch.dtype) -> list[_Range]:
    return [each for each in bucket if each.weight.param.dtype == dtype]


def _size(bucket: Sequence[_Range]) -> int:
    return sum(each.size for each in bucket)


def _with_slices(bucket: Sequence[_Range], memory: Tensor) -> Iterator[tuple[_Range, Tensor]]:
    """Yield each range with its place in this memory."""
    start = 0
    for each in bucket:
        yield each, memory[start : start + each.size]
        start += each.size
