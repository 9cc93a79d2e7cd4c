# .venv/bin/python -m pytest tests/commands/test_plan_command.py
"""megatron-vlm plan: layouts that fit, the fastest first; the drawing of the pipeline; and changes
that help where nothing fits."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_vlm.cli import main
from megatron_vlm.commands.plan.plan_report import pipeline_timeline
from megatron_vlm.config import load_config
from megatron_vlm.distributed.device import peak_of
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.planner.advice import fitting_sets, rank_layouts, switch_costs
from megatron_vlm.planner.auto_layout import with_candidate
from megatron_vlm.planner.flops import OpCount
from megatron_vlm.planner.hardware import Machine, gpu
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import USABLE, check_offload, estimate, host_need
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.planner.row_sizes import assumed_mix
from megatron_vlm.planner.search import Cluster, Found, refine_split, search
from megatron_vlm.report.html import draw_parts, script_of
from megatron_vlm.report.terminal import timeline_text
from tests.support.error_fields import raises
from tests.support.report_facts import Page, check_self_contained
from tests.support.sets import write_set
from tests.support.suites import full, in_turn, quick
from tests.support.tables import in_one_test

GIB = 2**30
H100 = gpu("H100", 989e12)


@pytest.fixture(scope="module")
def eight(tiny, tmp_path_factory):
    """Return a folder with the sizes of Qwen3-VL 8B and no weights."""
    folder = tmp_path_factory.mktemp("eight") / "model"
    shutil.copytree(tiny(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= dict(num_hidden_layers=36, hidden_size=4096, head_dim=128)
    config["text_config"] |= dict(intermediate_size=12288, vocab_size=151936)
    config["text_config"] |= dict(num_attention_heads=32, num_key_value_heads=8)
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    config["vision_config"] |= dict(depth=27, hidden_size=1152, intermediate_size=4304)
    config["vision_config"] |= dict(num_heads=16, out_hidden_size=4096)
    config["vision_config"]["deepstack_visual_indexes"] = [8, 16, 24]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def question(path: str, gpus: int, memory: int, *overrides: str):
    cfg = load_config([f"model.path={path}", "train.global_batch_size=64", *overrides])
    sizes = read_sizes(path)
    mix = assumed_mix(sizes, cfg.data.max_tokens)
    return cfg, sizes, mix, Cluster(gpus, memory * GIB, H100)


@cache
def found(path: str, gpus: int, memory: int, *overrides: str) -> Found:
    return search(*question(path, gpus, memory, *overrides))


def test_layouts_use_all_gpus_fit_and_come_fastest_first(eight):
    result, (*_, mix, cluster) = found(eight, 8, 80), question(eight, 8, 80)
    assert len(result.fitting) > 10 and result.leanest is None
    speeds = [candidate.tokens_per_s for candidate in result.fitting]
    assert speeds == sorted(speeds, reverse=True)
    for candidate in result.fitting:
        assert candidate.dims.world_size == 8 and candidate.need <= USABLE * 80 * GIB
        assert candidate.dims.num_layers == 36 and all(each.nccl for each in candidate.memory)
        assert 0 <= candidate.bubble < 0.8 and (candidate.bubble > 0.01) == (candidate.dims.pp > 1)
    keys = [(candidate.dims, candidate.cfg.model, candidate.step_s) for candidate in result.fitting]
    assert len(set(keys)) == len(keys)
    piped = next(candidate for candidate in result.fitting if candidate.dims.pp > 1)
    assert refine_split(piped, mix, cluster).tokens_per_s >= 0.999 * piped.tokens_per_s


FIXED = {
    "parallel.tp=4": lambda each: each.dims.tp == 4,
    "parallel.pp=2 parallel.layers_per_stage=[10,26]": lambda each: (
        each.dims.layers_per_stage == (10, 26)
    ),
    "parallel.layers_per_stage=null parallel.pp=4": lambda each: (
        each.dims.layers_per_stage == (9, 9, 9, 9)
    ),
    "model.recompute=full": lambda each: each.cfg.model.recompute == "full",
    "model.recompute_vision=true": lambda each: each.cfg.model.recompute_vision,
    "train.micro_batch_size=2": lambda each: each.cfg.train.micro_batch_tokens is None,
    "train.micro_batch_tokens=5000": lambda each: each.cfg.train.micro_batch_tokens == 5000,
}


QUICK = ("parallel.tp=4", "parallel.pp=2 parallel.layers_per_stage=[10,26]")


@pytest.mark.parametrize("words", quick(QUICK, FIXED, in_turn(3, "fixed keys")))
def test_with_auto_keys_that_are_given_stay(eight, words):
    what = question(eight, 8, 141, "parallel=auto", *words.split())
    layouts = rank_layouts(*what)
    assert all(map(FIXED[words], layouts))
    best = layouts[0]
    settled = with_candidate(what[0], best)
    chosen = replace(best, layout=replace(best.layout, cfg=settled))
    assert settled.parallel.auto == () and FIXED[words](chosen)
    dims = ParallelDims.create(settled.parallel, 8, 36)
    assert dims == best.dims


@pytest.mark.parametrize("lora", [(), full(("lora=default",))])
def test_auto_is_the_fastest_layout_of_the_plan(eight, lora):
    """An adapter needs a layout of its own, and the recipe's is replaced."""
    expected = rank_layouts(*question(eight, 8, 80, *lora))[0]
    recipe = ("model=qwen3_vl_8b", "parallel=auto")
    cfg, *rest = question(eight, 8, 80, *recipe, *lora)
    settled = with_candidate(cfg, rank_layouts(cfg, *rest)[0])
    assert ParallelDims.create(settled.parallel, 8, 36) == expected.dims
    assert settled.model.recompute == expected.cfg.model.recompute
    assert not lora or expected.need < found(eight, 8, 80).fitting[0].need


