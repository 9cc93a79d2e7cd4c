"""State of a training run that a rank must write and read: weights and the optimizer's state.

Megatron's own sharded optimizer state (0.16.1) depends on the optimizer that wrote it: DP 2 could
not resume at DP 1. Here every optimizer looks the same: it has, for each trainable parameter, a
flat part of the fp32 main weight, which stands for the model's weight too, and of both moments.
Moments in 8 bits are stored in fp32, because their codes depend on where the tensor is cut."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.checkpoint.tensor_pieces import Piece, TensorShape
from megatron_vlm.config.optimizer_spec import STATE_NAMES
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.hf.matrices import blocks_of, flat_rectangles
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.training.adamw import Int8Moment, RangedAdamW
from megatron_vlm.training.muon import Muon
from megatron_vlm.training.optimizer_step import MainWeight, inner_optimizers, main_weights
from megatron_vlm.training.worker import MegatronWorker


@dataclass(frozen=True)
class OptimizerPart:
    """Part of a parameter that this rank's optimizer updates."""

    start: int  # offset in the flattened parameter
    sharded: bool  # True: DP ranks hold different parts; False: they all hold the same one
    tensors: dict[str, Tensor]  # flat, by prefix: "" for the main weight, others for moments
    moments: dict[str, Int8Moment]  # moments whose tensors are copies of their values

    def store_moments(self) -> None:
        """Store the moments of which `tensors` has copies."""
        for prefix, moment in self.moments.items():
            values = self.tensors[prefix].to(moment.codes_W.device)
            moment.write(0, values, None)


def local_parts(
    worker: MegatronWorker, moments: bool = True
) -> dict[torch.nn.Parameter, OptimizerPart]:
    """Return the parts of parameters that this rank's optimizer updates, with or without their
    moments; none without an optimizer."""
    if worker.optimizer is None:
        return {}
    weights = main_weights(worker.optimizer, worker.held.values())
    return {each.param: _part_of(each, moments) for each in weights}


def _part_of(weight: MainWeight, moments: bool) -> OptimizerPart:
    inner, main = weight.optimizer, weight.main
    tensors = {"": _flatten(main)}
    coded: dict[str, Int8Moment] = {}
    part = OptimizerPart(weight.start, weight.is_sharded, tensors, coded)
    if not moments:
        return part
    if isinstance(inner, RangedAdamW | Muon):
        for name, moment in inner.moments(main).items():
            if isinstance(moment, Int8Moment):
                coded[f"{name}/"] = moment
                tensors[f"{name}/"] = moment.read(0, main.numel()).cpu()
            else:
                tensors[f"{name}/"] = moment.values_W
        return part
    state = inner.state[main]
    if isinstance(inner, torch.optim.Adam):
        # The first step of Adam creates its count like this. The fused optimizers count in the
        # group instead.
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=main.device))
    for name in STATE_NAMES:
        if name not in state:
            state[name] = torch.zeros_like(main, requires_grad=False)
        tensors[f"{name}/"] = _flatten(state[name])
    return part


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def is_kept(cfg: Config, entry: Entry) -> bool:
    """Return whether a checkpoint has a parameter. With adapters it has only the trained
    parameters: the others are in model.path."""
    return not (cfg.lora.rank and entry.is_frozen(cfg))


def shapes_of(worker: MegatronWorker) -> dict[str, TensorShape]:
    """Return the shape of every tensor of a checkpoint, by name."""
    entries = (entry for entry in worker.table if is_kept(worker.cfg, entry))
    return {tensor.name: tensor.shape for entry in entries for tensor in entry.hf_tensors}


def held_pieces(
    worker: MegatronWorker, parts: Mapping[torch.nn.Parameter, OptimizerPart], writing: bool
) -> Iterator[Piece]:
    """Yield this rank's pieces of the checkpoint, of its weights and of these parts of the
    optimizer's state. For writing, each piece belongs to a single rank, and ranks that hold the
    same piece take turns. For reading, these are all pieces that the rank has to fill, with the
    weights first."""
    numbers = {entry: number for number, entry in enumerate(worker.table)}
    for entry, param in worker.held.items():
        if not is_kept(worker.cfg, entry):
            continue
        part, turn = parts.get(param), numbers[entry]
        if writing and not _writes(worker.grid, entry, part is not None and part.sharded, turn):
            continue
        tensors: list[tuple[str, Tensor, int]] = []
        if not writing or not param.requires_grad:
            tensors.append(("", _flatten(param), 0))
        if part is not None:
            tensors += [(prefix, flat, part.start) for prefix, flat in part.tensors.items()]
        blocks = blocks_of(entry, *worker.grid.along(entry.layout.shard_group))
        width = param.numel() // len(param)
        for prefix, flat, start in tensors:
            for each in flat_rectangles(start, len(flat), width, blocks):
                name, row, col, *_ = each.place
                yield Piece(prefix + name, row, col, each.view(flat))


def _writes(grid: RankGroups, entry: Entry, sharded: bool, turn: int) -> bool:
    """Return whether this rank writes its part of an entry. No rank writes copies."""
    if entry.origin is Origin.copy:
        return False
    is_tp_turn = entry.layout.shard_group is not None or turn % grid.tp.size == grid.tp.rank
    # Replicas with the same part.
    copies = grid.edp if entry.layout.shard_group == "ep" else grid.dp
    return is_tp_turn and (sharded or turn % copies.size == copies.rank)


def clear_moments(worker: MegatronWorker) -> None:
    """Reset the moments to their state before the first step."""
    for part in local_parts(worker).values():
        for prefix, flat in part.tensors.items():
            if prefix:
                flat.zero_()
        part.store_moments()


def get_step(optimizer: MegatronOptimizer) -> int:
    """Return the number of steps of this rank's optimizer; 0 where it has nothing to update."""
    return max(map(_steps_of, inner_optimizers(optimizer)), default=0)


def _steps_of(inner: torch.optim.Optimizer) -> int:
    for state in inner.state.values():
        if "step" in state:
            return int(state["step"])
    return max((int(group.get("step", 0)) for group in inner.param_groups), default=0)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the count of steps to continue from: Adam corrects its moments by this count."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state["step"].fill_(step)
        else:
            for group in inner.param_groups:
                group["step"] = step
