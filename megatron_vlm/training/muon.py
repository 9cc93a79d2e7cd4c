"""Muon for matrices, and AdamW for everything else.

The matrices are the checkpoint's (hf/matrices.py). Their momentum lies where AdamW's would,
on the flat part of a parameter that this rank's optimizer updates. The update of a matrix is
gathered on one rank, which orthogonalises it and sends the result back to the ranks that hold a
part (matrix_exchange.py). So no rank repeats what another one does, and none keeps a whole
momentum.

It computes what torch.optim.Muon does with each matrix, operation by operation: on a GPU in bf16,
as there, and on a CPU in fp32. Few have products in bf16, and on the others they take sixty times
as long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megatron_vlm.config.optimizer_spec import OptimizerSpec, optimizer_spec
from megatron_vlm.config.schema import OptimConfig
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import GroupAxis, RankGroups
from megatron_vlm.hf.matrices import (
    FlatRectangle,
    Matrix,
    Place,
    blocks_of,
    flat_rectangles,
    is_of_matrices,
    matrices_of,
    matrix_blocks,
)
from megatron_vlm.hf.weight_map import Entry
from megatron_vlm.training.adamw import Moment, moments_of
from megatron_vlm.training.matrix_exchange import MatrixExchange, cut_buckets
from megatron_vlm.training.optimizer_step import (
    MainWeight,
    SplitOptimizer,
    groups_with,
    main_weights,
)

_BUCKET = 2**25  # values of a bucket for each rank of the group
# Coefficients of Newton-Schulz, and the smallest norm to divide by, as in torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_DTYPE_OF = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class MuonPart:
    """The part of a parameter whose matrices this rank updates."""

    main: Tensor  # what the optimizer steps, as in MainWeight
    rectangles: Mapping[Place, FlatRectangle]


@dataclass(frozen=True)
class MuonBucket:
    """Matrices whose updates travel together."""

    parts: tuple[MuonPart, ...]
    exchange: MatrixExchange
    shapes: Mapping[str, tuple[int, int]]


class Muon(torch.optim.Optimizer):
    """Muon over the matrices of flat parts of parameters."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        optim: OptimConfig,
        buckets: Sequence[MuonBucket],
        like: Tensor,  # has the type and the device of the orthogonalisation
    ):
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.optim, self.buckets, self.like = optim, buckets, like
        self.spec: OptimizerSpec = optimizer_spec(optim)

    def moments(self, param: Tensor) -> dict[str, Moment]:
        """Return the momentum of a parameter, which is zero before the first step."""
        return moments_of(self.state[param], self.spec.matrix_state_names, param, self.spec.states)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices. A collective."""
        assert closure is None
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for bucket in self.buckets:
            self._step_bucket(bucket, group_of)

    def _step_bucket(
        self, bucket: MuonBucket, group_of: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        part_of = {place: part for part in bucket.parts for place in part.rectangles}
        updates = {part.main: self._next_update(part.main) for part in bucket.parts}
        for part in bucket.parts:
            group = group_of[part.main]
            part.main.mul_(1 - group["lr"] * self._lr_ratio * group["weight_decay"])

        def fill(place: Place, target: Tensor) -> None:
            part = part_of[place]
            target.copy_(part.rectangles[place].view(updates[part.main]))

        def apply(place: Place, result: Tensor) -> None:
            part = part_of[place]
            lr = group_of[part.main]["lr"] * self._lr_ratio
            lr = adjust_lr(lr, self.optim.muon.adjust_lr_fn, *bucket.shapes[place.name])
            weights = part.rectangles[place].view(part.main.view(-1))
            weights.add_(result, alpha=-lr)

        work = partial(orthogonalize, steps=self.optim.muon.ns_steps)
        bucket.exchange.run(fill, work, apply, self.like)

    def _next_update(self, main: Tensor) -> Tensor:
        """Add the gradient to the momentum, and return what will be orthogonalised, flat."""
        assert main.grad is not None
        [moment] = self.moments(main).values()
        grad, share = main.grad.detach().view(-1), self.optim.muon.momentum
        momentum = moment.read(0, main.numel()).lerp_(grad, 1 - share)
        moment.write(0, momentum, None)
        return grad.lerp(momentum, share) if self.optim.muon.nesterov else momentum

    @property
    def _lr_ratio(self) -> float:
        own = self.optim.muon_lr
        return 1.0 if own is None else own / self.optim.lr


@torch.no_grad()
def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return the matrix with all singular values near 1, by Newton-Schulz in the type of the
    matrix, which is overwritten."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if is_tall else matrix
    result.div_(result.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = result @ result.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        result = torch.addmm(result, polynomial, result, beta=_A)
    return result.T if is_tall else result


def adjust_lr(lr: float, adjustment: str, rows: int, columns: int) -> float:
    """Return the learning rate of a matrix: with match_rms_adamw its update is as large as
    AdamW's."""
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def use_muon(
    optimizer: MegatronOptimizer,
    optim: OptimConfig,
    entries: Mapping[nn.Parameter, Entry],
    grid: RankGroups,
) -> None:
    """Let Muon update the matrices, and the optimizer that Megatron has made all other parameters.
    A collective."""
    learning = {
        param: entry
        for param, entry in entries.items()
        if param.requires_grad and is_of_matrices(entry.hf_tensors[0])
    }
    mains = {each.param: each for each in main_weights(optimizer, learning)}
    device = next(iter(entries)).device
    like = torch.empty(0, dtype=_DTYPE_OF[device.type], device=device)
    for chained in optimizer.chained_optimizers:
        if chained.is_stub_optimizer:
            continue
        rest = chained.optimizer
        has_experts = any(group["is_expert_parallel"] for group in rest.param_groups)
        params = [param for param in learning if has_experts != getattr(param, "allreduce", True)]
        held = [_param_matrices(entries[param], param, mains.get(param), grid) for param in params]
        axis = grid.edp if has_experts else grid.tp_dp
        is_sharded = isinstance(chained, DistributedOptimizer)
        # Ranks that divide the values of a matrix; others have copies.
        divided = axis.size if is_sharded or has_experts else grid.tp.size
        buckets = _make_buckets(held, axis, _BUCKET * divided, optim.muon.ns_steps, device)
        muon_mains = {part.main for _, part in held if part is not None}
        groups = rest.param_groups
        others = {each for group in groups for each in group["params"]} - muon_mains
        own_groups = groups_with(groups, {each: each for each in muon_mains})
        rest.param_groups = groups_with(groups, {each: each for each in others})
        muon = Muon(own_groups, optim, buckets, like)
        chained.optimizer = SplitOptimizer(groups, (muon, rest))


