"""Even division of work: micro-batches over replicas, images over tensor parallel ranks."""

import heapq
from collections.abc import Sequence


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the work of each rank: from the costliest piece down, each for the least busy rank."""
    loads = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, rank = loads[0]
        shares[rank].append(piece)
        heapq.heapreplace(loads, (load + costs[piece], rank))
    return shares
