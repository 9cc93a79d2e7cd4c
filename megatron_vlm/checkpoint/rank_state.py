"""What a rank must write and read of a training run: weights and the optimizer's state.

Megatron's own sharded optimizer state (0.16.1) depends on the optimizer that wrote it: what the
distributed one saves the plain one cannot load, so DP 2 could not resume at DP 1. Here every
optimizer looks the same: it has, for each trainable parameter, a flat part of the fp32 main weight
and of both moments. A checkpoint stores only the fp32 main weight: the model's is that, rounded.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_vlm.checkpoint.tensor_pieces import Piece, TensorShape, blocks_of, cut
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.training.worker import MegatronWorker

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerPart:
    """The part of a parameter that this rank's optimizer updates."""

    start: int  # in the flattened parameter
    sharded: bool  # over the DP ranks: the others hold other parts; else they hold the same
    tensors: dict[str, Tensor]  # by prefix, flat: "" the main weight, and the moments


def optimizer_parts(
    optimizer: MegatronOptimizer, params: Collection[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, OptimizerPart]:
    """For each of these parameters that this rank's optimizer updates at least in part."""
    parts = {}
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:  # of a stage that is frozen
            continue
        inner = each.optimizer
        if isinstance(each, DistributedOptimizer):
            for param in each.model_param_gbuf_map:
                group, place = each.model_param_group_index_map[param]
                main = inner.param_groups[group]["params"][place]
                start = each._get_model_param_range_map(param)["param"].start
                parts[param] = OptimizerPart(start, True, _tensors(inner, main))
            continue
        mains = {main for group in inner.param_groups for main in group["params"]}
        for param in params:
            main = getattr(param, "main_param", param)
            if main in mains:
                parts[param] = OptimizerPart(0, False, _tensors(inner, main))
    return parts


def _tensors(inner: torch.optim.Optimizer, main: Tensor) -> dict[str, Tensor]:
    state = inner.state[main]
    if isinstance(inner, torch.optim.Adam):
        # As its first step makes them. The fused optimizers count in the group instead.
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=main.device))
    for key in MOMENTS:
        if key not in state:
            state[key] = torch.zeros_like(main, requires_grad=False)
    return {"": _flat(main)} | {f"{key}/": _flat(state[key]) for key in MOMENTS}


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def is_kept(cfg: Config, entry: Entry) -> bool:
    """Whether a checkpoint has a parameter. Beside adapters it has only those that are trained: the
    others are in model.path."""
    return not (cfg.lora.rank and entry.is_frozen(cfg))


def shapes_of(worker: MegatronWorker) -> dict[str, TensorShape]:
    """The shape of every tensor of a checkpoint, by name."""
    kept = (entry for entry in worker.table if is_kept(worker.cfg, entry))
    return {tensor.name: tensor.shape for entry in kept for tensor in entry.theirs}


def held_pieces(worker: MegatronWorker, writing: bool, moments: bool = True) -> Iterator[Piece]:
    """This rank's pieces of the checkpoint. When writing, each piece belongs to one rank alone, and
    ranks that hold the same take turns; when reading, all that the rank has to fill, the weights
    first. Without `moments` there are weights alone."""
    parts = {}
    if worker.optimizer is not None:
        parts = optimizer_parts(worker.optimizer, worker.held.values())
    numbers = {entry: number for number, entry in enumerate(worker.table)}
    for entry, param in worker.held.items():
        if not is_kept(worker.cfg, entry):
            continue
        part, turn = parts.get(param), numbers[entry]
        if writing and not _writes(worker.grid, entry, part is not None and part.sharded, turn):
            continue
        tensors: list[tuple[str, Tensor, int]] = []
        if not writing or not param.requires_grad:
            tensors.append(("", _flat(param), 0))
        if part is not None:
            tensors += [
                (prefix, flat, part.start)
                for prefix, flat in part.tensors.items()
                if moments or not prefix
            ]
        blocks = blocks_of(entry, *worker.grid.along(entry.layout.cut))
        width = param.numel() // len(param)
        for prefix, flat, start in tensors:
            yield from cut(prefix, flat, start, width, blocks)


def _writes(grid: RankGroups, entry: Entry, sharded: bool, turn: int) -> bool:
    """Whether this rank writes what it holds of an entry; copies are written by nobody."""
    if entry.origin is Origin.copy:
        return False
    mine = entry.layout.cut is not None or turn % grid.tp.size == grid.tp.rank
    copies = grid.copies_of(entry.layout.cut)
    return mine and (sharded or turn % copies.size == copies.rank)


def clear_moments(worker: MegatronWorker) -> None:
    """As before the first step."""
    assert worker.optimizer is not None
    for part in optimizer_parts(worker.optimizer, worker.held.values()).values():
        for prefix, flat in part.tensors.items():
            if prefix:
                flat.zero_()


def get_step(optimizer: MegatronOptimizer) -> int:
    """How many steps this rank's optimizer has done; 0 where it has nothing to update."""
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:
            continue
        for state in each.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return max(int(group.get("step", 0)) for group in each.optimizer.param_groups)
    return 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Continue counting from here: Adam corrects its moments by the count."""
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:
            continue
        if isinstance(each.optimizer, torch.optim.Adam):
            for state in each.optimizer.state.values():
                state["step"].fill_(step)
        else:
            for group in each.optimizer.param_groups:
                group["step"] = step
