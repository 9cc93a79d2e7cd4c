"""Exchange of matrices between the ranks that have parts of them and the one that works on each.

TP ranks have rows or columns, and replicas have ranges of their values, or copies. In each bucket
every matrix goes to one rank, so that all have about the same work, and the result goes back to
every rank that holds a part. All ranks make the same plan from the places of all parts, so their
collectives agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_vlm.distributed.grid import GroupAxis
from megatron_vlm.hf.matrices import Matrix, Place

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
    """Return the rank that works on each matrix: the one with the least work so far, from the most
    expensive matrix on."""
    loads, owner = [0.0] * ranks, {}
    for matrix in sorted(matrices, key=lambda each: (-cost(each), each.name)):
        rank = loads.index(min(loads))
        owner[matrix.name] = rank
        loads[rank] += cost(matrix)
    return owner


def _senders(
    matrices: Sequence[Matrix], held: Sequence[Sequence[Place]], owner: Mapping[str, int]
) -> dict[Place, int]:
    """Return the rank that sends each part: the owner of the matrix if it holds a copy, or else the
    holders take turns."""
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


def cut_buckets(matrices: Sequence[Sequence[Matrix]], size: int) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket of at most `size` values or one
    parameter."""
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
