# .venv/bin/python -m pytest tests/family/test_model_fields.py
"""Every field of config.json is carried out as transformers carries it out, or refused by name."""

import contextlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import families, read_sizes
from megatron_vlm.family.config_json import Counts, read_counts
from megatron_vlm.family.decoder_layers import FullAttention
from megatron_vlm.model.constraints import check_layout
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_gemma4 import without_constants
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.field_tables import (
    RELEASED,
    RELEASED_5,
    RELEASED_GEMMA4,
    ROPE,
    TABLES,
    released,
    released_5,
    released_gemma4,
)
from tests.support.reference import run_reference
from tests.support.runs import Case, loss_and_grads

pytestmark = pytest.mark.newest  # it depends on the versions

# Errors are relative, as in test_parity.py. Measured worst cases: 1.4e-6 of log-probs, 1.5e-5 of
# gradients. They are large because the weights are: several times as large as fresh ones.
TOLERANCE, TOLERANCE_OF_GRADS = 5e-6, 5e-5
TINY = TABLES["qwen3_vl"].tiny
REFUSALS = [(family, field) for family, tables in TABLES.items() for field in tables.refused]
PARTS = ("idle", "top", "text_config", "vision_config")
CARRIED = [(name, part) for name, tables in TABLES.items() for part in (*PARTS, *tables.more)]


def test_every_family_has_its_tables():
    assert TABLES.keys() == families().keys()


@pytest.mark.parametrize("family", TABLES)
def test_every_field_of_transformers_is_in_these_tables(family):
    """A field that transformers adds fails here: decide what it does, and add it."""
    of = TABLES[family]
    parts = {"": of.config, **of.config.sub_configs}
    parts.pop("audio_config", None)  # refused as a whole
    parts = {f"{name}." if name else "": cls for name, cls in parts.items()}
    declared = {f"{part}{item.name}" for part, cls in parts.items() for item in fields(cls)}
    tables = {*of.carried, *of.idle, *of.refused, *of.elsewhere}.union(*of.more.values())
    tables |= {".".join(name.split(".")[:2]) for name in tables if name.count(".") >= 2}
    assert declared - tables == {"text_config", "vision_config"}
    assert set(ROPE) == set(ROPE_INIT_FUNCTIONS)
    rope = {name.rpartition(".")[2] for name in tables if ".rope_parameters." in name}
    assert set(RopeParameters.__annotations__) <= rope.union(*ROPE.values())


def changed(path: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Write a copy of the checkpoint's config.json with other values to a folder of its own."""
    config = json.loads((Path(path) / "config.json").read_text())
    for key, value in changes.items():
        *parts, name = key.split(".")
        place = config
        for part in parts:
            place = place[part]
        place[name] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("family", "field"), REFUSALS)
def test_refused_by_name(family, field, tiny, tmp_path):
    of = TABLES[family]
    folder = changed(tiny(**of.tiny), tmp_path / "x", {field: of.refused[field]})
    with pytest.raises(ConfigError) as caught:
        read_sizes(folder)
    assert field in str(caught.value) or field.rpartition(".")[2] in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("read", [read_counts, read_sizes])
def test_both_names_of_the_number_of_experts_have_one_value(read, tiny, tmp_path):
    path = tiny(**TABLES["qwen3_vl_moe"].tiny)
    counts = {"text_config.num_experts": 0, "text_config.num_local_experts": 4}
    with pytest.raises(ConfigError, match=r"num_experts=0 and text_config\.num_local_experts=4"):
        read(str(changed(path, tmp_path / "x", counts)))


