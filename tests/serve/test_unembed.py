# .venv/bin/python -m pytest tests/serve/test_unembed.py
"""What `train_unembed` of the Tinker client asks for: an adapter of the head, of a tied model too,
by itself or beside the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.lora.test_lora import pytestmark as warned
from tests.serve import test_serve
from tests.serve.test_serve import VOCAB, check_against_peft, data_of, exported, trained
from tests.support.serve_client import Client, FailedError, Model
from tests.support.suites import slow

pytestmark = [*warned, pytest.mark.full]

PARTS = ("train_attn", "train_mlp", "train_unembed")
LEAVES = {
    "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "train_mlp": {"gate_proj", "up_proj", "down_proj"},
    "train_unembed": {"lm_head"},
}


@pytest.fixture(scope="module")
def path(tiny) -> str:
    return tiny(vocab=VOCAB, tied=True)


running, client = test_serve.running, test_serve.client  # of this file's model


def only(*parts: str) -> dict[str, bool]:
    return {part: part in parts for part in PARTS}


def layers(folder: str) -> set[str]:
    """The last parts of the names of what has an adapter."""
    names = load_file(Path(folder) / "adapter_model.safetensors")
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names}


def said_of(client: Client, path: str) -> dict[str, Any]:
    found = client.post("weights_info", tinker_path=path)
    return {part: found[part] for part in PARTS}


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({}, PARTS),  # as the public client asks
        ({"train_unembed": False}, ("train_attn", "train_mlp")),
        (only("train_unembed"), ("train_unembed",)),
        (only("train_attn", "train_unembed"), ("train_attn", "train_unembed")),
    ],
)
def test_each_switch_is_what_it_says(asked, parts, client, running):
    model = client.model(2, **asked)
    saved = model.save_external("begin")
    folder = exported(running, model, "begin")
    assert layers(folder) == set().union(*(LEAVES[part] for part in parts))
    chosen = json.loads((Path(folder) / "adapter_config.json").read_text())["target_modules"]
    assert ("lm_head" in chosen) == ("train_unembed" in parts)
    assert said_of(client, saved) == only(*parts)


def test_a_model_that_trains_nothing_is_refused(client):
    said = r"lora_config\.rank=3: train_attn, train_mlp, train_unembed"
    with pytest.raises(FailedError, match=f"user: {said}"):
        client.model(3, **only())


@pytest.mark.parametrize("asked", [only("train_unembed"), slow({})], ids=str)
def test_it_is_trained_as_peft_trains_it(asked, client, path, running, record_property):
    check_against_peft(client.model(6, seed=5, **asked), path, running, record_property)


def test_a_model_without_unembedding_is_loaded_as_such(client, running, path):
    """As those are that were made when it had no effect."""

    def without() -> Model:
        return client.model(2, train_unembed=False)

    model = without()
    trained(model, path, 1)
    saved = model.save("old")
    again = client.loaded(saved, True)
    again.save_external("again")
    assert layers(exported(running, again, "again")) == LEAVES["train_attn"] | LEAVES["train_mlp"]
    assert said_of(client, saved) == only("train_attn", "train_mlp")
    without().load(saved)
    with pytest.raises(FailedError, match=rf"user: path={saved} .*rank 2 .*head"):
        client.model(2).load(saved)
    data = data_of(path, 4)
    losses = [each.gradients(data, forward_only=True)[0]["loss:sum"] for each in (model, again)]
    assert losses[0] == losses[1]
