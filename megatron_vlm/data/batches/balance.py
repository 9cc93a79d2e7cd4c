"""Assignment of a global batch's rows to micro-batches and data parallel ranks: rows of similar
length form a micro-batch, and micro-batches are dealt out so that all ranks have the same cost.
Rows that share images form one, too, as long as that saves more than their padding costs. The plan
is a pure function of the rows' sizes, so every rank computes the same plan.
The work of a row is the floating point operations of its forward; padding is not work."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_vlm.config.schema import TrainConfig
from megatron_vlm.data.even_split import deal
from megatron_vlm.data.tokens.sample import Example
from megatron_vlm.family.decoder_layers import Attention
from megatron_vlm.family.spec import ModelSizes, Part, VisionSizes


@dataclass(frozen=True)
class VisualSize:
    """The size of images or videos that several rows may have. A micro-batch encodes them once."""

    key: int  # the same in each of these rows
    patches: int
    cost: float


@dataclass(frozen=True)
class RowSize:
    """The size of a row, or of the rows of one record, which are never divided, for planning."""

    tokens: int
    cost: float  # in any unit of work; see WorkModel
    patches: int = 0
    images: int = 0
    rows: int = 1
    longest_row: int | None = None  # its tokens; None: there is one row
    visuals: tuple[VisualSize, ...] = ()  # those parts of it that other rows may have, too

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.tokens if self.longest_row is None else self.longest_row

    @staticmethod
    def of_rows(sizes: Sequence["RowSize"]) -> "RowSize":
        """Return the size of rows that are never divided."""
        if len(sizes) == 1:
            return sizes[0]
        repeated = repeated_visuals(sizes)
        return RowSize(
            sum(size.tokens for size in sizes),
            sum(size.cost for size in sizes) - sum(each.cost for each in repeated),
            sum(size.patches for size in sizes) - sum(each.patches for each in repeated),
            sum(size.images for size in sizes),
            sum(size.rows for size in sizes),
            max(size.longest for size in sizes),
            tuple({each.key: each for size in sizes for each in size.visuals}.values()),
        )


def repeated_visuals(sizes: Sequence[RowSize]) -> list[VisualSize]:
    """Return the images and videos that a micro-batch of these rows has again."""
    visuals = [visual for size in sizes for visual in size.visuals]
    keys = [visual.key for visual in visuals]
    return [visual for place, visual in enumerate(visuals) if visual.key in keys[:place]]


@dataclass(frozen=True)
class Limits:
    """The limit of one micro-batch: `tokens` with padding, if set; else `rows`, one for a
    record."""

    rows: int = 1
    tokens: int | None = None

    @staticmethod
    def from_config(train: TrainConfig) -> "Limits":
        """Return the limits that the configuration sets."""
        return Limits(train.micro_batch_size, train.micro_batch_tokens)


Plan = list[list[list[int]]]  # [rank][micro-batch][row]


def plan_batch(sizes: Sequence[RowSize], ranks: int, limits: Limits) -> Plan:
    """Place every row once. All ranks get micro-batches of nearly equal total cost. If there are
    fewer rows than ranks, some ranks get no micro-batch. Plans compete that keep a different number
    of rows with the same images together, from one on. The plan that finishes first wins."""
    plain = [replace(size, visuals=()) if size.visuals else size for size in sizes]
    plans = [_plan_units(plain, ranks, limits)]
    for count in _counts_together(sizes, limits):
        units = _units(sizes, ranks, limits, count)
        joined = [RowSize.of_rows([sizes[row] for row in unit]) for unit in units]
        plan = _plan_units(joined, ranks, replace(limits, rows=limits.rows // count))
        plans.append([[[row for u in batch for row in units[u]] for batch in s] for s in plan])
    return min(plans, key=lambda plan: max(_loads(plan, sizes))) if len(plans) > 1 else plans[0]


def _counts_together(sizes: Sequence[RowSize], limits: Limits) -> list[int]:
    """Return the numbers of rows with the same images, above one, for which plans are made."""
    keys = Counter(visual.key for size in sizes for visual in size.visuals)
    count, counts = max(keys.values(), default=1), list[int]()
    if limits.tokens is None:  # a micro-batch is to have its number of rows
        return [n for n in range(2, min(count, limits.rows) + 1) if limits.rows % n == 0]
    while count > 1:
        counts.append(count)
        count = -(-count // 2)
    return counts


def _units(sizes: Sequence[RowSize], ranks: int, limits: Limits, count: int) -> list[list[int]]:
    """Put up to `count` rows with the same images, of similar length, in a unit. A unit costs no
    more than a micro-batch may. If a number of rows is the limit, units of text are as large."""
    rows_of: dict[int | None, list[int]] = defaultdict(list)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row].longest, row)):
        rows_of[sizes[row].visuals[0].key if sizes[row].visuals else None].append(row)
    max_cost = math.inf if limits.tokens is None else _max_cost(sizes, ranks)
    units: list[list[int]] = []
    for key, rows in rows_of.items():
        size = 1 if key is None and limits.tokens is not None else count
        unit: list[int] = []
        for row in rows:
            joined = RowSize.of_rows([sizes[each] for each in (*unit, row)])
            is_long = joined.longest * joined.rows > (limits.tokens or math.inf)
            if not unit or len(unit) == size or is_long or joined.cost > max_cost:
                unit = []
                units.append(unit)
            unit.append(row)
    return units


def _plan_units(sizes: Sequence[RowSize], ranks: int, limits: Limits) -> Plan:
    """Place rows, or units of rows, once."""
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row].longest, sizes[row].cost, row))
    if limits.tokens is not None:
        return _deal_groups(_group_by_tokens(order, sizes, ranks, limits.tokens), sizes, ranks)
    # With a fixed number of rows, three plans compete. Groups of similar length have the least
    # padding, rows that are dealt out one by one balance best, and the original order may be best
    # for a few rows. The plan that finishes first wins.
    count = math.ceil(len(sizes) / limits.rows / ranks) * ranks
    by_length = _deal_groups(_split(order, min(count, len(sizes))), sizes, ranks)
    shares = deal([size.cost for size in sizes], ranks)
    place = {row: number for number, row in enumerate(order)}
    by_cost = [
        _split(sorted(share, key=place.__getitem__), math.ceil(len(share) / limits.rows))
        for share in shares
    ]
    in_order = naive_plan(sizes, ranks, limits.rows)
    return min(by_length, by_cost, in_order, key=lambda plan: max(_loads(plan, sizes)))


def _deal_groups(groups: list[list[int]], sizes: Sequence[RowSize], ranks: int) -> Plan:
    """Deal micro-batches to ranks, the most expensive first: the pipeline drains on short ones."""
    costs = [group_cost([sizes[row] for row in group]) for group in groups]
    shares = level(deal(costs, ranks), costs)
    return [[groups[g] for g in sorted(share, key=lambda g: -costs[g])] for share in shares]


def _split(order: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into groups of nearly equal size and similar length, the most expensive first."""
    return [part.tolist() for part in np.array_split(order, count)][::-1] if count else []


