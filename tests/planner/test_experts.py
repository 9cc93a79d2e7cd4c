# .venv/bin/python -m pytest tests/planner/test_experts.py
"""megatron-vlm plan for models with experts: EP among the degrees, and the traffic to the
experts."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_vlm.cli import main
from megatron_vlm.config import load_config
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.constraints import check_config
from megatron_vlm.planner.auto_layout import decide
from megatron_vlm.planner.flops import OpCount, micro_work
from megatron_vlm.planner.hardware import Machine, gpu
from megatron_vlm.planner.layer_split import most_layers, replicas_of
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import stage_memory
from megatron_vlm.planner.parameters import count
from megatron_vlm.planner.pipeline_time import ReplicaCosts
from megatron_vlm.planner.row_sizes import BatchSizes, RowSample, assumed_mix
from megatron_vlm.planner.search import Cluster, Found, _step_end_seconds, search
from tests.hf.test_moe_files import released_sizes
from tests.model.test_parity import layout

GIB = 2**30
H100 = gpu("H100", 989e12)
ALIKE = np.arange(9)[None]  # layers of one kind before each layer
SPEC = dict(experts=12, layers=4)
SPEEDS = dict(matmul=10, attention=5, moved=2, link=4, network=1, layer_s=0)
BY_HAND = Machine("by hand", **SPEEDS, devices=4)


def found(cfg: Config, sizes: ModelSizes, gpus: int, memory: float) -> Found:
    mix = assumed_mix(sizes, cfg.data.max_tokens)
    return search(cfg, sizes, mix, Cluster(gpus, memory, H100))


def test_every_layout_that_a_run_accepts_is_tried_and_no_other(tiny):
    path = tiny(**SPEC)
    sizes = read_sizes(path)
    cfg = load_config([f"model.path={path}", "train.global_batch_size=64"])
    accepted = set()
    for tp, pp, ep in ((tp, pp, ep) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for ep in range(9)):
        parallel = replace(cfg.parallel, tp=tp, pp=pp, ep=ep)
        try:
            dims = ParallelDims.create(parallel, 8, 4)
            check_config(replace(cfg, parallel=parallel), sizes, dims)
        except ConfigError:
            continue
        accepted.add((tp, pp, ep, dims.dp))
    fitting = found(cfg, sizes, 8, 80 * GIB).fitting
    tried = {(d.tp, d.pp, d.ep, d.dp) for d in (each.dims for each in fitting)}
    assert tried == accepted and len(tried) == 8  # EP divides 12 experts: 1, 2, 4 of 8 replicas
    for candidate in fitting:
        ep = f"parallel.ep={candidate.dims.ep}"
        assert (ep in candidate.overrides) == (candidate.dims.ep > 1)


def test_keys_replace_those_of_a_recipe(tiny):
    """Keys that are added to a recipe with EP and a list of layers give the layout that is
    meant."""
    path = tiny(**SPEC)
    recipe = ["parallel.ep=2", "parallel.pp=2", "parallel.layers_per_stage=[1,3]"]
    cfg = load_config([f"model.path={path}", "train.global_batch_size=64", *recipe])
    fitting = found(cfg, read_sizes(path), 4, 80 * GIB).fitting
    assert fitting
    for candidate in fitting[:3]:
        keys = [key.replace("'", "") for key in candidate.overrides]
        again = load_config([f"model.path={path}", *recipe, *keys])
        assert ParallelDims.create(again.parallel, 4, 4) == candidate.dims


def test_an_all_to_all_by_hand():
    """Links carry 4 bytes a second and the network 1, with 4 devices in a machine."""
    assert BY_HAND.exchange(80, 1) == 0
    assert BY_HAND.exchange(80, 2) == 40 / 4  # one half stays
    assert BY_HAND.exchange(80, 4) == 60 / 4
    assert BY_HAND.exchange(80, 8) == 40  # one half goes to the other machine
    assert BY_HAND.exchange(80, 16) == 60
    fast = replace(BY_HAND, network=100.0)
    assert fast.exchange(80, 8) == 30 / 4  # the links take longer than the network
    work = OpCount(matmul=20, reduced=8, exchanged=80)
    assert BY_HAND.seconds(work) == 2 + 2
    assert BY_HAND.seconds(work, 2) == 2 + 2 + 10


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_each_token_goes_to_its_experts_and_comes_back(dense_layers, tiny):
    """A token goes to 2 experts as 64 numbers of 2 bytes, and in a dense layer to none."""
    path = tiny(**SPEC, dense_layers=dense_layers)
    sizes, batch = read_sizes(path), BatchSizes(3, 100, 20, 64, 64)
    for recompute, again in (("none", 0), ("full", 1)):
        cfg = layout(recompute=recompute).config(path)
        layer = micro_work(laid_out(cfg, sizes), batch).layers[-1]  # the last has experts
        once = 2 * 2 * 300 * 64 * 2
        assert layer.forward.exchanged == once
        assert layer.backward.exchanged == (1 + again) * once
        dense = micro_work(laid_out(cfg, sizes), batch).layers[:dense_layers]
        assert [each.forward.exchanged for each in dense] == [0] * dense_layers
    dense = tiny()
    plain = micro_work(laid_out(layout().config(dense), read_sizes(dense)), batch)
    assert plain.layers[0].forward.exchanged == plain.layers[0].backward.exchanged == 0


def test_the_time_of_a_layer_has_the_all_to_all(tiny):
    path = tiny(**SPEC)
    cfg, sizes, batch = layout().config(path), read_sizes(path), BatchSizes(1, 100, 20, 0, 0)
    work = micro_work(laid_out(cfg, sizes), batch)
    alone, four, shared = (
        ReplicaCosts.at_degrees(laid_out(cfg, sizes, 8, ep), [batch], BY_HAND).layer_KG2[0, 0]
        for ep in (1, 4, 8)
    )
    fewer = (  # fewer experts, whose gradients are added up
        BY_HAND.seconds(OpCount(moved=moved(cfg, sizes, ep=1) - moved(cfg, sizes, ep=4)))
    )
    sent = BY_HAND.exchange(work.layers[0].forward.exchanged, 4)
    assert four[0] - alone[0] == pytest.approx(sent)
    assert four[1] - alone[1] == pytest.approx(sent - fewer)
    assert shared[0] > four[0]


def moved(cfg: Config, sizes: ModelSizes, ep: int) -> float:
    """Return the bytes that are moved to add the gradients of a layer to those of the step, with
    values of 2 bytes."""
    planned = laid_out(cfg, sizes, 8, ep)
    values, without = count(planned, 0).trained, count(planned.with_layers((0,)), 0).trained
    return (values - without) / 4 * (2 * 2 + 2 * 4)


def laid_out(
    cfg: Config, sizes: ModelSizes, dp: int = 1, ep: int = 1, itemsize: int = 2
) -> ModelLayout:
    return ModelLayout(cfg, sizes, ParallelDims(1, 1, dp, ep, (4,)), itemsize)


def test_replicas_that_share_experts_wait_for_each_other(tiny):
    def costs(*layer: float) -> ReplicaCosts:
        pairs = np.array([[each, 2 * each] for each in layer])
        ones = np.ones(len(layer))
        return ReplicaCosts(pairs[None], 0 * pairs, pairs / 2, ones, 0 * ones, 1.0, ALIKE)

    both = ReplicaCosts.together([costs(3, 1), costs(2, 2, 1)])
    assert both.layer_KG2.tolist() == [[[3, 6], [2, 4], [1, 2]]]
    assert both.last_G2.tolist() == [[1.5, 3], [1, 2], [0.5, 1]]
    assert both.hidden_G.tolist() == [1, 1, 1]
    # Four replicas, one of them without a row, are two pairs at EP 2, or each by itself.
    path = tiny(**SPEC)
    cfg, sizes = layout().config(path), read_sizes(path)
    long, short = BatchSizes(1, 500, 9, 0, 0), BatchSizes(1, 50, 9, 0, 0)
    step = [[long], [short, short], [short], []]
    pairs, singles = (replicas_of(laid_out(cfg, sizes, 4, ep), [step], H100)[0] for ep in (2, 1))
    assert [len(each.first_G2) for each in pairs] == [2, 1]
    assert [len(each.first_G2) for each in singles] == [1, 2, 1]


def test_gradients_of_experts_travel_between_the_ranks_that_hold_them(tiny):
    """The 4 replicas have different experts at EP 4; at EP 2 one other replica has the same
    ones."""
    path = tiny(**SPEC)
    cfg, sizes = layout(distributed_optimizer=False).config(path), read_sizes(path)
    machine = replace(BY_HAND, moved=float("inf"))
    for ep, factor in ((4, 0.0), (2, 1.0)):  # a ring of two sends each value once
        planned = laid_out(cfg, sizes, 4, ep, itemsize=4)
        counts = count(planned, 0)
        assert counts.of_experts == 4 * 3 * 64 * 40 * 12 // ep
        rest = counts.gradients - counts.of_experts
        assert _step_end_seconds(planned, 0, machine) == pytest.approx(
            4 * (1.5 * rest + factor * counts.of_experts) / 4
        )


def test_memory_for_layers_grows_with_ep(tiny):
    path = tiny(**SPEC)
    cfg, sizes = layout().config(path), read_sizes(path)
    batches = [BatchSizes(1, 100, 20, 0, 0)]
    limit = stage_memory(laid_out(cfg, sizes, 4, 4), 0, batches).total
    assert most_layers(laid_out(cfg, sizes, 4, 1), batches, limit) is None
    assert most_layers(laid_out(cfg, sizes, 4, 4), batches, limit) == (4,)


def test_auto_knows_experts(tiny):
    """A heavy tower takes layers from its stage, also where experts are shared out."""
    path = tiny(**SPEC, vision_depth=6, vision_hidden=64, vision_intermediate=256)
    cfg = layout(pp=2, dp=2, ep=2, layers_per_stage="auto").config(path)
    picture = BatchSizes(1, 80, 30, 256, 256, 256**2)
    mix, platform = RowSample((picture,), "made-up rows"), pick_platform("cpu")
    layers = decide(cfg, read_sizes(path), 4, platform, mix)[0]
    assert sum(layers) == 4 and layers[0] < 2


@pytest.mark.full
def test_the_command_shows_ep_and_says_what_is_assumed(tmp_path, capsys):
    released_sizes("30B-A3B", tmp_path)
    page = tmp_path / "plan.html"
    words = ["plan", "model=qwen3_vl_30b_a3b", f"model.path={tmp_path}", "--gpus", "16"]
    assert main([*words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tokens/s +s/step +pp +ep +dp +layers", out)
    assert re.search(r"The fastest: parallel.tp=1 parallel.pp=\d+ parallel.ep=\d+ ", out)
    assert "Experts: all have equally many tokens; replicas that share them wait" in out
    assert re.search(r"tp=1 pp=\d+ ep=\d+ dp=\d+, layers .*: one step of one replica", out)
    assert "<th>ep</th>" in page.read_text() and "<th>tp</th>" not in page.read_text()


@pytest.mark.full
def test_where_no_layout_with_experts_fits_it_says_what_would(tmp_path, capsys):
    """Training takes 520 GiB: 31e9 values of 2 + 4 + 12 bytes. Adapters in attention leave the
    experts as they are."""
    released_sizes("30B-A3B", tmp_path)
    words = ["plan", f"model.path={tmp_path}", "train.precision=bf16", "--gpus", "2"]
    assert main(words) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "does not fit on 2 GPUs of 80.0 GiB: the leanest layout, parallel.tp=1" in message
    fits = r"what fits: \d+ such GPUs \(parallel.tp=1 parallel.pp=\d+ parallel.ep="
    assert re.search(fits, message)
    assert "adapters alone trained, with lora=default (parallel" in message
    assert main([*words, "lora=default"]) == 0  # as the message suggests
    capsys.readouterr()
    attention = ["lora=default", "lora.targets=[attention]"]
    assert main([*words, *attention, "--memory", "24GiB"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(r"gradients 0.0 GiB, optimizer 0.\d GiB.*what fits: \d such GPUs", message)
    assert "a base in 4 bits, with lora.base=nf4 (parallel" in message
    assert main([*words, *attention, "--memory", "24GiB", "lora.base=nf4"]) == 0
    capsys.readouterr()
    assert main([*words, "--memory", "24GiB"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "over a base in 4 bits, with lora=qlora (parallel" in message
