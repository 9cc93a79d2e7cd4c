# .venv/bin/python -m pytest tests/lora/test_checkpoint.py
"""Checkpoints of adapters hold only what is trained, bit for bit, at any layout."""

import json
import re
from dataclasses import replace

import pytest
import torch

from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.checkpoint.save_load import load
from megatron_vlm.errors import CheckpointError
from megatron_vlm.training.worker import MegatronWorker
from tests.checkpoint.test_checkpoint import Part, bf16, go, whole
from tests.lora.test_lora import marked
from tests.model.test_parity import layout
from tests.support.moe import edited
from tests.support.runs import Case
from tests.support.suites import full, slow

EVERY = ("attention", "mlp", "merger", "vision_attention", "vision_mlp")
LORA = dict(rank=4, alpha=8.0, targets=EVERY, dropout=0.2)
EXPERTS = dict(experts=8, layers=4)
DELTA_NET = dict(family="qwen3_5", head_dim=64)
HEAD = dict(LORA, targets=("attention", "head"))
ODD, TIED = dict(vocab=509), dict(vocab=509, tied=True)
MERGER = dict(rank=4, targets=("attention",), train=("merger",), dropout=0.1)


def with_lora(case: Case, **lora: object) -> Case:
    return replace(case, lora=lora)


SAME = {
    # Recomputation and the chunks of a stage must draw the same dropout as well.
    "tp2-pp2": with_lora(layout(tp=2, pp=2, recompute="full", recompute_vision=True), **LORA),
    "dp2-bf16": with_lora(bf16(layout(dp=2)), **LORA),
    "merger-pp2x2": with_lora(layout(pp=2, virtual_stages=2), **MERGER),
    "experts-ep2": with_lora(layout(dp=2, ep=2, recompute="full"), **MERGER),
    "in-experts-ep2": with_lora(
        bf16(layout(dp=2, ep=2, recompute="full")), rank=4, targets=("attention", "mlp")
    ),
    "delta-net-tp2-pp2": with_lora(
        layout(tp=2, pp=2, layers_per_stage=[1, 3], recompute="full"), **LORA
    ),
    "head-tp2-bf16": with_lora(bf16(layout(tp=2)), **HEAD),
    "head-pp2x2": with_lora(layout(pp=2, virtual_stages=2), **HEAD),
    "head-dp2": with_lora(layout(dp=2), **HEAD),
}
FULL = {"tp2-pp2", "in-experts-ep2", "delta-net-tp2-pp2", "head-tp2-bf16"}
SIZES = {
    **dict.fromkeys(("experts-ep2", "in-experts-ep2"), EXPERTS),
    **dict.fromkeys(("head-tp2-bf16", "head-pp2x2", "head-dp2"), TIED),
    "delta-net-tp2-pp2": DELTA_NET,
}


@pytest.mark.parametrize("name", marked(SAME, ("merger-pp2x2",), FULL))
def test_resumed_is_bit_for_bit_the_run_without_a_break(name, pool, tiny, tmp_path):
    case, sizes = SAME[name], SIZES.get(name, {})
    path, vocab = tiny(**sizes), sizes.get("vocab", 512)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    part = Part(straight, range(3), None, (2, 3), vocab=vocab)
    figures = pool.run(go, case.world, path, case, part)[0]
    part = Part(resumed, range(2, 3), step_folder(straight, 2), (3,), vocab=vocab)
    assert pool.run(go, case.world, path, case, part)[0] == figures[2:]
    actual, expected = step_folder(resumed, 3), step_folder(straight, 3)
    for file in [path.name for path in expected.iterdir()]:
        assert (actual / file).read_bytes() == (expected / file).read_bytes(), file
    names = {key.removeprefix("exp_avg/") for key in whole(expected) if "exp_avg_sq" not in key}
    frozen = [tensor for tensor in names if ".lora_" not in tensor]
    if case.lora.get("train"):
        assert frozen and all("merger" in tensor for tensor in frozen)
    else:
        assert frozen == []


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [
        full(layout(tp=2, pp=2, layers_per_stage=[0, 4]), layout(dp=2), {}),
        (layout(dp=2, ep=2), layout(pp=2), EXPERTS),
        full(layout(tp=2, pp=2), layout(dp=2), DELTA_NET),
        slow(layout(dp=4, ep=2), layout(dp=4, ep=4), EXPERTS),
        slow(layout(dp=4, ep=4, distributed_optimizer=False), layout(pp=2, dp=2, ep=2), EXPERTS),
        slow(layout(dp=2), layout(tp=2), {}),
        slow(layout(tp=2), layout(pp=2, virtual_stages=2), {}),
        slow(layout(dp=2, ep=2), layout(pp=2), {**DELTA_NET, "experts": 4}),
        full(layout(tp=2), layout(dp=2), TIED),
        full(layout(dp=2), layout(tp=2, pp=2), ODD),
    ],
)
def test_another_layout_holds_the_same_bits(first, second, sizes, pool, tiny, tmp_path):
    path, lora, vocab = tiny(**sizes), dict(LORA, train=()), sizes.get("vocab", 512)
    if "experts" in sizes:
        lora |= dict(targets=("attention", "mlp", "merger"), dropout=0.0)
    if "vocab" in sizes:
        lora |= HEAD
    first, second = with_lora(first, **lora), with_lora(second, **lora)
    part = Part(tmp_path / "a", range(1), None, (1,), vocab=vocab)
    pool.run(go, first.world, path, first, part)
    before = step_folder(tmp_path / "a", 1)
    part = Part(tmp_path / "b", range(1, 1), before, (1,), vocab=vocab)
    pool.run(go, second.world, path, second, part)
    actual, expected = whole(step_folder(tmp_path / "b", 1)), whole(before)
    assert actual.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []
    assert sum(f.stat().st_size for f in before.iterdir()) < 2**21  # the model has 3 MB
    for kind in ("", "exp_avg/", "exp_avg_sq/") if "vocab" in sizes else ():
        assert len(actual[f"{kind}base_model.model.lm_head.lora_B.weight"]) == vocab


