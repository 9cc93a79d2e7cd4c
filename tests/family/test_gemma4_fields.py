# .venv/bin/python -m pytest tests/family/test_gemma4_fields.py
"""Every field of Gemma 4's config.json is known by its use, or refused by name. Both forms in which
files have the heads of layers mean the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.config_json import read_counts
from megatron_vlm.hf.layer_backends import BACKENDS
from megatron_vlm.model.constraints import check_layout
from tests.support.error_fields import raises
from tests.support.gemma4 import TinyGemma4

pytestmark = pytest.mark.newest  # it depends on the versions

# What the other models of the family have, and the models that have it.
OTHERS: dict[str, tuple[Any, str]] = {
    "audio_config": ({"model_type": "gemma4_audio"}, "E2B and E4B have it"),
    "text_config.hidden_size_per_layer_input": (256, "E2B and E4B have it"),
    "text_config.num_kv_shared_layers": (2, "E2B and E4B have it"),
    "text_config.use_double_wide_mlp": (True, "E2B has it"),
    "vision_config.use_clipped_linears": (True, "E2B and E4B have it"),
}


def config_of(folder: Path, changes: dict[str, Any], tiny: TinyGemma4 = TinyGemma4()) -> Path:
    """Write the config.json of a tiny model with other values."""
    config = tiny.config().to_dict()
    for key, value in changes.items():
        part, _, name = key.rpartition(".")
        (config[part] if part else config)[name] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("read", [read_counts, read_sizes])
@pytest.mark.parametrize("field", OTHERS)
def test_other_models_of_the_family_are_refused_by_name(field, read, tmp_path):
    """They are refused with transformers and, before that, without."""
    value, who = OTHERS[field]
    folder = config_of(tmp_path / "x", {field: value})
    said = dict(problem_has=f", as {who}", remedy_has="Gemma 4 31B or 26B-A4B")
    with raises(ConfigError, place=str(folder / "config.json"), **said):
        read(str(folder))


@pytest.mark.parametrize("kind", ["gemma4_unified", "gemma4_text"])
def test_other_types_of_the_family_are_refused_by_name(kind, tmp_path):
    folder = config_of(tmp_path / "x", {"model_type": kind})
    said = dict(problem_has=f"model_type='{kind}'", remedy_has="31B or 26B-A4B ('gemma4')")
    with raises(ConfigError, key="model.path", **said):
        read_counts(str(folder))


@pytest.mark.parametrize("tiny", [TinyGemma4(), TinyGemma4(values_are_keys=False)])
def test_both_forms_of_the_heads_of_layers_mean_the_same(tiny, tmp_path):
    """Released files have global_head_dim, and transformers writes per_layer_config."""
    config = tiny.config().to_dict()
    assert config["text_config"].pop("per_layer_config")
    config["text_config"] |= {"global_head_dim": tiny.global_head_dim}
    config["text_config"] |= {"num_global_key_value_heads": 2 if tiny.values_are_keys else None}
    for name, written in (("theirs", config), ("ours", tiny.config().to_dict())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(written))
    theirs, ours = read_sizes(tmp_path / "theirs"), read_sizes(tmp_path / "ours")
    assert theirs.tensors == ours.tensors and theirs.text == ours.text
    counts = read_counts(str(tmp_path / "theirs"))
    assert counts is not None and counts.divided_by_tp.items() <= ours.text.divided_by_tp.items()


def test_tp_must_divide_the_key_heads_of_full_layers(tmp_path):
    folder = config_of(tmp_path / "x", {"text_config.num_global_key_value_heads": 2})
    counts = read_counts(str(folder))
    assert counts is not None
    with pytest.raises(ConfigError, match="num_global_key_value_heads"):
        check_layout(counts, ParallelDims(tp=4, pp=1, dp=1, ep=1, layers_per_stage=(4,)))


def test_transformer_engine_lacks_the_layers(tmp_path):
    text = read_sizes(config_of(tmp_path / "x", {})).text
    [(key, _, reason, _)] = BACKENDS["te"].layer_refusals(text)
    assert key == "model.backend" and "norms after attention and MLP" in reason
    assert not list(BACKENDS["torch"].layer_refusals(text))
