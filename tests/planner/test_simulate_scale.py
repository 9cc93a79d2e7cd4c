# .venv/bin/python -m pytest tests/planner/test_simulate_scale.py
"""The simulation of benchmarks/simulate_scale.py against cases done by hand."""

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale_model import (
    Machine,
    Rows,
    Setup,
    bubble,
    checkpoint,
    draw_rows,
    exchange,
    forward_seconds,
    make_moe_setup,
    make_setup,
    replica_seconds,
    travel,
)
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.family.qwen3_vl.dense import sizes_of
from megatron_vlm.planner.pipeline_time import one_f_one_b, schedule

ROOT = Path(__file__).parents[2]
EIGHT = make_setup("8B", (36, 4096, 12288, 32), 2, 4, 8192)


@pytest.mark.parametrize(("stages", "count"), [(1, 5), (2, 2), (2, 7), (4, 4), (4, 16), (8, 3)])
def test_equal_micro_batches_have_the_textbook_bubble(stages, count):
    assert bubble(np.full((count, stages), 0.25)) == pytest.approx((stages - 1) / count)


def test_the_order_of_a_stage_is_warm_up_pairs_and_cool_down():
    f, b = True, False
    assert schedule(1, 3, 3) == ((f, 0), (f, 1), (b, 0), (f, 2), (b, 1), (b, 2))
    assert schedule(0, 4, 2) == ((f, 0), (f, 1), (b, 0), (b, 1))
    assert schedule(3, 4, 2) == ((f, 0), (b, 0), (f, 1), (b, 1))


def test_a_stage_of_twice_the_work_by_hand():
    # Stage 0 (2, 4), stage 1 (1, 2). 0: F0 0-2, F1 2-4; 1: F0 2-3, B0 3-5, F1 5-6, B1 6-8.
    # 0: B0 5-9, B1 9-13.
    forward_GS = np.array([[2.0, 1.0], [2.0, 1.0]])
    assert one_f_one_b(forward_GS, 2 * forward_GS) == 13
    assert bubble(forward_GS) == pytest.approx(13 * 2 / 18 - 1)
    # The other way round. 0: F0 0-1, F1 1-2; 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13. 0: B1 13-15.
    assert one_f_one_b(forward_GS[:, ::-1], 2 * forward_GS[:, ::-1]) == 15


def test_unequal_micro_batches_by_hand():
    # Costs 3 and 1. 0: F0 0-3, F1 3-4, B0 12-18, B1 18-20; 1: F0 3-6, B0 6-12, F1 12-13, B1 13-15.
    forward_GS = np.array([[3.0, 3.0], [1.0, 1.0]])
    assert one_f_one_b(forward_GS, 2 * forward_GS) == 20
    # Cheap first. 0: F0 0-1, F1 1-4, B0 4-6, B1 13-19; 1: F0 1-2, B0 2-4, F1 4-7, B1 7-13.
    assert one_f_one_b(forward_GS[::-1], 2 * forward_GS[::-1]) == 19


ROWS = Rows(*(np.array(column) for column in ([100, 60, 40], [10, 0, 5], [64, 0, 4], [900, 0, 16])))
NO_FLOOR = Machine(peak_flops=1e12, utilisation=0.5, layer_s=0.0)


def test_work_goes_to_its_stage_and_padding_costs():
    work, speed = WorkModel.from_sizes(sizes_of(EIGHT.config)), 0.5e12 * 2
    uneven = dataclasses.replace(EIGHT, layers_S=(0, 12, 12, 12))
    seconds_S = forward_seconds([[0, 2]], ROWS, uneven, NO_FLOOR)[0] * speed
    decoder = 2 * (work.per_token * 100 + work.per_token_pair * 5050)
    head = work.per_supervised * 15
    expected = [work.per_patch * 68 + work.per_patch_pair * 916, *[decoder / 3] * 2]
    assert seconds_S.tolist() == pytest.approx([*expected, decoder / 3 + head])


def test_a_layer_takes_its_least_time():
    (seconds_S,) = forward_seconds([[1]], ROWS, EIGHT, Machine(layer_s=1.0))
    assert seconds_S.tolist() == pytest.approx([9, 9, 9, 9], rel=1e-3)  # without an image
    (seconds_S,) = forward_seconds([[2]], ROWS, EIGHT, Machine(layer_s=1.0))
    assert seconds_S.tolist() == pytest.approx([9 + 27, 9, 9, 9], rel=1e-3)


def test_a_replica_is_the_sum_of_its_micro_batches_and_may_have_none():
    one = Setup("8B", EIGHT.config, 2, (36,), 8192)
    seconds = replica_seconds([[[0], [1]], [], [[2]]], ROWS, one, NO_FLOOR)
    work = WorkModel.from_sizes(sizes_of(one.config))
    rows = zip(
        *(column.tolist() for column in dataclasses.astuple(ROWS)), strict=True
    )  # tokens, supervised, patches, pairs
    first, second, third = (3 * work.row(*row) / 1e12 for row in rows)
    assert seconds == pytest.approx([first + second, 0, third])
    # What the others wait for the fullest, by hand: it is the row of 100 and that of 60 tokens.
    assert max(seconds) - seconds[2] == pytest.approx(first + second - third)


