# .venv/bin/python -m pytest tests/planner/test_qwen3_5.py
"""Plans for Qwen3.5: the released sizes, the limits of TP, and layers of two kinds."""

import importlib
import re
from math import prod
from pathlib import Path

import pytest

from megatron_vlm.cli import main
from megatron_vlm.config import load_config
from megatron_vlm.config.schema import Config, ModelConfig, TrainConfig
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family import read_sizes
from megatron_vlm.family.decoder_layers import FullAttention
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.auto_layout import decide
from megatron_vlm.planner.hardware import CPU, gpu
from megatron_vlm.planner.layer_split import even_split, most_layers, replicas_of, step_seconds
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import estimate
from megatron_vlm.planner.row_sizes import BatchSizes, RowSample, assumed_mix
from megatron_vlm.planner.search import Cluster, search
from tests.model.test_parity import layout
from tests.planner.test_split import splits
from tests.support.suites import full

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_what_fits")


def drafts(sizes: ModelSizes) -> int:
    """Return the values of the MTP head, which released files have and no run trains: a
    linear layer, three norms, and a layer with full attention."""
    text = sizes.text
    [layer] = [each for each in text.kinds if isinstance(each.mixer, FullAttention)]
    values = sum(prod(t.shape) for param in layer.params(text.hidden) for t in param.tensors)
    return 2 * text.hidden**2 + 3 * text.hidden + values


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3.5-0.8B", 0.87),
        ("Qwen3.5-2B", 2.27),
        ("Qwen3.5-4B", 4.66),
        ("Qwen3.5-9B", 9.65),
        ("Qwen3.5-27B", 27.78),
        ("Qwen3.5-35B-A3B", 35.95),
        ("Qwen3.5-122B-A10B", 125.09),
        ("Qwen3.5-397B-A17B", 403.40),
    ],
)
def test_released_models_have_these_sizes(name, billions, maker):
    """Up to 27B, the numbers of values are the published ones. Those of the larger models follow
    from their sizes, and no published number was compared."""
    sizes = maker.sizes_of_model(name)
    assert (sizes.num_values + drafts(sizes)) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.full
def test_recipes_of_equal_models_are_equal():
    for size, *releases in (("27b", "3_5", "3_6", "3_8"), ("35b_a3b", "3_5", "3_6")):
        models = (f"model=qwen{release}_{size}" for release in releases)
        one, *others = (load_config([model, "model.path=x"]) for model in models)
        assert all(other == one for other in others)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("Qwen3.5-2B", {1, 2}), full("Qwen3.5-9B", {1, 2, 4}), full("Qwen3.5-27B", {1, 2, 4})],
)
def test_no_more_ranks_of_tp_than_heads_of_keys(name, degrees, maker):
    sizes = maker.sizes_of_model(name)
    train = TrainConfig(global_batch_size=64, micro_batch_tokens=8192, precision="bf16")
    cfg = Config(model=ModelConfig(path=""), train=train)
    cluster = Cluster(8, 141 * GIB, gpu("H100", 989e12))
    found = search(cfg, sizes, assumed_mix(sizes, cfg.data.max_tokens), cluster)
    assert {candidate.dims.tp for candidate in found.fitting} == degrees


def test_the_command_plans_a_model_of_two_kinds_of_layers(maker, tmp_path, capsys):
    maker.qwen3_5_config(*maker.QWEN3_5["Qwen3.5-9B"]).save_pretrained(tmp_path)
    words = ["plan", "model=qwen3_5_9b", f"model.path={tmp_path}", "--gpus", "8"]
    assert main([*words, "--memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"The fastest: parallel.tp=[124] ", out)
    layers = re.search(r"tp=\d pp=2 dp=\d, layers \[(\d+), (\d+)\]: one step of one replica", out)
    assert layers and sum(map(int, layers.groups())) == 32


def test_memory_for_layers_counts_for_layers_of_any_kind(tiny):
    """A delta net takes more memory than attention here. The last two layers of the model are one
    of each, and a stage in the middle may get two delta nets."""
    path = tiny(family="qwen3_5", layers=8)
    sizes, cfg = read_sizes(path), layout(pp=3).config(path)
    planned = ModelLayout(cfg, sizes, ParallelDims(1, 3, 1, 1, (3, 2, 3)), 4)
    batches = [BatchSizes(2, 200, 100, 256, 256)] * 4

    def stages(split: tuple[int, ...]) -> list[int]:
        return [stage.total for stage in estimate(planned.with_layers(split), batches)]

    tried = 0
    for limit in {stages(split)[1] for split in splits(3, 8)}:
        most = most_layers(planned, batches, limit)
        for split in splits(3, 8) if most else ():
            if all(count <= limit for count, limit in zip(split, most, strict=True)):
                assert max(stages(split)) <= limit, (split, most)
                tried += 1
    assert tried > 20


LONG = BatchSizes(1, 700, 20, 0, 0)


def test_auto_takes_layers_for_what_they_cost(tiny):
    """In long rows, full attention takes about as long as three delta nets. The fourth and the
    eighth of eight layers have it, and with two layers on each stage, two stages wait for the two
    others."""
    path = tiny(family="qwen3_5", layers=8, head_dim=64, heads=8, hidden=32, intermediate=32)
    cfg = layout(pp=4, layers_per_stage="auto").config(path)
    sizes, platform = read_sizes(path), pick_platform("cpu")
    rows = RowSample((LONG,) * 8, "made-up rows")
    chosen = decide(cfg, sizes, 4, platform, rows)[0]
    even = even_split(4, 8)
    steps = rows.steps(cfg.train, sizes, 1)
    replicas = replicas_of(ModelLayout(cfg, sizes, ParallelDims(1, 4, 1, 1, even), 4), steps, CPU)
    delta, full, _last = replicas[0][0].layer_KG2[:, 0, 0]
    assert 2 < full / delta < 5
    best = min(step_seconds(replicas, split) for split in splits(4, 8))
    assert even == (2, 2, 2, 2) and step_seconds(replicas, chosen) == best
    assert best < 0.95 * step_seconds(replicas, even)
