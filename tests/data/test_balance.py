# .venv/bin/python -m pytest tests/data/test_balance.py
"""Tests of micro-batches of near-equal cost with little padding, and of their collation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megatron_vlm.data.batches.balance import (
    Limits,
    RowSize,
    level,
    measure,
    naive_plan,
    plan_batch,
)
from megatron_vlm.data.batches.collate import collate, filler_batch
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.data.batches.order import Order, order_of_all
from megatron_vlm.data.even_split import deal
from megatron_vlm.data.tokens.row import IGNORE, Row, place_row
from megatron_vlm.errors import DataError
from megatron_vlm.family.qwen import mrope_positions
from megatron_vlm.family.qwen3_vl.model import sizes_of
from megatron_vlm.family.spec import Tokens
from tests.support.batches import MIXED, make_rows, token_ids

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
        length = len(row.row.ids_S)
        assert np.array_equal(tokens_S5[:length], row.tokens_S5)
        assert (tokens_S5[length:] == [0, IGNORE, 0, 0, 0]).all()
    for name in ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3"):
        parts = [getattr(row, name) for row in chosen if getattr(row, name) is not None]
        assert torch.equal(getattr(batch, name), torch.cat(parts)) if parts else not parts


def test_bytes_and_floats_do_not_mix():
    rows = make_rows(MIXED[:2])
    one = Row(
        rows[0].ids_S, rows[0].labels_S, rows[0].pixel_values_PC.byte(), rows[0].image_grid_I3
    )
    placed = [place_row(row, TOKENS, "row") for row in (one, rows[1])]
    with pytest.raises(DataError, match=r"torch\.float32, torch\.uint8"):
        collate(placed, range(2))


def test_a_filler_has_no_loss_and_no_image():
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
    assert work.per_token == 2 * decoder
    assert work.per_supervised == 2 * sizes["lm_head.weight"]
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
