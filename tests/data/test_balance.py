# .venv/bin/python -m pytest tests/data/test_balance.py
"""Tests of micro-batches of near-equal cost with little padding, and of their collation."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megatron_vlm.data.batches.balance import (
    Limits,
    Plan,
    RowSize,
    VisualSize,
    WorkModel,
    group_cost,
    level,
    measure,
    naive_plan,
    plan_batch,
)
from megatron_vlm.data.batches.collate import collate, filler_batch
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.data.batches.order import Order, order_of_all
from megatron_vlm.data.even_split import deal
from megatron_vlm.data.tokens.row import IGNORE, Row, place_row
from megatron_vlm.errors import DataError
from megatron_vlm.family.qwen.model import mrope_positions
from megatron_vlm.family.qwen3_vl.model import sizes_of
from megatron_vlm.family.spec import Tokens
from tests.support.batches import MIXED, SHARED, make_rows, token_ids

IDS = token_ids()
TOKENS = Tokens(512, IDS.image, IDS.video, 2, mrope_positions)
RANKS = 64


def heavy_tail(rows: int, seed: int) -> list[RowSize]:
    """Return rows with 1 to 47 images, mostly with few, and the work of a 2B model."""
    generator = np.random.default_rng(seed)
    sizes = []
    for count in np.clip(generator.zipf(1.6, rows), 1, 47):
        patches = int((generator.integers(8, 40, count) * generator.integers(8, 40, count)).sum())
        tokens = int(patches // 4 + generator.lognormal(4.5, 0.7) + 20)
        sizes.append(RowSize(tokens, 2.8e9 * tokens + 1.2e5 * tokens**2 + 8e8 * patches, patches))
    return sizes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [512, 1024])
def test_heavy_tail_over_64_ranks(rows, seed):
    sizes = heavy_tail(rows, seed)
    balanced = measure(plan_batch(sizes, RANKS, Limits(tokens=8192)), sizes)
    naive = measure(naive_plan(sizes, RANKS, 4), sizes)
    assert balanced.padding < 0.03
    assert balanced.imbalance < 1.05
    assert naive.padding > 0.5 and naive.imbalance > 1.5


SIZES = st.lists(
    st.builds(RowSize, st.integers(1, 5000), st.floats(1, 1e12)), min_size=1, max_size=60
)


@settings(max_examples=200)
@given(SIZES, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 9000)), st.integers(1, 8))
def test_a_plan_has_every_row_once_and_keeps_its_limits(sizes, ranks, tokens, rows):
    plan = plan_batch(sizes, ranks, Limits(rows, tokens))
    assert len(plan) == ranks
    groups = [group for share in plan for group in share]
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    for group in groups:
        longest = max(sizes[row].tokens for row in group)
        if tokens is None:
            assert len(group) <= rows
        elif len(group) > 1:  # a row above the limit is alone
            assert longest * len(group) <= tokens
    assert plan == plan_batch(sizes, ranks, Limits(rows, tokens))
    if len(sizes) >= ranks:
        assert all(plan)  # no rank idles while another has several rows


@pytest.mark.parametrize(("rows", "micro", "ranks"), [(8, 2, 4), (32, 4, 4), (64, 4, 8), (5, 2, 1)])
def test_a_fixed_number_of_rows_is_no_worse_than_plain_order(rows, micro, ranks):
    gains = []
    for seed in range(9):
        sizes = heavy_tail(rows, seed)
        balanced = measure(plan_batch(sizes, ranks, Limits(micro)), sizes)
        naive = measure(naive_plan(sizes, ranks, micro), sizes)
        gains.append(naive.busiest / balanced.busiest)
    assert min(gains) >= 1 and max(gains) > 1.05


def test_equal_rows_are_dealt_out_equally():
    plan = plan_batch([RowSize(100, 1.0)] * 16, 4, Limits(rows=4))
    assert [[len(group) for group in share] for share in plan] == [[4]] * 4


def of_group(key: int, lengths: list[int], tower: float = 200.0) -> list[RowSize]:
    """Return the rows of a prompt with a picture of 400 patches; a token costs 1."""
    visual = VisualSize(key, 400, tower)
    return [RowSize(n, n + tower, 400, 1, visuals=(visual,)) for n in lengths]


def groups_of(plan: Plan, sizes: list[RowSize]) -> list[list[tuple[int, int]]]:
    """Return the key and the tokens of the rows of each micro-batch."""
    return [
        [(sizes[r].visuals[0].key, sizes[r].tokens) for r in g] for share in plan for g in share
    ]


def figures(plan: Plan, sizes: list[RowSize]) -> BatchFigures:
    return BatchFigures.from_plan(sizes, plan)


def without_visuals(sizes: list[RowSize]) -> list[RowSize]:
    return [replace(size, visuals=()) for size in sizes]


@pytest.mark.parametrize("limits", [Limits(rows=4), Limits(tokens=4 * 360)], ids=["rows", "tokens"])
def test_rows_of_a_group_meet_where_that_saves_more_than_padding_costs(limits):
    """Lengths of two groups alternate, so by length alone the rows of both would be mixed."""
    sizes = of_group(0, [*range(300, 340, 10)] * 2) + of_group(1, [*range(305, 345, 10)] * 2)
    plan = plan_batch(sizes, 1, limits)
    assert sorted(row for group in plan[0] for row in group) == list(range(16))
    assert all(len({key for key, _ in group}) == 1 for group in groups_of(plan, sizes))
    assert {len(group) for group in plan[0]} == {4}
    found, apart = figures(plan, sizes), figures(plan, without_visuals(sizes))
    assert (found.patches, found.shared_patches) == (16 * 400, 12 * 400)
    assert found.work == apart.work - 12 * 200 == sum(size.tokens for size in sizes) + 4 * 200
    alone = RowSize.of_rows([sizes[row] for row in plan[0][0]])
    assert group_cost([alone]) == pytest.approx(group_cost([sizes[row] for row in plan[0][0]]))
    assert (alone.cost, alone.patches) == (alone.tokens + 200, 400)


def test_rows_of_uneven_length_are_kept_together_in_smaller_numbers_or_not_at_all():
    """Each group has short, middle and long answers. A tower as cheap as nothing is not worth any
    padding, and the plan is that of rows without pictures."""
    lengths, limits = [100, 101, 500, 501, 900, 901, 1300, 1301], Limits(rows=4)
    for tower, together in ((1e-6, 1), (100.0, 2), (1e6, 4)):
        sizes = [row for key in range(4) for row in of_group(key, lengths, tower)]
        plan = plan_batch(sizes, 1, limits)
        keys = [Counter(key for key, _ in group) for group in groups_of(plan, sizes)]
        assert {min(counter.values()) for counter in keys} == {together}
        if together == 1:
            assert plan == plan_batch(without_visuals(sizes), 1, limits)


@pytest.mark.parametrize("limits", [Limits(rows=4), Limits(tokens=3000)], ids=["rows", "tokens"])
def test_rows_with_pictures_of_their_own_are_planned_as_ever(limits):
    sizes = [
        row for key, size in enumerate(heavy_tail(64, 0)) for row in of_group(key, [size.tokens])
    ]
    plan = plan_batch(sizes, 4, limits)
    assert plan == plan_batch(without_visuals(sizes), 4, limits)
    found = figures(plan, sizes)
    assert found.shared_patches == 0 and found == figures(plan, without_visuals(sizes))


GROUPS = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(max_examples=100)
@given(
    GROUPS,
    st.integers(0, 9),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9000)),
    st.integers(1, 8),
)
def test_no_plan_of_rows_that_share_is_worse_than_that_of_rows(lengths, texts, ranks, tokens, rows):
    sizes = [row for key, group in enumerate(lengths) for row in of_group(key, group)]
    sizes += [RowSize(50 * (n + 1), 50.0 * (n + 1)) for n in range(texts)]
    limits = Limits(rows, tokens)
    plan = plan_batch(sizes, ranks, limits)
    groups = [group for share in plan for group in share]
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    for group in groups:
        longest = max(sizes[row].tokens for row in group)
        assert len(group) <= (rows if tokens is None else max(1, tokens // longest))
    apart = plan_batch(without_visuals(sizes), ranks, limits)
    assert measure(plan, sizes).busiest <= measure(apart, sizes).busiest
    assert plan == plan_batch(sizes, ranks, limits)


def test_leveling_undoes_a_bad_deal():
    costs = [5.0, 5.0, 1.0, 1.0]
    loads = [sum(costs[group] for group in share) for share in level([[0, 1], [2, 3]], costs)]
    assert loads == [6.0, 6.0]
    assert deal([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [[0, 2, 4], [1, 3]]


def test_groups_are_cut_by_tokens_and_by_length():
    sizes = [RowSize(n, 1.0) for n in (100, 99, 98, 50, 49)] * 20

    def lengths(limit):
        (groups,) = plan_batch(sizes, 1, Limits(tokens=limit))
        return sorted(([sizes[row].tokens for row in group] for group in groups), reverse=True)

    assert lengths(200)[0] == [100, 100]
    assert max(map(len, lengths(10**9))) == 25  # a quarter of the work of the only rank
    assert not any(50 in group and 98 in group for group in lengths(10**9))


@pytest.mark.parametrize("seed", range(20))
def test_collation_copies_rows_and_pads_them(seed):
    """Positions, targets and ids of a row are proven in test_data.py."""
    generator = np.random.default_rng(seed)
    rows = make_rows(MIXED, seed=seed)
    chosen = [rows[i] for i in generator.permutation(len(rows))[: generator.integers(1, 9)]]
    placed = [place_row(row, TOKENS, "row") for row in chosen]
    batch = collate(placed, range(len(chosen)))
    assert batch.tokens_BS5.shape[:2] == (len(chosen), max(batch.lengths))
    for row, tokens_S5 in zip(placed, batch.tokens_BS5.numpy(), strict=True):
        length = len(row.ids_S)
        assert np.array_equal(tokens_S5[:length], row.tokens_S5)
        assert (tokens_S5[length:] == [0, IGNORE, 0, 0, 0]).all()
    for name in ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3"):
        parts = [getattr(row, name) for row in chosen if getattr(row, name) is not None]
        assert torch.equal(getattr(batch, name), torch.cat(parts)) if parts else not parts


def test_rows_with_the_same_pictures_have_them_once():
    """A picture of the same size is another one, and so are equal pixels of another tensor."""
    rows = make_rows(SHARED)
    assert (
        collate([place_row(row, TOKENS, "row") for row in rows[:2]], range(2)).visual_of_O is None
    )
    copied = replace(rows[4], pixel_values_PC=rows[4].pixel_values_PC.clone())
    placed = [place_row(row, TOKENS, "row") for row in (*rows[4:], copied)]
    batch = collate(placed, range(5))
    assert batch.visual_of_O.tolist() == [0, 1, 0, 0, 2, 3, 3, 3, 3]
    assert batch.image_grid_I3.tolist() == [[1, 4, 2]] * 3
    assert batch.video_grid_I3.tolist() == [[2, 4, 6]]
    pixels = [row.pixel_values_PC for row in (rows[4], rows[5], rows[4])]
    assert batch.pixel_values_PC.equal(torch.cat(pixels))
    assert batch.pixel_values_videos_PC is not None and len(batch.pixel_values_videos_PC) == 48


def test_bytes_and_floats_do_not_mix():
    rows = make_rows(MIXED[:2])
    one = Row(
        rows[0].ids_S, rows[0].labels_S, rows[0].pixel_values_PC.byte(), rows[0].image_grid_I3
    )
    placed = [place_row(row, TOKENS, "row") for row in (one, rows[1])]
    with pytest.raises(DataError, match=r"torch\.float32, torch\.uint8"):
        collate(placed, range(2))


def test_a_filler_has_neither_loss_nor_image():
    filler = filler_batch()
    assert filler.num_supervised == 0 and filler.pixel_values_PC is None and not filler.rows


def test_positions_of_a_long_row():
    assert mrope_positions(40_000, []).tolist() == [list(range(40_000))] * 3


def test_work_equals_the_parameters(tiny):
    """A weight costs two operations for each token or patch that uses it."""
    from transformers import Qwen3VLForConditionalGeneration

    config = AutoConfig.from_pretrained(tiny())
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    sizes = {name: param.numel() for name, param in model.named_parameters() if param.dim() > 1}
    work = WorkModel.from_sizes(sizes_of(config))
    decoder = sum(n for name, n in sizes.items() if "language_model.layers" in name)
    last = f"language_model.layers.{config.text_config.num_hidden_layers - 1}.mlp."
    at_end = sum(n for name, n in sizes.items() if last in name)
    assert at_end > 0 and work.per_token == 2 * (decoder - at_end)
    assert work.per_supervised == 2 * (sizes["lm_head.weight"] + at_end)
    blocks = sum(n for name, n in sizes.items() if "visual.blocks" in name or "patch_embed" in name)
    mergers = sum(n for name, n in sizes.items() if "merger" in name)
    assert work.per_patch == 2 * (blocks + mergers // 4)  # one merger runs for four patches


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_each_sample_by_its_weight(shuffle):
    order = Order((10, 4, 6), (1.0, 2.0, 0.5), 7, shuffle)
    half_counts = []
    for number in range(4):
        epoch = order.epoch(number).tolist()
        assert len(epoch) == len(order) == 10 + 8 + 3
        counts = [
            [epoch.count([source, i]) for i in range(n)] for source, n in enumerate((10, 4, 6))
        ]
        assert counts[0] == [1] * 10 and counts[1] == [2] * 4
        half_counts.append(counts[2])
    # With weight 0.5, two consecutive epochs have each sample once.
    for first in (0, 2):
        assert [a + b for a, b in zip(half_counts[first], half_counts[first + 1], strict=True)] == [
            1
        ] * 6


def test_order_depends_on_seed_and_epoch_alone():
    order = Order((100,), (1.0,), 0, True)
    same = Order((100,), (1.0,), 0, True)
    assert order.epoch(3).tolist() == same.epoch(3).tolist()
    assert order.epoch(3).tolist() != order.epoch(4).tolist()
    assert order.epoch(3).tolist() != Order((100,), (1.0,), 1, True).epoch(3).tolist()
    assert order_of_all((2, 1)).epoch(0).tolist() == [[0, 0], [0, 1], [1, 0]]
