# .venv/bin/python -m pytest tests/planner/test_gemma4.py
"""Plans for Gemma 4: the released sizes, the pairs of tokens of a window and of an image, and the
operations that torch counts in transformers' own model."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_vlm.cli import main
from megatron_vlm.config.schema import Config, ModelConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.decoder_layers import Experts
from megatron_vlm.family.gemma4.model import gemma4_sizes
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import activations
from megatron_vlm.planner.row_sizes import BatchSizes
from tests.model.test_parity import layout
from tests.planner.test_memory import EVERY, check_memory, lora
from tests.support.gemma4 import MIXED, RowSpec, TinyGemma4, make_rows
from tests.support.gemma4_inputs import inputs_of
from tests.support.suites import full

ROOT = Path(__file__).parents[2]
GIB = 2**30
DENSE, EXPERTS = TinyGemma4(), TinyGemma4(experts=8)


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_what_fits")


@pytest.mark.parametrize(
    ("name", "billions", "of_a_token", "tensors"),
    [("Gemma 4 31B", 31.27, 31.27, 1188), ("Gemma 4 26B-A4B", 25.81, 4.40, 1013)],
)
def test_released_models_have_these_sizes(name, billions, of_a_token, tensors, maker):
    sizes = maker.sizes_of_model(name)
    idle = sum(
        each.ffn.idle_values(sizes.text.hidden)
        for each in sizes.text.layers
        if isinstance(each.ffn, Experts)
    )
    assert len(sizes.tensors) == tensors and sizes.tied
    assert sizes.num_values / 1e9 == pytest.approx(billions, abs=0.005)
    assert (sizes.num_values - idle) / 1e9 == pytest.approx(of_a_token, abs=0.005)


@cache
def sizes_of(tiny: TinyGemma4) -> ModelSizes:
    return gemma4_sizes(tiny.config())


def counted(row, tiny: TinyGemma4) -> tuple[int, list[int]]:
    """Return the operations of transformers' forward of a row, and the pairs that the mask of each
    layer lets through."""
    model, seen = tiny.model().eval(), []
    model.set_experts_implementation("eager")
    model.set_attn_implementation("sdpa")

    def watch(module, args, kwargs) -> None:
        mask_11SS = kwargs["attention_mask"]
        tokens = len(row.ids_S)
        causal = tokens * (tokens + 1) // 2  # without a mask, torch's kernel is causal
        assert mask_11SS is None or mask_11SS.dtype is torch.bool
        seen.append(causal if mask_11SS is None else int(mask_11SS.sum()))

    for layer in model.model.language_model.layers:
        layer.self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    counting = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counting:
        model(**inputs_of(model.config, row))
    by_module = {name: sum(each.values()) for name, each in counting.get_flop_counts().items()}
    # transformers writes the angles and the mean of a token's patches as products.
    aside = sum(by_module[name] for name in by_module if name.endswith((".rotary_emb", ".pooler")))
    return by_module["Global"] - aside, seen


@pytest.mark.parametrize("tiny", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("spec", [MIXED[0], MIXED[4], MIXED[5], MIXED[6], RowSpec(8), RowSpec(9)])
def test_operations_are_those_of_transformers(spec, tiny):
    """transformers pads the patches of each image, and masks pairs after they are computed."""
    [row] = make_rows((spec,))
    sizes = sizes_of(tiny)
    work, vision, tokens = WorkModel.from_sizes(sizes), sizes.vision, len(row.ids_S)
    flops, seen = counted(row, tiny)
    frames = [frame for t, h, w in spec.videos for frame in [h * w] * t]
    images = [h * w for h, w in spec.images]
    patches = sum(images) + sum(frames)
    patch_pairs = sum(each**2 for each in (*images, *frames))
    expected = [
        layer.mixer.pair_flops((tokens,), vision.token_pairs(patches, patch_pairs))
        for layer in sizes.text.layers
    ]
    queries = [4 * layer.mixer.query for layer in sizes.text.layers]
    assert expected == [width * pairs for width, pairs in zip(queries, seen, strict=True)]
    padded = [(max(kind) + vision.merge**2) for kind in (images, frames) for _ in kind]
    everything = (
        work.row((tokens,), tokens, 0, 0)
        - work.attention((tokens,), 0)
        + sum(queries) * tokens**2
        + work.per_patch_of_tower * sum(padded)
        + work.per_patch_pair * sum(each**2 for each in padded)
        + work.per_patch_of_mergers * patches
    )
    assert 0 <= flops - everything < 2 * patches + 1  # whole operations of the projector a patch


WIDE = dict(hidden=128, heads=8)
PICTURES = (RowSpec(150, ((12, 18), (6, 9))), RowSpec(160, ((21, 9),)))
TEXTS = (RowSpec(180), RowSpec(170))
CASES: dict[str, Any] = {
    "1": (layout(), {}, PICTURES),
    "repeated-keys": full(layout(), {"global_head_dim": 272}, PICTURES),
    "tp2": full(layout(tp=2), {}, PICTURES),
    "experts-ep2": (layout(dp=2, ep=2), {"experts": 4}, PICTURES),
    "values-of-their-own": full(layout(), {"values_are_keys": False}, PICTURES),
    "long-text": full(layout(), {}, TEXTS),
    "short-text": full(layout(), {"window": 256}, TEXTS),
    "pp2-full": full(layout(pp=2, recompute="full", recompute_vision=True), {}, PICTURES),
    "pp2-uneven": full(layout(pp=2, layers_per_stage=[1, 3]), {}, PICTURES),
    "dp2-overlap": full(layout(dp=2, overlap_grad_reduce=True), {}, PICTURES),
    "frozen-dp2": full(layout(dp=2, freeze_language=True), {}, PICTURES),
    "tower-frozen": full(layout(freeze_vision=True), {}, PICTURES),
    "offload": full(layout(offload_activations=0.5), {}, PICTURES),
    "lora": full(lora(layout(), EVERY), {}, PICTURES),
    "lora-tp2": full(lora(layout(tp=2), ("attention", "mlp")), {}, PICTURES),
    "experts": full(layout(), {"experts": 8}, PICTURES),
    "experts-frozen": full(layout(freeze_language=True), {"experts": 8}, PICTURES),
    "lora-in-experts": full(lora(layout(), ("attention", "mlp")), {"experts": 8}, PICTURES),
    "experts-bf16": full(layout(dp=2), {"experts": 8}, PICTURES),
    "bf16": full(layout(dp=2), {}, PICTURES),
}


@pytest.mark.parametrize(("case", "spec", "specs"), CASES.values(), ids=CASES)
def test_memory_is_that_of_the_built_worker(case, spec, specs, pool, tmp_path, request):
    path = TinyGemma4(**WIDE, **spec).write(tmp_path / "model")
    check_memory(path, case, make_rows(specs), "bf16" in request.node.name, pool)


@pytest.mark.parametrize(
    ("platform", "attention", "itemsize", "masked"),
    [
        ("auto", "auto", 2, False),
        ("cuda", "fa4", 2, False),
        ("cuda", "efficient", 2, True),
        ("cuda", "auto", 4, True),
        ("cpu", "auto", 2, True),
    ],
)
def test_windows_have_a_mask_unless_flash_attention_computes_them(
    platform, attention, itemsize, masked
):
    """Rows of text have one mask for all, if they are longer than the window."""
    cfg = Config(model=ModelConfig("x", attention=attention), platform=platform)
    batch = BatchSizes(2, 64, 128, 0, 64)

    def kept(window: int) -> int:
        sizes = sizes_of(TinyGemma4(window=window))
        dims = ParallelDims(1, 1, 1, 1, (sizes.text.num_layers,))
        return activations(ModelLayout(cfg, sizes, dims, itemsize), 0, batch)

    assert kept(8) - kept(64) == itemsize * masked * 64 * 64


@pytest.mark.full
def test_the_command_plans_from_the_config_alone(maker, tmp_path, capsys):
    """TP divides the key heads of full attention, of which the 31B has four."""
    maker.gemma4_config(*maker.GEMMA4["Gemma 4 31B"]).save_pretrained(tmp_path)
    words = ["plan", "model=gemma4_31b", f"model.path={tmp_path}", "--gpus", "16"]
    assert main([*words, "--memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"The fastest: parallel.tp=[124] ", out)
    assert main([*words[:-2], "--gpus", "8", "parallel.tp=8", "--memory", "80GiB"]) == 2