@pytest.mark.parametrize("read", [read_counts, read_sizes])
def test_an_interval_of_null_needs_layer_types(read, tiny, tmp_path):
    """With layer_types, nothing reads the interval."""
    path, interval = tiny(**TABLES["qwen3_5"].tiny), {"text_config.full_attention_interval": None}
    folder = changed(path, tmp_path / "x", interval | {"text_config.layer_types": None})
    with pytest.raises(ConfigError, match="full_attention_interval=None, without layer_types"):
        read(str(folder))
    assert read(str(changed(path, tmp_path / "y", interval)))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_other_kinds_of_rope_are_refused(family, kind, older, tiny, tmp_path):
    """RoPE is refused both as transformers 5 writes it and as older files have it."""
    path = tiny(**TABLES[family].tiny)
    text = json.loads((Path(path) / "config.json").read_text())["text_config"]
    rope = text["rope_parameters"] | {"rope_type": kind} | ROPE[kind]
    key = "rope_scaling" if older else "rope_parameters"
    folder = changed(path, tmp_path / "x", {f"text_config.{key}": rope})
    with pytest.raises(ConfigError, match=rf"text_config\.rope_parameters\.rope_type='{kind}'"):
        read_sizes(folder)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen3-VL-8B-Instruct-FP8", "Qwen/Qwen3-VL-8B-Instruct:"),
        ("models--cpatonn--Qwen3-VL-30B-A3B-Thinking-AWQ-4bit", "Qwen/Qwen3-VL-30B-A3B-Thinking:"),
        ("Qwen3.5-35B-A3B-GPTQ-Int4", "Qwen/Qwen3.5-35B-A3B:"),
        ("gemma-4-31B-it-FP8-Dynamic", "google/gemma-4-31B-it:"),
        ("mine", "from which these were made"),
    ],
)
def test_a_quantized_release_is_answered_with_its_bf16_weights(name, weights, tiny, tmp_path):
    """It is refused with transformers and, before that, without."""
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    folder = changed(tiny(**TINY), tmp_path / name, quantized)
    for read in (read_counts, read_sizes):
        with pytest.raises(ConfigError, match="quantization_config") as caught:
            read(str(folder))
        assert weights in caught.value.remedy and "change nothing" not in caught.value.remedy


def test_the_heads_get_the_norms_of_every_family(tiny):
    """The chains for queries and keys are chosen by the gate alone."""
    for family in ("qwen3_vl", "qwen3_5"):
        text = read_sizes(tiny(**TABLES[family].tiny)).text
        with pytest.raises(AssertionError, match="norms are centered where it is gated"):
            replace(text, centered_norms=not text.centered_norms)


def test_refused_before_a_process_group_is_made(tiny, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny(**TINY), folder)
    shutil.copy(
        changed(str(folder), tmp_path / "x", {"text_config.hidden_act": "gelu"}) / "config.json",
        folder,
    )
    with pytest.raises(ConfigError, match=r"text_config\.hidden_act='gelu'.*only 'silu'"):
        MegatronWorker(Case().config(str(folder)))
    assert not torch.distributed.is_initialized()


def make_row(config: Any, seed: int) -> Row:
    """Return text around one image of 4 x 2 merged patches, in the shapes of this config."""
    generator = torch.Generator().manual_seed(seed)
    vision = config.vision_config
    if config.model_type == "gemma4":
        merge, values = vision.pooling_kernel_size, 3
    else:
        merge, values = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size
    text = torch.randint(0, 250, (20,), generator=generator)
    image = torch.full((8,), config.image_token_id)
    ids_S = torch.cat([text[:5], image, text[5:]])
    labels_S = torch.where(ids_S == config.image_token_id, IGNORE, ids_S)
    patches = 4 * 2 * merge**2
    pixels_PC = torch.randn(patches, values * vision.patch_size**2, generator=generator)
    pixels_PC = pixels_PC.clamp(-1, 1) if config.model_type == "gemma4" else pixels_PC
    return Row(ids_S, labels_S, pixels_PC, torch.tensor([[1, 4 * merge, 2 * merge]]))


