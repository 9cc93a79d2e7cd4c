"""Muon for matrices, and AdamW for everything else.

The matrices are the checkpoint's (hf/matrices.py). Their momentum lies where AdamW's would, on the
flat part of a parameter that this rank's optimizer updates. TP ranks have rows or columns, and
replicas have ranges of their values, or copies. In each bucket every matrix goes to one rank, which
orthogonalises it and sends the result back to every rank that holds a part, so that all have about
the same work and none keeps a whole momentum. All ranks make the same plan from the places of all
parts, so their collectives agree.

It computes what torch.optim.Muon does with each matrix, operation by operation: on a GPU in bf16,
as there, and on a CPU in fp32. Few have products in bf16, and on the others they take sixty times
as long.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from megatron_vlm.training import optimizer_step
from megatron_vlm.training.adamw import Moment, RangedAdamW, moments_of

# Fills a rectangle of a matrix or of a buffer with this rank's values, or takes one of a result.
Visit = Callable[[Place, Tensor], None]


@dataclass(frozen=True)
class Traffic:
    """Rectangles that a rank sends to each rank, and those that it receives from each."""

    sent: Sequence[Sequence[Place]]
    received: Sequence[Sequence[Place]]

    def exchange(self, fill: Visit, axis: GroupAxis, like: Tensor) -> list[tuple[Place, Tensor]]:
        """Send the rectangles that `fill` fills, and return those that arrive, with the type and
        device of `like`. A collective, which a single rank leaves out."""
        if axis.size == 1:
            return []
        sent_sizes, received_sizes = _sizes(self.sent), _sizes(self.received)
        outgoing = like.new_empty(sum(sent_sizes))
        for place, view in _cut(outgoing, self.sent):
            fill(place, view)
        incoming = like.new_empty(sum(received_sizes))
        dist.all_to_all_single(incoming, outgoing, received_sizes, sent_sizes, group=axis.group)
        return _cut(incoming, self.received)


def _sizes(places: Sequence[Sequence[Place]]) -> list[int]:
    return [sum(each.num_values for each in of_rank) for of_rank in places]


def _cut(buffer: Tensor, places: Sequence[Sequence[Place]]) -> list[tuple[Place, Tensor]]:
    """Return the rectangles of a buffer, which has them one after the other."""
    flat = [place for of_rank in places for place in of_rank]
    parts = buffer.split([place.num_values for place in flat])
    return [
        (place, part.view(place.rows, place.cols)) for place, part in zip(flat, parts, strict=True)
    ]


@dataclass(frozen=True)
class MatrixExchange:
    """Plan of one bucket for this rank."""

    axis: GroupAxis
    owned: tuple[Matrix, ...]  # matrices that this rank works on
    kept: tuple[Place, ...]  # its own parts of these
    there: Traffic
    back: Traffic

    @staticmethod
    def plan(
        matrices: Sequence[Matrix],
        held: Sequence[Sequence[Place]],
        axis: GroupAxis,
        cost: Callable[[Matrix], float],
    ) -> "MatrixExchange":
        """Plan a bucket. `held` has the parts that each rank of the group holds."""
        me, ranks = axis.rank, range(axis.size)
        owner = choose_owners(matrices, axis.size, cost)
        held = [[each for each in places if each.name in owner] for places in held]
        sender = _senders(matrices, held, owner)

        def there(source: int, target: int) -> list[Place]:
            return [
                each
                for each in held[source]
                if owner[each.name] == target != source == sender[each]
            ]

        def back(source: int, target: int) -> list[Place]:
            return [each for each in held[target] if owner[each.name] == source != target]

        return MatrixExchange(
            axis,
            tuple(each for each in matrices if owner[each.name] == me),
            tuple(each for each in held[me] if owner[each.name] == me),
            Traffic([there(me, rank) for rank in ranks], [there(rank, me) for rank in ranks]),
            Traffic([back(me, rank) for rank in ranks], [back(rank, me) for rank in ranks]),
        )

    def run(self, fill: Visit, work: Callable[[Tensor], Tensor], take: Visit, like: Tensor) -> None:
        """Work on the matrices that consist of what `fill` writes, and give each rank its parts of
        the results. A collective."""
        whole = {each.name: like.new_empty(each.rows, each.columns) for each in self.owned}
        for place in self.kept:
            fill(place, place.of(whole[place.name]))
        for place, values in self.there.exchange(fill, self.axis, like):
            place.of(whole[place.name]).copy_(values)
        # Popped one by one: `work` overwrites its matrix, whose memory is free before the next.
        results = {name: work(whole.pop(name)) for name in list(whole)}
        for place in self.kept:
            take(place, place.of(results[place.name]))

        def fill_result(place: Place, target: Tensor) -> None:
            target.copy_(place.of(results[place.name]))

        for place, values in self.back.exchange(fill_result, self.axis, like):
            take(place, values)


def choose_owners(
    matrices: Sequence[Matrix], ranks: int, cost: Callable[[Matrix], float]
) -> dict[str, int]:
    """Return the rank that works on each matrix: costliest first, to the least busy rank."""
    loads, owner = [0.0] * ranks, {}
    # Every rank computes this alone: names break ties, so that all choose the same owners.
    for matrix in sorted(matrices, key=lambda each: (-cost(each), each.name)):
        rank = loads.index(min(loads))
        owner[matrix.name] = rank
        loads[rank] += cost(matrix)
    return owner


def _senders(
    matrices: Sequence[Matrix], held: Sequence[Sequence[Place]], owner: Mapping[str, int]
) -> dict[Place, int]:
    """Return the rank that sends each part: the matrix's owner, or else its holders in turn."""
    holders: dict[Place, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    sizes = dict.fromkeys(owner, 0)
    for place in holders:
        sizes[place.name] += place.num_values
    for matrix in matrices:
        assert sizes[matrix.name] == matrix.rows * matrix.columns, f"parts of {matrix.name}"
    senders = {}
    for number, (place, ranks) in enumerate(holders.items()):
        is_own = owner[place.name] in ranks
        senders[place] = owner[place.name] if is_own else ranks[number % len(ranks)]
    return senders


def split_buckets(matrices: Sequence[Sequence[Matrix]], size: int) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket: at most `size` values, or one."""
    sizes = [sum(each.rows * each.columns for each in of_param) for of_param in matrices]
    buckets: list[list[int]] = []
    filled = 0
    for number, added in enumerate(sizes):
        if not buckets or filled + added > size:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += added
    return buckets


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
            # By the rate before its adjustment to the shape, as torch.optim.Muon decays.
            part.main.mul_(1 - group["lr"] * self._lr_ratio * group["weight_decay"])

        def fill(place: Place, target: Tensor) -> None:
            part = part_of[place]
            target.copy_(part.rectangles[place].view(updates[part.main]))

        def apply(place: Place, result: Tensor) -> None:
            part = part_of[place]
            lr = group_of[part.main]["lr"] * self._lr_ratio
            # By the shape of the whole matrix, of which this rank may hold a few rows.
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
    result = matrix.T if is_tall else matrix  # so that the Gram matrix is the smaller one
    # The iteration needs singular values of at most 1, and none is above the Frobenius norm.
    result.div_(result.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = result @ result.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        result = torch.addmm(result, polynomial, result, beta=_A)
    return result.T if is_tall else result


def adjust_lr(lr: float, adjustment: str, rows: int, columns: int) -> float:
    """Return a matrix's learning rate: match_rms_adamw makes its update as large as AdamW's."""
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def use_muon(
    optimizer: MegatronOptimizer,
    optim: OptimConfig,
    entries: Mapping[nn.Parameter, Entry],
    grid: RankGroups,
) -> None:
    """Let Muon update the matrices, and Megatron's optimizer the rest. A collective."""
    learning = {
        param: entry
        for param, entry in entries.items()
        if param.requires_grad and is_of_matrices(entry.hf_tensors[0])
    }
    mains = {each.param: each for each in optimizer_step.main_weights(optimizer, learning)}
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
        own_groups = optimizer_step.groups_with(groups, {each: each for each in muon_mains})
        rest.param_groups = optimizer_step.groups_with(groups, {each: each for each in others})
        muon = Muon(own_groups, optim, buckets, like)
        chained.optimizer = optimizer_step.SplitOptimizer(groups, (muon, rest))
        if isinstance(rest, RangedAdamW) and rest.kernel is not None:  # it writes only its own
            own = [each for each in mains.values() if each.main in muon_mains]
            chained._copy_main_params_to_model_params = partial(optimizer_step.copy_to_model, own)


# Matrices of a parameter, and the part that this rank updates, if it has any.
_ParamMatrices = tuple[tuple[Matrix, ...], MuonPart | None]


def _param_matrices(
    entry: Entry, param: nn.Parameter, weight: optimizer_step.MainWeight | None, grid: RankGroups
) -> _ParamMatrices:
    assert all(map(is_of_matrices, entry.hf_tensors)), f"{entry.our_name} has matrices and others"
    blocks = blocks_of(entry, *grid.along(entry.layout.shard_group))
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
    for numbers in split_buckets([matrices for matrices, _ in held], size):
        matrices = [matrix for number in numbers for matrix in held[number][0]]
        parts = tuple(part for number in numbers if (part := held[number][1]) is not None)
        exchange = MatrixExchange.plan(
            matrices, places, axis, lambda matrix: matrix.orthogonalize_flops(steps)
        )
        shapes = {matrix.name: (matrix.rows, matrix.columns) for matrix in matrices}
        buckets.append(MuonBucket(parts, exchange, shapes))
    return buckets