def loaded(path: str, case: Case, folder, training: bool = True) -> CheckpointError:
    worker = MegatronWorker(case.config(path), training)
    with pytest.raises(CheckpointError) as caught:
        load(worker, folder)
    return caught.value


@pytest.fixture(scope="module")
def saved(pool, tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("saved")
    pool.run(go, 1, tiny(), with_lora(layout(), **LORA), Part(run, range(1), None, (1,)))
    return step_folder(run, 1)


@pytest.mark.full
def test_other_adapters_and_other_weights_are_refused(pool, tiny, tmp_path, saved):
    def error(path=tiny(), **lora) -> CheckpointError:
        return pool.run(loaded, 1, path, with_lora(layout(), **lora), saved)[0]

    faults = error(**dict(LORA, rank=8, alpha=16.0)).found.values()
    assert any(re.search(r"\[32, 4\] .*\[32, 8\]", fault) for fault in faults)
    scaled = error(**dict(LORA, alpha=16.0))
    assert (scaled.place, scaled.key, scaled.found) == (str(saved), "lora.alpha", 16.0)
    assert re.search(r"by 4, .*by 2$", scaled.problem)
    name = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"
    without = error(rank=0)
    assert (without.key, without.found) == ("lora.rank", 0) and "run=FOLDER" in without.remedy
    whole = error(**dict(LORA, targets=("attention",), train=("merger",)))
    assert sum(".merger." in each and ".lora_" not in each for each in whole.found) >= 4
    fewer = error(**dict(LORA, targets=("attention", "merger", "vision_attention", "vision_mlp")))
    assert len(fewer.found) == 24 and name in fewer.found
    norm = {"model.language_model.norm.weight": torch.full((64,), 2.0)}
    other = edited(tiny(), tmp_path / "other", norm)
    replaced = error(str(other), **LORA)
    assert (replaced.key, replaced.found) == ("model.path", str(other))
    state = json.loads((saved / "state.json").read_text())
    assert state["lora"]["scale"] == 2.0


def test_whole_weights_beside_adapters_are_not_dropped(pool, tiny, tmp_path):
    """Whole weights are not dropped where nothing is trained either, as in an evaluation."""
    pool.run(go, 1, tiny(), with_lora(layout(), **MERGER), Part(tmp_path, range(1), None, (1,)))
    without = with_lora(layout(), **dict(MERGER, train=()))
    for training in (True, False):
        [error] = pool.run(loaded, 1, tiny(), without, step_folder(tmp_path, 1), training)
        assert "model.visual.deepstack_merger_list.0.linear_fc1.bias" in error.found


def figures(pool, path: str, case: Case, tmp_path) -> list[tuple[float, float]]:
    return pool.run(go, case.world, path, case, Part(tmp_path, range(2)))[0]


@pytest.mark.full
@pytest.mark.parametrize("targets", [("attention", "mlp"), ("head",)])
def test_dropout_is_the_same_whatever_the_layout(targets, pool, tiny, tmp_path):
    """A mask that is drawn anew, or that TP ranks do not share, would change the norm."""
    language = dict(LORA, targets=targets)
    plain = figures(pool, tiny(), with_lora(layout(), **language), tmp_path)
    other = with_lora(layout(tp=2, pp=2, virtual_stages=2, recompute="full"), **language)
    actual = figures(pool, tiny(), other, tmp_path)
    assert actual == [pytest.approx(step, rel=2e-5) for step in plain]
    without = figures(pool, tiny(), with_lora(layout(), **dict(language, dropout=0.0)), tmp_path)
    # In the first step B is zero, and so is the gradient of A. Dropout changes the gradient of B.
    assert abs(without[0][1] / plain[0][1] - 1) > 1e-3


@pytest.mark.full
def test_dropout_is_the_same_where_the_tower_is_recomputed(pool, tiny, tmp_path):
    tower = dict(LORA, targets=("merger", "vision_attention", "vision_mlp"))
    stored = figures(pool, tiny(), with_lora(layout(), **tower), tmp_path)
    again = figures(pool, tiny(), with_lora(layout(recompute_vision=True), **tower), tmp_path)
    assert again == [pytest.approx(step, rel=2e-5) for step in stored]
