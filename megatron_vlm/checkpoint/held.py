"""What a rank must write and read of a training run: weights and the optimizer's state.

Megatron's own sharded optimizer state (0.16.1) depends on the optimizer that wrote it: what the
distributed one saves the plain one cannot load, so DP 2 could not resume at DP 1. Here every
optimizer is the same: of each trainable parameter a flat part of the fp32 main weight and of both
moments. A checkpoint holds the main weight alone: the model's is that, rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_vlm.checkpoint.pieces import Piece, Shape, blocks_of, cut
from megatron_vlm.hf.names import REPLICATED, Entry
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel
from megatron_vlm.worker import MegatronWorker

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerPart:
    """The part of a parameter that this rank's optimizer updates."""

    start: int  # in the flattened parameter
    sharded: bool  # over the DP ranks: the others hold other parts; else they hold the same
    tensors: dict[str, Tensor]  # by prefix, flat: "" the main weight, and the moments


def optimizer_parts(
    optimizer: MegatronOptimizer, model: Qwen3VLGPTModel
) -> dict[torch.nn.Parameter, OptimizerPart]:
    """Of every parameter that this rank's optimizer updates at least in part."""
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
        for param in model.parameters():
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


def shapes_of(worker: MegatronWorker) -> dict[str, Shape]:
    """Of every tensor of the model, in Hugging Face's names."""
    return {name: info.shape for name, info in worker.source.tensors.items()}


def held_pieces(worker: MegatronWorker, writing: bool) -> Iterator[Piece]:
    """This rank's pieces of the checkpoint. Writing, each piece is one rank's alone, and ranks
    that hold the same take turns; else all that the rank has to fill, the weights first."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    dp, dp_rank = worker.dims.dp, parallel_state.get_data_parallel_rank()
    tp, tp_rank = worker.dims.tp, parallel_state.get_tensor_model_parallel_rank()
    shapes = shapes_of(worker)
    params = dict(worker.model.named_parameters())
    parts = {}
    if worker.optimizer is not None:
        parts = optimizer_parts(worker.optimizer, worker.model)
    for number, entry in enumerate(worker.table):
        if entry.stage != stage:
            continue
        if writing and (entry.is_copy or (entry.layout is REPLICATED and number % tp != tp_rank)):
            continue
        param = params[entry.ours]
        tensors: list[tuple[str, Tensor, int]] = []
        part = parts.get(param)
        if not writing or not param.requires_grad:
            tensors.append(("", _flat(param), 0))
        if part is not None:
            tensors += [(prefix, flat, part.start) for prefix, flat in part.tensors.items()]
        if writing and not (part is not None and part.sharded) and number % dp != dp_rank:
            continue
        yield from _cut_all(entry, tensors, param, shapes, (tp_rank, tp))


def _cut_all(
    entry: Entry,
    tensors: list[tuple[str, Tensor, int]],
    param: torch.nn.Parameter,
    shapes: dict[str, Shape],
    place: tuple[int, int],
) -> Iterator[Piece]:
    blocks = blocks_of(entry, shapes, *place)
    width = param.numel() // len(param)
    for prefix, flat, start in tensors:
        yield from cut(prefix, flat, start, width, blocks)


def get_step(optimizer: MegatronOptimizer) -> int:
    """How many steps this rank's optimizer has made; 0 where it has nothing to update."""
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:
            continue
        for state in each.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return max(int(group.get("step", 0)) for group in each.optimizer.param_groups)
    return 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Go on counting from here: Adam corrects its moments by the count."""
    for each in optimizer.chained_optimizers:
        if each.is_stub_optimizer:
            continue
        if isinstance(each.optimizer, torch.optim.Adam):
            for state in each.optimizer.state.values():
                state["step"].fill_(step)
        else:
            for group in each.optimizer.param_groups:
                group["step"] = step
