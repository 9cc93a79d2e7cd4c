"""Which rows of a global batch go together, and to which data parallel rank.

There is no packing, little padding, and no rank that waits: rows of similar length make a
micro-batch, and micro-batches are dealt out so that all ranks have the same cost. The plan is a
pure function of the rows' sizes, so every rank arrives at the same one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.config.schema import TrainConfig
from megatron_vlm.data.even_split import deal


@dataclass(frozen=True)
class RowSize:
    """What planning needs to know of a row."""

    tokens: int
    cost: float  # in any unit of work; see cost.py
    patches: int = 0
    images: int = 0


@dataclass(frozen=True)
class Limits:
    """The limit of one micro-batch: `tokens`, padding included, if given; otherwise `rows`."""

    rows: int = 1
    tokens: int | None = None

    @staticmethod
    def of(train: TrainConfig) -> "Limits":
        """The limits that the configuration sets."""
        return Limits(train.micro_batch_size, train.micro_batch_tokens)


Plan = list[list[list[int]]]  # [rank][micro-batch][row]


def plan_batch(sizes: Sequence[RowSize], ranks: int, limits: Limits) -> Plan:
    """Every row once. All ranks get micro-batches of nearly equal total cost; a rank may get none
    if there are fewer rows than ranks."""
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row].tokens, sizes[row].cost, row))
    if limits.tokens is not None:
        return _deal_groups(_group_by_tokens(order, sizes, ranks, limits.tokens), sizes, ranks)
    # With a fixed number of rows, groups of similar length pad least, rows dealt out one by one
    # balance best, and a few rows may be best left in order: take what finishes first.
    count = math.ceil(len(sizes) / limits.rows / ranks) * ranks
    alike = _deal_groups(_split(order, min(count, len(sizes))), sizes, ranks)
    shares = deal([size.cost for size in sizes], ranks)
    place = {row: number for number, row in enumerate(order)}
    single = [
        _split(sorted(share, key=place.__getitem__), math.ceil(len(share) / limits.rows))
        for share in shares
    ]
    plain = naive_plan(sizes, ranks, limits.rows)
    return min(alike, single, plain, key=lambda plan: max(_loads(plan, sizes)))


def _deal_groups(groups: list[list[int]], sizes: Sequence[RowSize], ranks: int) -> Plan:
    """Micro-batches over ranks, costliest first, so that the pipeline drains on short ones."""
    costs = [group_cost([sizes[row] for row in group]) for group in groups]
    shares = level(deal(costs, ranks), costs)
    return [[groups[g] for g in sorted(share, key=lambda g: -costs[g])] for share in shares]


def _split(order: Sequence[int], count: int) -> list[list[int]]:
    """Groups of nearly equal size and rows of similar length, costliest first; the longest rows
    are in the smaller groups."""
    return [part.tolist() for part in np.array_split(order, count)][::-1] if count else []


def _loads(plan: Plan, sizes: Sequence[RowSize]) -> list[float]:
    return [sum(group_cost([sizes[row] for row in group]) for group in share) for share in plan]


def _group_by_tokens(
    order: Sequence[int], sizes: Sequence[RowSize], ranks: int, tokens: int
) -> list[list[int]]:
    """At least one group for each rank, if there are enough rows."""
    groups = _fill_groups(order[::-1], sizes, ranks, tokens)
    while len(groups) < min(ranks, len(sizes)):
        widest = max(groups, key=len)
        groups.remove(widest)
        groups += [widest[::2], widest[1::2]]
    return groups


def _fill_groups(
    order: Sequence[int], sizes: Sequence[RowSize], ranks: int, tokens: int
) -> list[list[int]]:
    """Groups, each ended before it passes the limit, pads too much or outgrows a rank's share."""
    # Groups above this could not be dealt out evenly; a single row may still be above it.
    most_cost = sum(size.cost for size in sizes) / ranks / _PIECES_PER_RANK
    groups: list[list[int]] = []
    longest, cost = 0, 0.0
    for row in order:
        size = sizes[row]
        fits = groups and (
            longest * (len(groups[-1]) + 1) <= tokens
            and cost + size.cost <= most_cost
            and longest - size.tokens <= _MOST_PADDING * longest
        )
        if not fits:
            groups.append([])
            longest, cost = size.tokens, 0.0
        groups[-1].append(row)
        cost += size.cost
    return groups


_PIECES_PER_RANK = 4
_MOST_PADDING = 0.06  # of the longest row; the mean over a group is then about half


def group_cost(rows: Sequence[RowSize]) -> float:
    """The cost of a micro-batch, in which padding costs like tokens."""
    longest = max(size.tokens for size in rows)
    return sum(size.cost * (1 + 0.5 * (longest / size.tokens - 1)) for size in rows)


def level(shares: list[list[int]], costs: Sequence[float], rounds: int = 200) -> list[list[int]]:
    """Swap or move groups between the busiest rank and others as long as its load falls."""
    shares = [list(share) for share in shares]
    loads = np.array([sum(costs[g] for g in share) for share in shares])
    for _ in range(rounds):
        high = int(loads.argmax())
        best = _best_exchange(shares, costs, loads, high)
        if best is None:
            break
        low, give, take = best
        shares[high].remove(give)
        shares[low].append(give)
        if take is not None:
            shares[low].remove(take)
            shares[high].append(take)
        moved = costs[give] - (costs[take] if take is not None else 0.0)
        loads[high] -= moved
        loads[low] += moved
    return shares


def _best_exchange(
    shares: list[list[int]], costs: Sequence[float], loads: np.ndarray, high: int
) -> tuple[int, int, int | None] | None:
    """The exchange with another rank that makes the larger of the two loads smallest."""
    best, found = loads[high] * (1 - 1e-6), None
    gives = np.array([[costs[g]] for g in shares[high]])
    for low in np.argsort(loads, kind="stable")[:16].tolist():
        if low == high:
            continue
        takes = [None, *shares[low]]
        moved = gives - np.array([0.0 if g is None else costs[g] for g in takes])
        after = np.maximum(loads[high] - moved, loads[low] + moved)
        after[moved <= 0] = np.inf
        give, take = divmod(int(after.argmin()), len(takes))
        if after[give, take] < best:
            best, found = after[give, take], (low, shares[high][give], takes[take])
    return found


@dataclass(frozen=True)
class Balance:
    """How well a plan pads and balances."""

    padding: float  # share of all positions that is padding
    imbalance: float  # cost of the busiest rank over the mean
    busiest: float  # that cost, padding included
    micro_batches: int


def measure(plan: Plan, sizes: Sequence[RowSize]) -> Balance:
    """The padding and the balance of a plan."""
    real = sum(size.tokens for size in sizes)
    loads = _loads(plan, sizes)
    imbalance = max(loads) / (sum(loads) / len(loads))
    padding = 1 - real / padded_tokens(plan, sizes)
    return Balance(padding, imbalance, max(loads), sum(map(len, plan)))


def padded_tokens(plan: Plan, sizes: Sequence[RowSize]) -> int:
    """All positions of a plan's micro-batches: tokens and padding."""
    groups = itertools.chain(*plan)
    return sum(len(group) * max(sizes[row].tokens for row in group) for group in groups)


def naive_plan(sizes: Sequence[RowSize], ranks: int, rows: int) -> Plan:
    """The usual way: rows in order, equally many to each rank, cut at a number of rows."""
    bounds = [len(sizes) * rank // ranks for rank in range(ranks + 1)]
    return [
        [list(range(s, min(s + rows, end))) for s in range(start, end, rows)]
        for start, end in itertools.pairwise(bounds)
    ]