def test_fixed_keys_without_a_layout_are_named(eight):
    what = question(eight, 8, 141, "parallel=auto", "parallel.tp=3")
    with raises(ConfigError, key="train.global_batch_size", problem_has="parallel.tp=3"):
        rank_layouts(*what)


@pytest.mark.full
def test_fit_proposes_the_fastest_switches_that_fit(eight):
    """18 bytes of 8.77e9 parameters do not fit on one GPU. With the optimizer in host memory 6 do,
    and with moments in 8 bits as well it takes longer, since the host computes them."""
    what = question(eight, 1, 80)
    [best] = fitting_sets(*what)
    assert best.keys == ["optim.offload=1"] and best.best.need <= USABLE * 80 * GIB
    [cost] = switch_costs(best, *what[1:])
    assert cost.key == "optim.offload=1" and cost.slowdown > 0.3
    assert cost.saved == pytest.approx(12 * 8.77e9, rel=0.03)
    assert cost.host == pytest.approx(12 * 8.77e9, rel=0.03)
    tight = question(eight, 4, 39)
    sets = fitting_sets(*tight)
    assert [each.keys for each in sets] == [
        ["optim.states=int8"],
        ["optim.states=bf16"],
        ["optim.offload=0.5"],
    ]
    seconds = [each.best.step_s for each in sets]
    assert seconds == sorted(seconds) and search(*tight).fitting == ()
    cfg, sizes, mix, one = question(eight, 1, 141)
    # A machine with little memory of its own cannot take main weights.
    small = fitting_sets(cfg, sizes, mix, replace(one, host_memory=16.0 * GIB))
    assert all("optim.offload" not in each.switches for each in small)
    assert fitting_sets(cfg, sizes, mix, replace(one, memory=400.0 * GIB))[0].switches == {}
    # What the user has chosen stays.
    chosen = replace(cfg, optim=replace(cfg.optim, states="bf16"))
    assert all("optim.states" not in each.switches for each in fitting_sets(chosen, *what[1:]))
    with raises(ConfigError, key="model.path", problem_has="does not fit"):
        fitting_sets(cfg, sizes, mix, replace(one, memory=16.0 * GIB))


def test_an_optimizer_that_host_memory_cannot_take_is_refused(eight):
    cfg = load_config([f"model.path={eight}", "parallel.tp=2", "optim.offload=0.5"])
    planned = ModelLayout(cfg, read_sizes(eight), ParallelDims(2, 1, 2, 1, (36,)), 2)
    need = host_need(planned.dims, estimate(planned, []), 4)
    # Both TP ranks have the tower, whose 0.57e9 values are divided by DP alone.
    assert need == pytest.approx(6 * (8.77e9 + 0.57e9) + 4 * 2**25 * 6, rel=0.01)
    check_offload(planned, 4, 1.12 * need)
    check_offload(planned, 2, 0.56 * need)  # two machines
    with raises(ConfigError, key="optim.offload", found=0.5, problem_has="4 ranks need"):
        check_offload(planned, 4, 1.1 * need)


def test_seconds_of_work_by_hand():
    machine = Machine("by hand", matmul=10, attention=5, moved=2, link=4, network=1, layer_s=3)
    assert machine.seconds(OpCount(matmul=20, attention=10, moved=4, reduced=8)) == 2 + 2 + 2 + 2
    assert machine.seconds(OpCount(matmul=20, reduced=8, layers=2)) == 6 + 2  # kernels start late
    one_by_one = replace(machine, starts_ahead=False)  # a CPU
    assert one_by_one.seconds(OpCount(matmul=20, reduced=8, layers=2)) == 2 + 2 + 6
    assert machine.bandwidth_between(8) == 4 and machine.bandwidth_between(9) == 1
    assert gpu("L40S", 1e14).link < gpu("H100", 1e14).link


def test_memory_bandwidth_is_that_of_the_card():
    """The estimate for an H200 is scaled by the ratio of the bandwidths."""
    h200, h100, b200 = (gpu(name, peak_of(name)).moved for name in ("H200", "H100", "B200"))
    assert h200 == 989e12 / 200
    assert h100 / h200 == pytest.approx(3.35 / 4.8) and b200 / h200 == pytest.approx(8 / 4.8)
    assert gpu("NVIDIA H100 80GB HBM3", 989e12).moved == h100
    assert gpu("NVIDIA L40S", 362e12).link == gpu("L40S", 362e12).link