def _loads(plan: Plan, sizes: Sequence[RowSize]) -> list[float]:
    return [sum(group_cost([sizes[row] for row in group]) for group in share) for share in plan]


def _group_by_tokens(
    order: Sequence[int], sizes: Sequence[RowSize], ranks: int, tokens: int
) -> list[list[int]]:
    """Group rows under the limit of tokens: if there are enough rows, a group for each rank."""
    groups = _fill_groups(order[::-1], sizes, ranks, tokens)
    while len(groups) < min(ranks, len(sizes)):
        widest = max(groups, key=len)
        groups.remove(widest)
        groups += [widest[::2], widest[1::2]]
    return groups


def _fill_groups(
    order: Sequence[int], sizes: Sequence[RowSize], ranks: int, tokens: int
) -> list[list[int]]:
    """Fill groups up to the limit, to too much padding or to a rank's share."""
    max_cost = _max_cost(sizes, ranks)
    groups: list[list[int]] = []
    longest, rows, cost = 0, 0, 0.0
    for row in order:
        size = sizes[row]
        fits = groups and (
            longest * (rows + size.rows) <= tokens
            and cost + size.cost <= max_cost
            and longest - size.longest <= _MAX_PADDING * longest
        )
        if not fits:
            groups.append([])
            longest, rows, cost = size.longest, 0, 0.0
        groups[-1].append(row)
        rows += size.rows
        cost += size.cost
    return groups


