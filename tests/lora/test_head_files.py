# .venv/bin/python -m pytest tests/lora/test_head_files.py
"""The head's adapter in and out, with PEFT and here. A merge into a tied model unties it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from megatron_vlm.lora.peft_folder import lora_of
from tests.lora.test_files import (
    check_exports_of_checkpoint,
    difference,
    log_probs,
    log_probs_here,
    train_and_export,
)
from tests.lora.test_lora import EVERY_WITH_HEAD, HEAD, ODD, TIED, VOCAB, WITH_HEAD
from tests.lora.test_lora import pytestmark as pytestmark  # PEFT's warnings
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.moe import edited
from tests.support.peft_reference import Adapter, peft_model
from tests.support.peft_reference import save as save_peft
from tests.support.reference import load_reference
from tests.support.runs import refusal
from tests.support.suites import full, slow

A, B = (f"base_model.model.lm_head.lora_{each}.weight" for each in "AB")
EMBEDDING = "model.language_model.embed_tokens.weight"
ROWS = partial(make_rows, MIXED, VOCAB)
# Relative error. Measured worst case: 1.6e-7.
TOLERANCE = 1.5e-6


def ties(folder: Path) -> set[bool]:
    """Return the values of `tie_word_embeddings` in all parts of config.json that have it."""
    config = json.loads((folder / "config.json").read_text())
    key = "tie_word_embeddings"
    return {config[key], *(part[key] for part in [config["text_config"]] if key in part)}


@pytest.mark.parametrize(
    ("adapter", "case", "sizes"),
    [
        full(WITH_HEAD, layout(tp=2, pp=2), TIED),
        slow(EVERY_WITH_HEAD, layout(tp=2), ODD),
        slow(HEAD, layout(pp=2, virtual_stages=2), TIED),
        slow(HEAD, layout(dp=2), ODD),
        slow(WITH_HEAD, layout(), {**TIED, "copy": True}),
    ],
)
def test_peft_and_transformers_load_what_is_exported(
    adapter, case, sizes, pool, tiny, tmp_path, record_property
):
    case, tied = replace(case, lora=adapter.ours), bool(sizes.get("tied"))
    path = tiny(**{key: value for key, value in sizes.items() if key != "copy"})
    if "copy" in sizes:
        embedding = load_file(Path(path) / "model.safetensors")[EMBEDDING]
        path = str(edited(path, tmp_path / "base", {"lm_head.weight": embedding.clone()}))
    trained = pool.run(train_and_export, case.world, path, case, tmp_path, ROWS)[0]
    base = log_probs(load_reference(path), ROWS)
    assert difference(trained, base) > 0.01
    check_exports_of_checkpoint(tmp_path)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored[A].shape == (4, 64) and stored[B].shape == (VOCAB, 4)
    assert all(".lora_" in name for name in stored)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]
    loaded = PeftModel.from_pretrained(load_reference(path), tmp_path / "adapter")
    merged = load_reference(str(tmp_path / "merged"))
    again = pool.run(log_probs_here, 1, str(tmp_path / "merged"), layout(), ROWS)[0]
    theirs = [log_probs(model, ROWS) for model in (loaded, merged)]
    worst = max(difference(each, trained) for each in (*theirs, again))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    with loaded.disable_adapter():
        assert difference(log_probs(loaded, ROWS), base) == 0
    # The embedding is unchanged, and the head is no longer the embedding.
    folders = Path(path), tmp_path / "merged"
    before, after = (load_file(each / "model.safetensors") for each in folders)
    assert torch.equal(before[EMBEDDING], after[EMBEDDING])
    assert after.keys() == before.keys() | {"lm_head.weight"}
    head = before.get("lm_head.weight", before[EMBEDDING])
    expected = head + 3 * stored[B] @ stored[A]  # alpha 12, rank 4
    assert torch.allclose(after["lm_head.weight"], expected, rtol=0, atol=1e-7)
    assert ties(Path(path)) == {tied} and ties(tmp_path / "merged") == {False}


def test_a_model_without_it_stays_tied(pool, tiny, tmp_path):
    case = replace(layout(), lora=Adapter().ours)
    pool.run(train_and_export, 1, tiny(**TIED), case, tmp_path, ROWS)
    assert ties(tmp_path / "merged") == {True}
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


@pytest.mark.parametrize("sizes", [full(ODD), TIED])
def test_what_peft_writes_is_loaded(sizes, pool, tiny, tmp_path, record_property):
    """PEFT's file also has the head's own weight, which must be that of the model."""
    path, model = tiny(**sizes), peft_model(tiny(**sizes), WITH_HEAD)
    folder = Path(save_peft(model, tmp_path / "peft"))
    copied = "base_model.model.lm_head.base_layer.weight"
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    assert copied in stored
    lora = lora_of(folder, path)
    assert lora.train == () and "lm_head" in lora.targets
    case = replace(layout(), lora=vars(lora))
    actual = pool.run(log_probs_here, 1, path, case, ROWS)[0]
    worst = difference(actual, log_probs(model, ROWS))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    for wrong in (stored[copied] * (1 + 1e-3), stored[copied][:-1]):
        save_file(stored | {copied: wrong.contiguous()}, file)
        message = str(pool.run(refusal, 1, path, case)[0])
        assert f": model.path={path} " in message and f"{copied} [{len(wrong)}, 64]; " in message
    save_file(stored | {copied: stored[copied].bfloat16()}, file)
    assert pool.run(log_probs_here, 1, path, case, ROWS)[
        0
    ]  # PEFT may have loaded the model in bf16
    without = dict(vars(lora), targets=tuple(t for t in lora.targets if t != "lm_head"))
    message = str(pool.run(refusal, 1, path, replace(case, lora=without))[0])
    assert ": lora.targets=" in message and " 3 of them" in message