def test_exchange_by_hand():
    values = EIGHT.parameters.of_gpu(EIGHT)
    layers = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
    vocabulary = 151936 * 4096
    assert values[1:] == pytest.approx([layers / 8, layers / 8, (layers / 4 + vocabulary) / 2])
    assert values[0] == (layers / 4 + vocabulary) / 2 + EIGHT.parameters.tower
    machine = Machine(network=1e9, hop_s=0.5)
    done = exchange(EIGHT, 2, machine)
    assert done.reduce_s == pytest.approx(0.5 * 4 * values[0] / 1e9 + 0.5, rel=1e-6)
    assert done.gather_s == pytest.approx(0.5 * 2 * values[0] / 1e9 + 0.5, rel=1e-6)
    # A backward hides what it lasts, but for the last bucket of 40 M values.
    assert exchange(EIGHT, 2, machine, 1.0).overlapped_s == pytest.approx(done.reduce_s - 1)
    assert exchange(EIGHT, 2, machine, 99.0).overlapped_s == pytest.approx(0.08 + 0.5)
    assert (
        exchange(EIGHT, 8192, machine, 1e9).overlapped_s == exchange(EIGHT, 8192, machine).reduce_s
    )


MOE = make_moe_setup("MoE", (6, 2048, 768, 32), 2, 8192)  # three layers on each stage


def test_tokens_travel_to_experts_by_hand():
    """200 tokens of two ranks: each sends half of 100 x 8 rows of 2048 bf16 numbers, four times in
    each of three layers. On 16 ranks, seven of them are beside it and eight on another machine."""
    machine = dataclasses.replace(NO_FLOOR, link=1e6, network=1e5, hop_s=0.5)
    two = travel([[[0]], [[1], [2]]], ROWS, MOE, machine)
    size = 4 * 3 * 100 * 8 * 2048 * 2
    assert (two.inside, two.outside) == (size / 2, 0)
    assert two.seconds == pytest.approx(size / 2 / 1e6 + 0.5 * 4 * 3 * 2)  # two micro-batches
    many = travel([[[0]], [[1], [2]], *[[]] * 14], ROWS, MOE, machine)
    size /= 8  # a sixteenth of the tokens, where it was a half
    assert (many.inside, many.outside) == (size * 7 / 16, size * 8 / 16)
    assert many.seconds == pytest.approx(size / 2 / 1e5 + 12)


def test_ranks_that_share_experts_wait_for_the_longest_by_hand():
    (long,), (middle,), (short,) = (
        forward_seconds([[row]], ROWS, MOE, NO_FLOOR)[:, 1].tolist() for row in range(3)
    )
    done = travel([[[0]], [[1], [2]]], ROWS, MOE, NO_FLOOR)
    assert done.compute_s == pytest.approx(3 * (long + middle + short) / 2)
    assert done.waiting_s == pytest.approx(3 * (long + short) - done.compute_s)


def test_compute_of_experts_is_of_those_that_a_token_goes_to():
    dense = make_setup("dense", (6, 2048, 8 * 768, 32), 1, 2, 8192)  # with 8 key/value heads, not 4
    work, of_dense = (WorkModel.from_sizes(setup.sizes).per_token for setup in (MOE, dense))
    assert work - of_dense == 2 * 6 * (128 * 2048 - 2 * 2048 * 4 * 128)  # a router more


def test_checkpoint_traffic_by_hand():
    machine = Machine(files=1e12, files_machine=1e9, creates=1e3, stat_s=0.01, to_host=1e9)
    total = 12 * EIGHT.parameters.total
    done = checkpoint(EIGHT, 16, machine)  # 128 files from 16 machines
    assert done.files == 128 and done.total == total
    assert EIGHT.parameters.total == pytest.approx(8.767e9, rel=1e-4)
    assert done.stop_sync == pytest.approx(total / 16e9 + 0.128 + 1.28)
    assert done.stop_async == pytest.approx(done.largest / 1e9 + 1.28)
    assert done.find == pytest.approx(1.28 + total / 16e9)
    # All files for their digests, the weights of a stage on each machine, the moments.
    read = total + 16 * 4 * EIGHT.parameters.total / 4 + 8 * EIGHT.parameters.total
    assert done.read == pytest.approx(read)
    assert done.lost(dataclasses.replace(machine, save_every_s=done.stop_sync))[0] == 0.5


def test_rows_are_heavy_tailed_and_within_the_limit():
    rows = draw_rows(20_000)
    assert rows.tokens_R.max() <= 8192 and rows.tokens_R.min() >= 16
    assert (rows.patches_R == 0).mean() == pytest.approx(0.2, abs=0.02)
    seen_R = rows.patches_R // 4
    assert ((rows.tokens_R - seen_R) * 2 // 5 == rows.supervised_R).all()
    assert rows.tokens_R.mean() > 2 * np.median(rows.tokens_R)
    # Some were cut, and no image of more than 31 x 31 tokens is left over a smaller sum.
    assert (rows.tokens_R > 8192 - 31 * 31).mean() > 0.01
    assert (rows.pairs_R <= rows.patches_R * 4 * 31 * 31).all()


@pytest.mark.slow
def test_it_prints_tables_and_writes_the_document_and_the_picture(tmp_path):
    document = tmp_path / "scaling.md"
    document.write_text("before\n<!-- scaling begin -->stale words<!-- scaling end -->\nafter\n")
    command = [sys.executable, "benchmarks/simulate_scale.py", "64", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Qwen3-VL 32B" in done.stdout
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale words" not in text
    scaling = [line.split(" | ") for line in text.splitlines() if line.startswith("| 64 | ")]
    scaling = [cells for cells in scaling if len(cells) == 12]
    assert len(scaling) == 4  # two models, rows that grow and rows that do not
    for cells in scaling:
        four, one, ours, perfect = (float(cell) for cell in cells[2:6])
        assert four > one > ours >= perfect
    picture = ElementTree.parse(tmp_path / "scaling.svg").getroot()
    curves = [e for e in picture.iter() if e.tag.endswith("path") and "," in e.get("d", "")]
    assert len(curves) == 16