def write_weights(folder: Path) -> None:
    """Write random weights of the shapes that config.json asks for, large enough that all count.
    Larger ones, and larger decays, would take digits from transformers' own gradients."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    # Scores of Gemma 4 have no scale beside these norms.
    norms = ("q_norm.weight", "k_norm.weight") if model.config.model_type == "gemma4" else ()
    with torch.no_grad():
        for name, param in model.named_parameters():
            vector = -3 if name.endswith("A_log") else param
            vector = 0.5 * param if name.endswith(norms) else vector
            param.copy_((vector if param.dim() == 1 else 0) + 0.1 * torch.randn_like(param))
    tensors = dict(model.named_parameters())  # without a tied head
    stored = model.state_dict()
    tensors |= {name: value for name, value in model.named_buffers() if name in stored}
    save_file(
        {name: value.detach() for name, value in tensors.items()}, folder / "model.safetensors"
    )


def compare(folder: str) -> tuple[float, dict[str, float]]:
    """Return the largest relative differences from transformers: log-probs, each gradient."""
    write_weights(Path(folder))
    config = AutoConfig.from_pretrained(folder)
    rows = [make_row(config, seed) for seed in (0, 1)]
    expected, actual = run_reference(folder, rows), loss_and_grads(folder, Case(), rows)
    pairs = zip(actual.log_probs, expected.log_probs, strict=True)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    (actual,) = without_constants([actual])
    assert actual.grads.keys() == expected.grads.keys()
    return error, relative_errors(actual.grads, expected.grads)


@pytest.mark.rotate(5)
@pytest.mark.parametrize(("family", "part"), CARRIED)
@pytest.mark.full
def test_carried_out_as_by_transformers(family, part, pool, tiny, tmp_path):
    """All fields of a part change at once: one that is not carried out is enough to differ."""
    of = TABLES[family]
    changes = {name: value for name, value in of.carried.items() if name.startswith(part)}
    if part in of.more:
        changes = of.more[part]
    elif part == "idle":
        changes = of.idle
    elif part == "top":
        changes = {name: value for name, value in of.carried.items() if "." not in name}
    changes |= {name: changes[first] for name, first in of.copies.items() if first in changes}
    folder = changed(tiny(**of.tiny), tmp_path / "x", changes)
    ((error, of_grads),) = pool.run(compare, 1, str(folder))
    assert error <= TOLERANCE, error
    wrong = {name: each for name, each in of_grads.items() if not each <= TOLERANCE_OF_GRADS}
    assert not wrong, wrong


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_token_does_not_learn(tied, pool, tiny, tmp_path, record_property):
    """transformers uses the token's embedding, and only a tied head gives it a gradient."""
    rows = make_rows(MIXED[:4])
    pad = int(rows[2].ids_S[0])
    folder = tmp_path / "copy"
    shutil.copytree(tiny(tied=tied), folder)
    config = changed(str(folder), tmp_path / "x", {"text_config.pad_token_id": pad})
    shutil.copy(config / "config.json", folder)
    expected = run_reference(str(folder), rows)
    outcome = pool.run(loss_and_grads, 2, str(folder), layout(tp=2), rows)[0]
    embedding = "model.language_model.embed_tokens.weight"
    assert bool(expected.grads[embedding][pad].any()) == tied
    check_worst(relative_errors(outcome.grads, expected.grads), TOLERANCE, record_property)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_accepted(name, tmp_path):
    """Released files are accepted as published, and as transformers writes them again."""
    (tmp_path / "config.json").write_text(json.dumps(released(name)))
    sizes = read_sizes(tmp_path)
    (attention,) = sizes.text.attentions
    assert isinstance(attention, FullAttention) and attention.rotary.theta == 5e6
    assert (sizes.text.num_layers, sizes.text.hidden) == RELEASED[name][:2]
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert read_sizes(tmp_path / "again").tensors == sizes.tensors


@pytest.mark.parametrize("name", RELEASED_GEMMA4)
def test_released_models_of_gemma4_are_accepted(name, tmp_path):
    """Both forms of their heads mean the same: that of released files and that of transformers."""
    (tmp_path / "config.json").write_text(json.dumps(released_gemma4(name)))
    counts, sizes = read_counts(str(tmp_path)), read_sizes(tmp_path)
    layers, hidden, *_, largest = RELEASED_GEMMA4[name]
    assert (sizes.text.num_layers, sizes.text.hidden) == (layers, hidden)
    billions = float(name.split("B")[0])
    assert sizes.num_values / 1e9 == pytest.approx(billions, rel=0.01)
    assert counts is not None
    assert allowed_tp(counts) == [tp for tp in (1, 2, 4) if tp <= largest]
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert read_sizes(tmp_path / "again").tensors == sizes.tensors


def allowed_tp(counts: Counts) -> list[int]:
    allowed = []
    for tp in range(1, 9):
        with contextlib.suppress(ConfigError):
            check_layout(counts, ParallelDims(tp, 1, 1, 1, (counts.layers,)))
            allowed.append(tp)
    return allowed


@pytest.mark.parametrize("name", RELEASED_5)
def test_released_models_of_qwen3_5_are_accepted(name, tmp_path):
    """They pass both checks of config.json, and the page of layouts has the TP that they allow."""
    (tmp_path / "config.json").write_text(json.dumps(released_5(name)))
    counts, sizes = read_counts(str(tmp_path)), read_sizes(tmp_path)
    layers, hidden, _, heads, kv_heads, value_heads, *_, largest = RELEASED_5[name]
    numbers = (heads, kv_heads, 16, value_heads)
    assert counts is not None and counts.divided_by_tp == sizes.text.divided_by_tp
    assert (counts.layers, counts.deepstack) == (sizes.text.num_layers, 0) == (layers, 0)
    assert sizes.text.hidden == hidden and bool(counts.experts) == ("-A" in name)
    billions = float(name.split("B")[0])
    assert sizes.num_values / 1e9 == pytest.approx(billions, rel=0.15)
    allowed = allowed_tp(counts)
    assert allowed == [tp for tp in (1, 2, 4) if tp <= largest]
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    (cells,) = [cells for cells in rows if name in cells[0].split(", ")]
    assert cells[1:] == [*map(str, numbers), ", ".join(map(str, allowed))]
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert read_sizes(tmp_path / "again").tensors == sizes.tensors
