# .venv/bin/python -m pytest tests/planner/test_split.py
"""parallel.layers_per_stage=auto: the split of the layers with the fastest steps, alike on all
ranks, shown in the run and in its config.yaml, and safe to resume from."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_vlm.config import load_config, read_saved
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.planner.auto_layout import decide, plan_layout, settle_layers, with_layout_of
from megatron_vlm.planner.hardware import CPU
from megatron_vlm.planner.layer_split import (
    choose_layer_split,
    even_split,
    most_layers,
    replicas_of,
    step_seconds,
)
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import estimate
from megatron_vlm.planner.pipeline_time import ReplicaCosts, Stages
from megatron_vlm.planner.row_sizes import BatchSizes, RowSample, assumed_mix, mix_of
from megatron_vlm.planner.search import Cluster
from tests.model.test_parity import layout
from tests.run.test_train import command, go_pooled, run_rank, steps_of, values
from tests.support.error_fields import raises
from tests.support.runs import Case
from tests.support.sets import write_set
from tests.support.tables import in_one_test

ALIKE = np.arange(9)[None]  # layers of one kind before each layer


def replica(generator: random.Random, micro_batches: int) -> ReplicaCosts:
    """Return random costs: micro-batches without pictures, a heavy tower, a heavy head."""

    def pairs(most: float, zeros: float = 0.0) -> np.ndarray:
        times = range(micro_batches)
        forward = [generator.random() * most * (generator.random() >= zeros) for _ in times]
        return np.stack([forward, 2 * np.array(forward)], axis=1)

    hidden, features = np.ones(micro_batches), np.zeros(micro_batches)
    layer, first, last = pairs(1) + 0.1, pairs(12, zeros=0.3), pairs(5)
    return ReplicaCosts(layer[None], first, last, hidden, features, 1e9, ALIKE)


def splits(pp: int, layers: int) -> list[tuple[int, ...]]:
    every = itertools.product(range(layers + 1), repeat=pp)
    return [split for split in every if sum(split) == layers and all(split[1:])]


@in_one_test("seed", range(40))
def test_it_is_never_slower_than_the_even_split_and_nearly_the_best_there_is(seed):
    generator = random.Random(seed)
    pp, layers = generator.randint(2, 4), generator.randint(4, 8)
    steps = [
        [replica(generator, generator.randint(1, 9)) for _ in range(generator.randint(1, 2))]
        for _ in range(2)
    ]
    even = even_split(pp, layers)
    chosen = choose_layer_split(steps, (layers,) * pp, even)
    assert sum(chosen) == layers and all(chosen[1:])
    seconds = step_seconds(steps, chosen)
    assert seconds <= step_seconds(steps, even)
    # Moving one layer at a time cannot reach every split, so the best one may be 3 % faster.
    assert seconds <= 1.03 * min(step_seconds(steps, split) for split in splits(pp, layers))
    limits = tuple(generator.randint(layers // pp + 1, layers) for _ in range(pp))
    bounded = choose_layer_split(steps, limits, even)
    assert sum(bounded) == layers
    assert all(count <= limit for count, limit in zip(bounded, limits, strict=True))


def test_the_even_split_is_the_least_that_is_found(monkeypatch):
    """The even split wins where no layer is moved after the first guess, which alone is slower now
    and then."""
    monkeypatch.setattr("megatron_vlm.planner.layer_split._ROUNDS", 0)
    for seed in range(40):
        steps, even = [[replica(random.Random(seed), 5)]], even_split(4, 8)
        chosen = choose_layer_split(steps, (8,) * 4, even)
        assert step_seconds(steps, chosen) <= step_seconds(steps, even)


def test_a_heavy_tower_takes_layers_from_its_stage(tiny):
    """A layer takes 1, the tower 4, and with 8 layers that makes 12: [2, 6] gives each stage 6."""
    ones = np.ones((8, 2))
    heavy = ReplicaCosts(ones[None], 4 * ones, 0 * ones, np.zeros(8), np.zeros(8), 1.0, ALIKE)
    assert choose_layer_split([[heavy]], (8, 8), (4, 4)) == (2, 6)
    # The second stage has no memory for six.
    assert choose_layer_split([[heavy]], (8, 5), (4, 4)) == (3, 5)
    light = ReplicaCosts(ones[None], 0 * ones, 0 * ones, np.zeros(8), np.zeros(8), 1.0, ALIKE)
    assert choose_layer_split([[light]], (8, 8), (4, 4)) == (4, 4)


def test_layers_of_two_kinds_cost_what_they_are():
    """Every third layer takes 10, all others take 1."""
    ones = np.ones((4, 2))
    is_third = np.arange(6) % 3 == 2
    before_KL = np.cumsum([[0, *~is_third], [0, *is_third]], axis=1)
    kinds = np.stack([ones, 10 * ones])
    costs = ReplicaCosts(kinds, 0 * ones, 0 * ones, np.zeros(4), np.zeros(4), 1.0, before_KL)
    assert costs.stages((2, 4)).forward_GS[0].tolist() == [2, 22]
    assert costs.stages((3, 3)).forward_GS[0].tolist() == [12, 12]
    assert costs.mean_layer_seconds == pytest.approx(4 * 2 * (4 * 1 + 2 * 10) / 6)
    assert choose_layer_split([[costs]], (6, 6), (4, 2)) == (3, 3)


def test_the_time_between_stages_counts():
    forward_GS = np.ones((3, 2))
    stages = Stages(forward_GS, forward_GS, 0 * forward_GS)
    assert stages.seconds == max(task.end for task in stages.tasks) == 8
    # By hand: F0, B0, F1 ... each arrive half a unit late.
    assert replace(stages, sent_GS=np.full((3, 2), 0.5)).seconds == 10


def test_features_travel_until_their_layers_have_added_them():
    """Three sets of features leave the tower for the first micro-batch; the second has no
    pictures."""
    ones = np.ones((2, 2))
    hidden, features = np.array([10.0, 10.0]), np.array([3, 0])
    some = ReplicaCosts(ones[None], ones, ones, hidden, features, 10.0, ALIKE)
    stages = some.stages((1, 1, 4))
    assert stages.sent_GS[:, :2].tolist() == [[3, 2], [1, 1]]  # the last stage sends nothing on
    assert some.stages((0, 2, 4)).sent_GS[0, :2].tolist() == [4, 2]
    assert stages.forward_GS.tolist() == [[2, 1, 5], [2, 1, 5]]


def test_memory_decides_what_a_stage_can_hold(tiny):
    path = tiny(layers=6)
    sizes, cfg = read_sizes(path), Case(parallel={"pp": 2}).config(path)
    batches = [BatchSizes(2, 200, 100, 256, 256)] * 4

    def total(split: tuple[int, ...], stage: int) -> int:
        return estimate(with_split(split), batches)[stage].total

    def with_split(split: tuple[int, ...]) -> ModelLayout:
        return ModelLayout(cfg, sizes, decided_dims(split), 4)

    limit = total((2, 4), 0)
    assert total((3, 3), 0) > limit >= total((3, 3), 1)
    limits = most_layers(with_split((3, 3)), batches, limit)
    assert limits is not None and limits[0] == 2 and total((6 - limits[1], limits[1]), 1) <= limit
    assert most_layers(with_split((3, 3)), batches, total((0, 6), 0) - 1) is None
    assert most_layers(with_split((3, 3)), batches, None) == (6, 6)


def decided_dims(split: tuple[int, ...]) -> ParallelDims:
    return ParallelDims(1, len(split), 1, 1, split)


HEAVY = {"layers": 6, "vision_depth": 6, "vision_hidden": 64, "vision_intermediate": 256}


def test_it_is_decided_by_the_rows(tiny):
    path = tiny(**HEAVY)
    cfg = layout(pp=2, layers_per_stage="auto").config(path)
    sizes, platform = read_sizes(path), pick_platform("cpu")

    def of(*rows: BatchSizes) -> tuple[int, ...]:
        return decide(cfg, sizes, 2, platform, RowSample(rows, "made-up rows"))[0]

    text, picture = BatchSizes(1, 300, 30, 0, 0), BatchSizes(1, 80, 30, 256, 256, 256**2)
    few = of(picture, picture, text)
    assert few[0] < 3 <= of(text)[0]
    steps = RowSample((picture, picture, text), "").steps(cfg.train, sizes, 1)
    replicas = replicas_of(ModelLayout(cfg, sizes, decided_dims((3, 3)), 4), steps, CPU)
    assert few == min(splits(2, 6), key=lambda split: step_seconds(replicas, split))


def test_a_worker_without_a_run_assumes_rows(tiny):
    path = tiny(**HEAVY)
    sizes, platform = read_sizes(path), pick_platform("cpu")
    cfg = layout(pp=2, layers_per_stage="auto").config(path)
    layers = settle_layers(cfg, sizes, 2, platform).parallel.layers_per_stage
    assert sum(layers) == 6 and layers[0] < 3
    plain = layout(pp=2).config(path)
    assert settle_layers(plain, sizes, 2, platform) is plain


def test_other_words_are_refused():
    for value in ("even", "[1,a]", "[1.5,2.5]", "3", "true"):
        with raises(ConfigError, key="parallel.layers_per_stage", allowed_has="[0,12,12,12]"):
            load_config(["model.path=x", f"parallel.layers_per_stage={value}"])
    cfg = load_config(["model.path=x", "parallel.layers_per_stage=auto"])
    assert cfg.parallel.layers_per_stage == "auto"


@pytest.mark.full
def test_a_run_decides_once_for_all_ranks_and_resumes(tiny, pool, tmp_path):
    """The losses are those of the list in its output, and another split goes on from there."""
    write_set(tmp_path)
    path = tiny(**HEAVY)
    auto, two = "parallel.layers_per_stage=auto", ["train.steps=2", "checkpoint.export=false"]
    status, out, err = go_pooled(pool, 2, tmp_path, path, "auto", auto, *two)
    assert status == 0, err
    saved = read_saved(tmp_path / "auto").parallel.layers_per_stage
    assert sum(saved) == 6 and saved[0] < 3
    assert f"parallel.layers_per_stage=auto is {saved}, by rows (23 of 23 records" in out
    assert json.dumps(f"auto is {saved}")[1:-1] in (tmp_path / "auto/metrics.jsonl").read_text()
    checkpoint = tmp_path / "auto" / "checkpoints" / "step-00000002"
    assert read_saved(checkpoint).parallel.layers_per_stage == saved
    override = f"parallel.layers_per_stage={json.dumps(saved).replace(' ', '')}"
    status, _, err = go_pooled(pool, 2, tmp_path, path, "list", override, *two)
    assert status == 0, err
    first = values(steps_of(tmp_path / "auto"))
    assert first == values(steps_of(tmp_path / "list"))
    # Both runs go on: the first one unchanged, the other one with the even split.
    status, out, err = go_pooled(pool, 2, tmp_path, path, "auto", auto, "train.steps=3")
    assert status == 0 and "resumed from" in out, err
    status, _, err = go_pooled(pool, 2, tmp_path, path, "list", "train.steps=3")
    assert status == 0, err
    resumed, even = (values(steps_of(tmp_path / run))[2] for run in ("auto", "list"))
    assert resumed[1] == pytest.approx(even[1], rel=1e-5)


@pytest.mark.full
def test_a_run_plans_its_whole_layout_once(tiny, pool, tmp_path):
    """The given degree stays, all ranks have the same layout, and a resumed run keeps it."""
    write_set(tmp_path)
    path, auto = tiny(**HEAVY), ["parallel=auto", "checkpoint.export=false"]
    status, out, err = go_pooled(pool, 4, tmp_path, path, "whole", *auto, "train.steps=2")
    assert status == 0, err
    saved = read_saved(tmp_path / "whole")
    assert saved.parallel.auto == () and (saved.parallel.pp, saved.parallel.tp) == (2, 1)
    assert "parallel=auto is parallel.tp=1 parallel.pp=2" in out and "predicted step" in out
    assert saved.train.micro_batch_tokens == 400  # as given
    assert read_saved(tmp_path / "whole/checkpoints/step-00000002") == saved
    # The layout is that of the checkpoint, whatever would be planned now.
    before = replace(saved, parallel=replace(saved.parallel, layers_per_stage=[1, 5]))
    cfg = load_config(command(tmp_path, path, "whole", *auto)[4:])
    assert with_layout_of(cfg, before, 4, 6).parallel == before.parallel
    assert with_layout_of(cfg, before, 3, 6) is None
    sizes = read_sizes(path)
    mix = assumed_mix(sizes, 512)
    planned, _ = plan_layout(cfg, sizes, 4, pick_platform("cpu"), mix)
    assert planned.parallel.layers_per_stage != [1, 5]
    # A machine without enough memory may still plan for itself, and for others.
    small = Cluster(4, 2.0**20, CPU)
    with raises(ConfigError, key="model.path", problem_has="does not fit"):
        plan_layout(cfg, sizes, 4, pick_platform("cpu"), mix, small)
    status, out, err = go_pooled(pool, 4, tmp_path, path, "whole", *auto, "train.steps=3")
    assert status == 0, err
    assert "parallel=auto keeps the layout of the checkpoint: TP 1, PP 2" in out
    assert "settings changed since step-00000002: train.steps=3, was 2\n" in out
    assert read_saved(tmp_path / "whole").parallel == saved.parallel


def test_what_is_wrong_with_the_data_ends_all_ranks(tiny, pool, tmp_path):
    write_set(tmp_path)
    bad = "data.train=" + str(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    auto = "parallel.layers_per_stage=auto"
    words = command(tmp_path, tiny(), "bad", auto, bad)[4:]
    for status, _, err in pool.run(run_rank, 2, words):
        assert status == 2 and "data.train: none of the 1 records" in err


def test_a_sample_stands_for_the_data(tiny, tmp_path):
    path = tiny()
    file = write_set(tmp_path)
    cfg = load_config([f"model.path={path}", f"data.train={file}", "data.cache_dir=null"])
    mix = mix_of(cfg, read_sizes(path))
    assert len(mix.rows) == 23 and mix.origin == "23 of 23 records of data.train"
    assert sum(row.patches > 0 for row in mix.rows) == 17
    steps = mix.steps(cfg.train, read_sizes(path), 2)
    assert len(steps) == 2  # eight rows each, over two replicas
    assert sum(batch.rows for step in steps for share in step for batch in share) == 16
    without = load_config([f"model.path={path}"])
    assert mix_of(without, read_sizes(path)).origin.startswith("assumed, two of three")