def _max_cost(sizes: Sequence[RowSize], ranks: int) -> float:
    """Return the cost above which groups could not be dealt out evenly. A row may cost more."""
    return sum(size.cost for size in sizes) / ranks / _PIECES_PER_RANK


_PIECES_PER_RANK = 4
_MAX_PADDING = 0.06  # share of the longest row; the mean over a group is then about half


def group_cost(rows: Sequence[RowSize]) -> float:
    """Return the cost of a micro-batch. A padding position costs half a token of its row, whose
    `visuals` do not count for that. They cost once for all rows."""
    longest, costs = max(size.longest for size in rows), list[float]()
    for size in rows:
        of_visuals = sum(each.cost for each in size.visuals)
        padding = longest * size.rows / size.tokens - 1
        costs.append((size.cost - of_visuals) * (1 + 0.5 * padding) + of_visuals)
    return sum(costs) - sum(each.cost for each in repeated_visuals(rows))


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
        shift = costs[give] - (costs[take] if take is not None else 0.0)
        loads[high] -= shift
        loads[low] += shift
    return shares


def _best_exchange(
    shares: list[list[int]], costs: Sequence[float], loads: np.ndarray, high: int
) -> tuple[int, int, int | None] | None:
    """Return the exchange with another rank that makes the larger of the two loads smallest."""
    best, exchange = loads[high] * (1 - 1e-6), None
    gives = np.array([[costs[g]] for g in shares[high]])
    for low in np.argsort(loads, kind="stable")[:16].tolist():
        if low == high:
            continue
        takes = [None, *shares[low]]
        shift = gives - np.array([0.0 if g is None else costs[g] for g in takes])
        after = np.maximum(loads[high] - shift, loads[low] + shift)
        after[shift <= 0] = np.inf
        give, take = divmod(int(after.argmin()), len(takes))
        if after[give, take] < best:
            best, exchange = after[give, take], (low, shares[high][give], takes[take])
    return exchange


@dataclass(frozen=True)
class Balance:
    """The padding and the balance of a plan."""

    padding: float  # share of all positions that is padding
    imbalance: float  # cost of the busiest rank over the mean
    busiest: float  # cost of the busiest rank, padding included
    micro_batches: int


def measure(plan: Plan, sizes: Sequence[RowSize]) -> Balance:
    """Measure the padding and the balance of a plan."""
    real = sum(size.tokens for size in sizes)
    loads = _loads(plan, sizes)
    imbalance = max(loads) / (sum(loads) / len(loads))
    padding = 1 - real / padded_tokens(plan, sizes)
    return Balance(padding, imbalance, max(loads), sum(map(len, plan)))


def padded_tokens(plan: Plan, sizes: Sequence[RowSize]) -> int:
    """Count all positions of a plan's micro-batches: tokens and padding."""
    groups = itertools.chain(*plan)
    return sum(
        sum(sizes[row].rows for row in group) * max(sizes[row].longest for row in group)
        for group in groups
    )


