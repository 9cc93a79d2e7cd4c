# .venv/bin/python -m pytest tests/run/test_rank_agreement.py
"""Ranks that do not have the same configuration and model end together, before the first step."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.checkpoint_files import digests
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.training.worker import MegatronWorker
from tests.support.runs import Case

ONE_LAYER = "model.language_model.layers.2.mlp.up_proj.weight"


def open_worker(cfgs: list[Config]) -> str:
    """Return this rank's error message, or an empty text if its worker is made."""
    try:
        MegatronWorker(cfgs[int(os.environ["RANK"])], training=False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(optim={"lr": 0.1}), "rank 1: optim.lr=0.1 instead of rank 0's 1e-05;"),
        (Case(train={"global_batch_size": 4}), "train.global_batch_size=4 "),
        (Case(parallel={"tp": 2}), "parallel.tp=2 "),
        (Case(model={"freeze_vision": True}), "model.freeze_vision=True "),
    ],
)
def test_another_configuration(case, said, pool, tiny):
    cfgs = [Case().config(tiny()), case.config(tiny())]
    first, second = pool.run(open_worker, 2, cfgs)
    assert said in first and first == second


def change_weights(folder: Path) -> None:
    """Change a hundredth of the values of one matrix, as a few steps in bf16 would."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights[ONE_LAYER] += 1e-3 * (torch.rand(weights[ONE_LAYER].shape, generator=generator) < 0.01)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-5
    (folder / "config.json").write_text(json.dumps(config))


def change_template(folder: Path) -> None:
    with open(folder / "chat_template.jinja", "a") as file:
        file.write(" ")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_weights, "model.safetensors"),
        (change_config, "config.json"),
        (change_template, "chat_template.jinja"),
    ],
)
def test_another_model(change: Callable[[Path], None], name, pool, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "copy")
    change(tmp_path / "copy")
    cfgs = [Case().config(path) for path in (tiny(), str(tmp_path / "copy"), tiny())]
    cfgs = [cfgs[0], cfgs[1], cfgs[1]]
    messages = pool.run(open_worker, 3, cfgs)
    assert messages[0].startswith(f"ranks 1-2: the model's {name} ")
    assert messages[0] == messages[1] == messages[2]


def test_where_the_model_and_the_cache_are_may_differ(pool, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("mine")
    first, second = Case().config(tiny()), Case().config(str(tmp_path / "copy"))
    second = replace(second, data=DataConfig(cache_dir=str(tmp_path)))
    assert pool.run(open_worker, 2, [first, second]) == ["", ""]


def test_a_digest_reads_little_of_a_large_file(tmp_path, tiny, monkeypatch):
    """Blocks of every tensor are read, the first and the last of each among them."""
    shutil.copytree(tiny(), tmp_path / "copy")
    large = {ONE_LAYER: torch.zeros(3, 2**20), "small": torch.zeros(5)}
    file = tmp_path / "copy" / "model.safetensors"
    save_file(large, file)
    source, read = HFCheckpoint(tmp_path / "copy"), []
    source.read_headers()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    before = digests(source)
    assert sum(read) < 2**15 < file.stat().st_size / 100
    size = file.stat().st_size
    for place in (size - 12 * 2**20 - 20, size - 21, size - 1):  # the tensors end the file
        whole = bytearray(file.read_bytes())
        whole[place] ^= 1
        file.write_bytes(whole)
        after = digests(source)
        assert after.pop("model.safetensors") != before["model.safetensors"], place
        assert all(before[name] == digest for name, digest in after.items())
        before = digests(source)