# Matrices of a parameter, and the part that this rank updates, if it has any.
_ParamMatrices = tuple[tuple[Matrix, ...], MuonPart | None]


def _param_matrices(
    entry: Entry, param: nn.Parameter, weight: MainWeight | None, grid: RankGroups
) -> _ParamMatrices:
    assert all(map(is_of_matrices, entry.hf_tensors)), f"{entry.our_name} has matrices and others"
    blocks = blocks_of(entry, *grid.along(entry.layout.cut))
    experts = [block.row + number for block in blocks for number in range(block.rows)]
    matrices = tuple(each for tensor in entry.hf_tensors for each in matrices_of(tensor, experts))
    if weight is None:
        return matrices, None
    own_blocks = [each for tensor in entry.hf_tensors for each in matrix_blocks(tensor, blocks)]
    main = weight.main.detach().view(-1)
    found = flat_rectangles(weight.start, len(main), param.shape[-1], own_blocks)
    return matrices, MuonPart(weight.main, {each.place: each for each in found})


def _make_buckets(
    held: Sequence[_ParamMatrices], axis: GroupAxis, size: int, steps: int, device: torch.device
) -> list[MuonBucket]:
    """Return the buckets, after all ranks have told each other what they hold. A collective."""
    local = [place for _, part in held if part for place in part.rectangles]
    told = all_gather_json(local, axis.group, device) if axis.size > 1 else [local]
    places = [[Place(*place) for place in of_rank] for of_rank in told]
    buckets = []
    for numbers in cut_buckets([matrices for matrices, _ in held], size):
        matrices = [matrix for number in numbers for matrix in held[number][0]]
        parts = tuple(part for number in numbers if (part := held[number][1]) is not None)
        exchange = MatrixExchange.plan(
            matrices, places, axis, lambda matrix: matrix.orthogonalize_flops(steps)
        )
        shapes = {matrix.name: (matrix.rows, matrix.columns) for matrix in matrices}
        buckets.append(MuonBucket(parts, exchange, shapes))
    return buckets
