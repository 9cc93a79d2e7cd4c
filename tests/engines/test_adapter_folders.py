# .venv/bin/python -m pytest tests/engines/test_adapter_folders.py
"""Tests of the adapter that an engine on the CPU uses for requests without an adapter."""

import json
import re
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from megatron_vlm.engines.server.adapter_folders import linear_layer, write_nothing
from tests.support.reference import load_reference


def _renamed(model: str, out: Path, old: str, new: str, shards: int = 1) -> Path:
    """Write a copy of a checkpoint with renamed tensors in `shards` files, and return its
    folder."""
    weights = load_file(Path(model) / "model.safetensors")
    weights = {re.sub(old, new, name): weight for name, weight in weights.items()}
    out.mkdir()
    if shards == 1:
        save_file(weights, out / "model.safetensors")
        return out
    places = {name: f"model-{k % shards}.safetensors" for k, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        save_file({n: weights[n] for n, place in places.items() if place == file}, out / file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return out


LAYERS = "model.language_model.layers"


@pytest.mark.parametrize(
    ("old", "new", "shards", "chosen"),
    [
        ("", "", 1, f"{LAYERS}.0.self_attn.q_proj"),
        ("", "", 3, f"{LAYERS}.0.self_attn.q_proj"),
        (
            r"layers.0.self_attn.q_proj",
            "layers.0.linear.in_proj",
            2,
            f"{LAYERS}.1.self_attn.q_proj",
        ),
        (r"self_attn.q_proj", "mixer.in_proj", 1, f"{LAYERS}.0.mixer.in_proj"),
        (r"model.language_model.", "model.", 1, "model.layers.0.self_attn.q_proj"),
    ],
)
def test_the_adapter_that_adds_nothing_has_a_layer_of_the_model(
    old, new, shards, chosen, tiny, tmp_path
):
    model = _renamed(tiny(), tmp_path / "model", old, new, shards)
    (tmp_path / "out").mkdir()
    write_nothing(str(model), str(tmp_path / "out"))
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = [f"base_model.model.{chosen}.lora_{part}.weight" for part in "AB"]
    assert sorted(weights) == names
    shape = linear_layer(model)[1]
    assert [list(weights[name].shape) for name in names] == [[1, shape[1]], [shape[0], 1]]
    assert not any(weight.any() for weight in weights.values())
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == [chosen.rpartition(".")[2]]


@pytest.mark.parametrize("experts", [0, 4])
def test_the_layer_has_full_attention_where_the_first_has_not(experts, tiny, tmp_path):
    """Three of four layers of Qwen3.5 have no q_proj, and that of the fourth also has the gate's
    rows."""
    model = Path(tiny(family="qwen3_5", head_dim=64, experts=experts))
    assert linear_layer(model) == (f"{LAYERS}.3.self_attn.q_proj", [2 * 4 * 64, 64])
    write_nothing(str(model), str(tmp_path))
    loaded = PeftModel.from_pretrained(load_reference(str(model)), tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert get_peft_model_state_dict(loaded).keys() == stored.keys()


def test_a_model_without_linear_layers_is_refused(tiny, tmp_path):
    model = _renamed(tiny(), tmp_path / "model", "layers", "blocks")
    with pytest.raises(ValueError, match="has no linear layer"):
        linear_layer(model)