STAGES = Stages(np.ones((3, 2)), 2 * np.ones((3, 2)), np.zeros((3, 2)))
TIMELINE = pipeline_timeline(STAGES, "one step")


def test_the_pipeline_as_text():
    """The step takes 12 units by hand, with 1 for a forward and 2 for a backward."""
    lines = timeline_text(TIMELINE, width=12).splitlines()
    assert lines == ["stage 0  01..aa2bb.cc", "stage 1  .0aa1bb2cc.."]


def test_the_pipeline_as_svg():
    root = ElementTree.fromstring(draw_parts(TIMELINE)).find("svg")
    boxes = [group for group in root if group.tag == "g"]
    assert len(boxes) == 12
    rects = [box.find("rect") for box in boxes]
    last = max(float(rect.get("x")) + float(rect.get("width")) for rect in rects)
    assert last == pytest.approx(1000, abs=1)
    widths = {rect.get("class"): float(rect.get("width")) for rect in rects}
    assert widths["b"] == pytest.approx(2 * widths["f"], rel=0.05)


def test_the_command_prints_and_writes_a_page(eight, tmp_path, capsys):
    page = tmp_path / "plan.html"
    words = ["plan", f"model.path={eight}", "train.global_batch_size=64", "data.cache_dir=null"]
    words += [f"data.train={write_set(tmp_path)}", "--html", str(page), "--memory", "80GiB"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Rows: 23 of 23 records of data.train." in out and "593 TFLOP/s" in out
    assert re.search(r"The fastest: parallel.tp=\d parallel.pp=\d", out)
    assert "stage 1  " in out and f"wrote {page}" in out
    fastest = re.search(r"The fastest: (.*)", out)[1]
    load_config(["model.path=x", *fastest.replace("'", "").split()])
    drawn = Page(page.read_text())
    check_self_contained(drawn, (script_of("copy"),))
    # The pipeline is that of the fastest; of one stage, there is another with several.
    is_split = "parallel.pp=1" not in fastest
    assert len(drawn.all("svg")) == 2 - is_split and "Pipeline of the fastest" in drawn.words
    assert fastest in drawn.words and [b["title"] for b in drawn.all("button")] == [
        "copy the words"
    ]
    for word in drawn.words:  # the page and the output agree, except for the drawing
        if " GiB" in word and "one step" not in word:
            assert word.strip() in " ".join(out.split())


def test_a_recipe_is_planned_without_a_checkpoint(tiny, capsys):
    """The first lines say what a step has, which is little without the recipe."""
    for word, rows, layers in (("model=qwen3_vl_2b", 64, 28), (f"model.path={tiny()}", 8, 4)):
        assert main(["plan", word, "--gpus", "1"]) == 0
        first, _, rest = capsys.readouterr().out.partition("Layouts")
        assert f"a step has train.global_batch_size={rows} rows" in first
        assert f" {layers} " in rest
    assert main(["plan", "model=qwen3_vl_2b", "data.train=a.jsonl"]) == 2
    assert "model.path is not set" in capsys.readouterr().err


@pytest.mark.full
def test_where_nothing_fits_it_says_what_would(eight, capsys):
    words = ["plan", f"model.path={eight}", "train.global_batch_size=64", "--gpus", "1"]
    assert main(words) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "does not fit on 1 GPU of 80.0 GiB: the leanest layout" in message
    need = float(re.search(r"needs ([\d.]+) GiB on its fullest rank", message)[1])
    assert need == pytest.approx(149, abs=1) and "72.0 GiB can be used" in message
    count = int(re.search(r"what fits: (\d+) such GPUs", message)[1])
    assert found(eight, count, 80).fitting and not found(eight, count // 2, 80).fitting
    assert "1 of 192 GiB" in message
    assert "lora=default (" in message and "lora=qlora (" in message
    assert message.endswith("; megatron-vlm plan --fit tries switches together")


@in_one_test(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus=0; give from 1 to 4096"),
        (["--memory", "lots"], "--memory=lots; give the memory of one GPU, such as 80GiB"),
        (["--gpu", "H12"], "--gpu=H12: its peak is not known; choose from GB200, "),
        (["--efficiency", "60"], "--efficiency=60.0; give a fraction of the peak, above 0 to 1"),
        (["--gpu", "V100"], "--gpu=V100 has no bf16, in which a GPU trains; plan with "),
        (["--gpus", "7"], "train.global_batch_size=4"),
        (["parallel.cp=2"], "parallel.cp is not a configuration key; there is no context"),
    ],
)
def test_mistakes_are_explained(words, said, tiny, capsys):
    assert main(["plan", f"model.path={tiny(layers=3)}", "train.global_batch_size=4", *words]) == 2
    assert said in capsys.readouterr().err