def naive_plan(sizes: Sequence[RowSize], ranks: int, rows: int) -> Plan:
    """Plan in the usual way: rows in order, equally many to each rank, cut at a number of rows."""
    bounds = [len(sizes) * rank // ranks for rank in range(ranks + 1)]
    return [
        [list(range(s, min(s + rows, end))) for s in range(start, end, rows)]
        for start, end in itertools.pairwise(bounds)
    ]


@dataclass(frozen=True)
class WorkModel:
    """Operations per unit; a multiplication and an addition count as two."""

    per_token: int  # decoder without attention; only those experts that a token goes to
    attentions: tuple[tuple[Attention, int], ...]  # each kind, and the layers that have it
    per_supervised: int  # the heads, and the last MLP of a model without experts
    per_patch_of_tower: int  # linear layers of the vision tower
    per_patch_of_mergers: int  # linear layers of its mergers
    per_patch_pair: int  # attention within a frame
    vision: VisionSizes

    @staticmethod
    @lru_cache(maxsize=8)
    def from_sizes(sizes: ModelSizes) -> "WorkModel":
        """Return the work of a model of these sizes."""
        text, vision = sizes.text, sizes.vision
        tower, mergers = _matrices(sizes, Part.vision), _matrices(sizes, Part.merger)
        at_end = text.layers[-1].mlp_flops_per_token(text.hidden) if text.ends_at_places else 0
        layers, per_token, heads = text.layers, -at_end, 1
        if sizes.trains_mtp and sizes.mtp is not None:
            # A product joins the embedding and the last layer's output, at all places.
            layers, heads = (*layers, sizes.mtp.layer), 2
            per_token = 4 * text.hidden**2
        per_token += sum(layer.flops_per_token(text.hidden) for layer in layers)
        return WorkModel(
            per_token=per_token,
            attentions=tuple(
                Counter(x.mixer for x in layers if isinstance(x.mixer, Attention)).items()
            ),
            per_supervised=2 * heads * text.hidden * text.vocab + at_end,
            per_patch_of_tower=2 * tower,
            per_patch_of_mergers=2 * (mergers // vision.merge**2),
            per_patch_pair=4 * vision.depth * vision.query,
            vision=vision,
        )

    @property
    def per_patch(self) -> int:
        """Operations of the linear layers of the vision tower, mergers included."""
        return self.per_patch_of_tower + self.per_patch_of_mergers

    def row(self, lengths: Sequence[int], supervised: int, patches: int, patch_pairs: int) -> int:
        """Return the operations of the forward of a row, or of several rows together, of these
        lengths. A backward takes twice as many."""
        return (
            self.per_token * sum(lengths)
            + self.attention(lengths, self.vision.token_pairs(patches, patch_pairs))
            + self.per_supervised * supervised
            + self.visual(patches, patch_pairs)
        )

    def attention(self, lengths: Sequence[int], picture_pairs: int) -> int:
        """Return the operations of the attention of all layers."""
        return sum(n * each.pair_flops(lengths, picture_pairs) for each, n in self.attentions)

    def visual(self, patches: int, patch_pairs: int) -> int:
        """Return the operations of the vision tower for these patches."""
        return self.per_patch * patches + self.per_patch_pair * patch_pairs

    def row_size(
        self, tokens: int, supervised: int, patches: int, patch_pairs: int, images: int = 0
    ) -> RowSize:
        """Return the size of a row with these counts, as planning needs it."""
        cost = float(self.row((tokens,), supervised, patches, patch_pairs))
        return RowSize(tokens, cost, patches, images)

    def example_size(self, example: Example) -> RowSize:
        """Return the size of the rows of a record, as planning needs it."""
        rows = [
            self.row_size(
                *(len(row.ids_S), row.num_supervised, row.num_patches, row.patch_pairs),
                len(row.image_grids),
            )
            for row in example
        ]
        return RowSize.of_rows(rows)


def _matrices(sizes: ModelSizes, part: Part) -> int:
    """Count the values in the matrices of a part, without its embedding tables."""
    return sum(
        tensor.num_values
        for tensor in sizes.tensors
        if tensor.part is part and len(tensor.shape) > 1 and not tensor.is_table
    )
