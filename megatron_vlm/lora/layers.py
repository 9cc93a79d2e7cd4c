"""Adapter layers: small matrices A and B next to a linear layer whose weight does not change, and
their initial values.

Shapes: I inputs and O outputs of the layer on this rank, e experts of this rank, M rows of these
experts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import scale_of
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.family.spec import TensorSpec
from megatron_vlm.hf.expert_layouts import Span, slices_of
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.lora.peft_folder import AdapterFolder
from megatron_vlm.lora.targets import PREFIX, AdaptedLinear, HFLinear, seed_from
from megatron_vlm.model.experts import ExpertLinear, times
from megatron_vlm.model.router import RowCounts


class LowRank(nn.Module):
    """A and B, unset, of one of Hugging Face's linear layers, or of it in each of these experts."""

    def __init__(self, rank: int, inputs: int, outputs: int, like: Tensor, *experts: int):
        super().__init__()
        self.A = nn.Parameter(like.new_empty(*experts, rank, inputs))
        self.B = nn.Parameter(like.new_empty(*experts, outputs, rank))


class Adapters(nn.ModuleDict):
    """Adapters of one of our linear layers, by the slot's name.

    Where the rows of the weight are sharded over TP, A is whole on each rank and B is sharded:
    between them the gradient is summed over the ranks, so that each rank has A's whole gradient.
    Where its columns are sharded, so is A, and A's output is summed in the forward pass; B is
    whole.
    """

    def __init__(
        self, weight: Tensor, plan: AdaptedLinear, lora: LoraConfig, tp: dist.ProcessGroup
    ):
        """Create the adapters. `weight` is this rank's part of the layer's weight."""
        ranks = 1 if plan.shard_axis is None else dist.get_world_size(tp)
        row_ranks = ranks if plan.shard_axis == 0 else 1
        self.rows = [slot.base.shape[0] // row_ranks for slot in plan.slots]
        if len(plan.slots) == 1:
            self.rows = [len(weight)]  # the rows of a vocabulary are padded
        inputs = plan.slots[0].base.shape[1] // (ranks if plan.shard_axis == 1 else 1)
        super().__init__(
            {
                slot.leaf: LowRank(lora.rank, inputs, rows, weight)
                for slot, rows in zip(plan.slots, self.rows, strict=True)
                if slot.adapted
            }
        )
        self.plan, self.tp = plan, tp
        self.slots = [slot for slot in plan.slots if slot.adapted]
        self.groups = plan.groups // ranks if plan.groups > 1 else 1
        self.scale, self.dropout = scale_of(lora), lora.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapters' addition to the output [..., O] for the layer's input [..., I]."""
        low = torch.cat([self._down(x, slot) for slot in self.slots], -1)
        if self.plan.shard_axis == 0:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp)
        elif self.plan.shard_axis == 1:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp)
        parts = zip(self.slots, (low * self.scale).chunk(len(self.slots), dim=-1), strict=True)
        added = {slot: F.linear(part, self._low_rank(slot).B) for slot, part in parts}
        return self._join_outputs(added)

    def factors(self, x: Tensor, is_frozen: bool = False) -> tuple[Tensor, Tensor]:
        """Return the addition of `forward` as two factors, the second transposed. The head needs
        this: it never has all its outputs at once, and it sums the first factor's gradient over the
        ranks itself. With `is_frozen` there is no dropout, and only x gets a gradient."""
        (slot,) = self.slots
        pair = self._low_rank(slot)
        down = F.linear(x, pair.A.detach()) if is_frozen else self._down(x, slot)
        return down * self.scale, pair.B

    def _down(self, x: Tensor, slot: HFLinear) -> Tensor:
        return F.linear(self._apply_dropout(x, slot), self._low_rank(slot).A)

    def _low_rank(self, slot: HFLinear) -> LowRank:
        adapter = self[slot.leaf]
        assert isinstance(adapter, LowRank)
        return adapter

    def _join_outputs(self, added: dict[HFLinear, Tensor]) -> Tensor:
        """Join the slots' outputs in the layer's order: group by group, each with a part of every
        slot. A slot without an adapter adds zeros."""
        like = next(iter(added.values()))
        pieces = [
            added[slot] if slot in added else like.new_zeros(*like.shape[:-1], rows)
            for slot, rows in zip(self.plan.slots, self.rows, strict=True)
        ]
        if len(pieces) == 1:
            return pieces[0]
        grouped = [piece.unflatten(-1, (self.groups, -1)) for piece in pieces]
        return torch.cat(grouped, -1).flatten(-2)

    def _apply_dropout(self, x: Tensor, slot: HFLinear) -> Tensor:
        """Apply dropout. The mask is drawn for the whole input on every rank, so that ranks that
        share the input, or have a part of it each, agree."""
        if not (self.training and self.dropout):
            return x
        seed = seed_from(torch.initial_seed(), slot.base.name)
        generator = torch.Generator(x.device).manual_seed(seed)
        whole = (*x.shape[:-1], slot.base.shape[1])
        mask = torch.rand(prod(whole), generator=generator, device=x.device) >= self.dropout
        mask = mask.view(whole)
        if x.shape[-1] != whole[-1]:
            mask = mask.chunk(whole[-1] // x.shape[-1], dim=-1)[dist.get_rank(self.tp)]
        return x * mask / (1 - self.dropout)


class ExpertAdapters(LowRank):
    """Adapters of one linear layer of this rank's experts. PEFT adds B A to the weight of every
    expert in each forward. Here only the tokens of an expert are multiplied by its A and its B,
    which gives the same result and creates no second set of experts."""

    def __init__(self, linear: ExpertLinear, lora: LoraConfig):
        weight_eOI = linear.weight
        experts, outputs, inputs = weight_eOI.shape
        super().__init__(lora.rank, inputs, outputs, weight_eOI, experts)
        for param in self.parameters():  # their gradients are summed like the weight's
            param.allreduce = weight_eOI.allreduce  # type: ignore[attr-defined]
        self.scale = scale_of(lora)
        assert not lora.dropout, "adapted_weights refuses it"

    def forward(self, x_MI: Tensor, counts: RowCounts) -> Tensor:
        """Return the adapters' addition to the output [M, O]. The rows of x are sorted by expert;
        `counts` is the number of rows per expert."""
        return times(times(x_MI, self.A, counts) * self.scale, self.B, counts)


def attach(
    chunks: Sequence[nn.Module],
    plans: Sequence[AdaptedLinear],
    lora: LoraConfig,
    tp: dist.ProcessGroup,
) -> None:
    """Attach adapters to this stage's linear layers, as the submodule `lora`."""
    for plan in plans:
        chunk: Any = chunks[plan.chunk]
        linear = chunk.get_submodule(plan.name)
        if isinstance(linear, ExpertLinear):
            linear.lora = ExpertAdapters(linear, lora)
        else:
            weight = chunk.head_weight if plan.is_head else linear.weight
            linear.lora = Adapters(weight, plan, lora, tp)
        linear.register_forward_hook(_add_to_logits if plan.is_head else _add)


def _add(linear: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Add the adapters' output. Megatron's layers return a bias beside the output."""
    added = linear.lora(*args)
    if isinstance(output, tuple):
        return (output[0] + added, *output[1:])
    return output + added


def _add_to_logits(linear: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Add the adapters' logits in fp32, as `predict` does."""
    return (output[0].float() + linear.lora(*args), *output[1:])


@contextmanager
def dropout_rng(*where: object) -> Iterator[None]:
    """Make dropout a function of `where` inside the context: of seed, step, replica and
    micro-batch.

    The seed of torch's generator holds this value, and nothing draws from that generator.
    Recomputation, both Megatron's and torch's, restores the generator's state from the forward
    pass.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed_from(*where))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def fill_adapters(
    held: Mapping[Entry, nn.Parameter],
    grid: RankGroups,
    value_of: Callable[[TensorSpec, str], Tensor | None],
) -> None:
    """Fill each rank's parameters from whole values. `value_of` returns the value of a tensor by
    its name in PEFT's files, or None. Values for Hugging Face's own tensors belong to parameters
    that hold a single tensor."""
    for entry, param in held.items():
        if len(entry.hf_tensors) > 1:
            continue
        name = entry.names[0] if entry.origin is Origin.added else PREFIX + entry.names[0]
        whole = value_of(entry.hf_tensors[0], name)
        if whole is not None:
            read = partial(_slice_of, whole)
            part = entry.layout.load(read, [name], *grid.along(entry.layout.shard_group))
            with torch.no_grad():
                param.copy_(part)


def _slice_of(whole: Tensor, _: str, spans: Sequence[Span]) -> Tensor:
    return whole[slices_of(spans)]


def initial_values(
    cfg: Config, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> Callable[[TensorSpec, str], Tensor | None]:
    """Return the initial values, from lora.path or by PEFT's own initialisation. A is random and
    B is zero; the numbers are the same in every layout."""
    lora, seed = cfg.lora, cfg.train.seed
    if lora.path is not None:
        folder = AdapterFolder(lora.path, lora, weights, source)
        return lambda _, name: folder.read(name)

    def begin(tensor: TensorSpec, name: str) -> Tensor | None:
        if ".lora_" not in name:
            return None
        whole = torch.zeros(tensor.shape)
        if name.endswith("lora_A.weight"):
            generator = torch.Generator().manual_seed(seed_from(seed, name))
            rows_I = whole.flatten(0, -2)  # all experts at once, as in PEFT
            nn.init.kaiming_uniform_(rows_I, a=math.sqrt(5), generator=generator)
        return whole

    return begin
