# .venv/bin/python -m pytest tests/hf/test_mtp_files.py
"""The MTP head of Qwen3.5, `mtp.*`, is never loaded, and every export has its bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.save_load import save
from megatron_vlm.config.schema import CheckpointConfig
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family import families
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.hf.model_card import model_card
from megatron_vlm.hf.write_export import export_hf
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import ALL_TEXT, make_rows
from tests.support.error_fields import raises
from tests.support.moe import edited, opened, stored_as
from tests.support.runs import Case, call
from tests.support.suites import full
from tests.training.test_properties import tensors

TINY = dict(family="qwen3_5", mtp_layers=1, layers=4, vision_depth=1)
MOE = dict(**TINY, experts=4)
SENTENCE = (
    "The `mtp.*` tensors are those of the base model: they were not trained with it, so drafts may "
    "be accepted less often."
)
WEIGHTS = "model.safetensors"


def mtp(folder: str | Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return the head's tensors in a folder, from all of its files."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= {name: v for name, v in tensors(file).items() if name.startswith("mtp.")}
    return found


def test_which_families_have_it():
    passed = {name: family.passthrough for name, family in families().items()}
    head = {"qwen3_5": ("mtp.*",), "qwen3_5_moe": ("mtp.*",)}
    assert passed == {"qwen3_vl": (), "qwen3_vl_moe": (), "gemma4": ()} | head


def test_it_is_not_a_part_of_the_model(tiny):
    source = opened(tiny(**TINY))
    assert len(source.passthrough) == 15 and source.passthrough.keys() == mtp(source.path).keys()
    assert not any(name.startswith("mtp.") for name in (*source.tensors, *source.sizes.shapes))
    assert opened(tiny(**{**TINY, "mtp_layers": 0})).passthrough == {}


def test_another_family_refuses_it(tiny, tmp_path):
    folder = edited(tiny(), tmp_path / "a", {"mtp.fc.weight": torch.zeros(64, 128)})
    with raises(CheckpointError, place=str(folder)) as caught:
        opened(folder)
    assert caught.value.found["surplus"] == ["mtp.fc.weight (64, 128)"]


def test_it_fits_the_width_of_the_model(tiny, tmp_path):
    """A name like the head's, such as `mtpx`, does not pass."""
    other = {"mtp.fc.weight": torch.zeros(64, 64), "mtpx.fc.weight": torch.zeros(1)}
    with raises(CheckpointError) as caught:
        opened(edited(tiny(**TINY), tmp_path / "a", other))
    assert caught.value.found["misshapen"] == [
        "mtp.fc.weight is (64, 64), config.json asks for (64, 128)"
    ]
    assert caught.value.found["surplus"] == ["mtpx.fc.weight (1,)"]


def export_again(path: str, case: Case, out: str, max_shard_bytes: int) -> None:
    worker = MegatronWorker(case.config(path))
    names = [name for held in worker.chunks for name, _ in held.named_parameters()]
    assert not any("mtp" in name for name in names)
    export_hf(worker.held, worker.source, worker.table, worker.grid, out, max_shard_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_any_bytes_come_out(dtype, pool, tiny, tmp_path):
    """Types that cannot be trained and values that are not finite are kept, also in shards."""
    scale = torch.tensor([float("nan"), float("inf"), 1.0, -3.0]).repeat(16)
    weights = {
        "mtp.norm.weight": scale.nan_to_num(0, 1, 1).to(dtype) if dtype is torch.int8 else scale,
        "mtp.layers.0.input_scale": torch.arange(7).to(dtype),
    }
    source = edited(tiny(**TINY), tmp_path / "source", weights)
    out = tmp_path / "out"
    pool.run(export_again, 2, str(source), layout(pp=2), str(out), 300_000)
    assert len(mtp(source)) == 16 and mtp(out) == mtp(source)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = {file.name: tensors(file) for file in out.glob("*.safetensors")}
    assert len(shards) > 2
    assert index["weight_map"] == {n: file for file, held in shards.items() for n in held}
    values = [value for held in shards.values() for *_, value in held.values()]
    assert index["metadata"]["total_size"] == sum(map(len, values))
    assert {k: v for held in shards.values() for k, v in held.items()} == tensors(source / WEIGHTS)


def test_a_sharded_source(pool, tiny, tmp_path):
    """Released checkpoints have the head in files of its own or beside layers."""
    source = tmp_path / "source"
    shutil.copytree(tiny(**TINY), source)
    weights = load_file(source / WEIGHTS)
    (source / WEIGHTS).unlink()
    heads = {name for name in weights if name.startswith("mtp.")} - {"mtp.norm.weight"}
    files = {"a.safetensors": weights.keys() - heads, "b.safetensors": heads}
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, source / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    pool.run(export_again, 1, str(source), layout(), str(tmp_path / "out"), 10**9)
    assert tensors(tmp_path / "out" / WEIGHTS) == tensors(Path(tiny(**TINY)) / WEIGHTS)
    (source / "b.safetensors").write_bytes((source / "b.safetensors").read_bytes()[:-1])
    with raises(CheckpointError, place=str(source / "b.safetensors")):
        opened(source)


def train_and_export(path: str, case: Case, out: str) -> dict[str, bytes]:
    kind = "merged" if case.lora else True
    cfg = replace(case.config(path), checkpoint=CheckpointConfig(export=kind))
    worker = MegatronWorker(cfg)
    worker.forward_backward(make_rows(ALL_TEXT))
    worker.optim_step(lr=0.01)
    save(worker, Path(out + "-saved"), {"step": 1, "data": {}, "best": None})
    worker.export_hf(out)
    if case.lora:
        return {}
    streamed = {name: bytes(v.view(torch.uint8).numpy()) for name, v in worker.named_weights()}
    return {name: value for name, value in streamed.items() if name.startswith("mtp.")}


@pytest.mark.parametrize("tied", [False, full(True)])
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({}, id="whole", marks=pytest.mark.full),
        pytest.param(dict(rank=2, targets=("attention", "head")), id="merged"),
    ],
)
def test_training_leaves_it(lora, tied, pool, tiny, tmp_path):
    """Exports of a run and of its checkpoint have it, also with an untied head."""
    path, out = tiny(**TINY, tied=tied, dtype="bfloat16"), tmp_path / "out"
    streamed = pool.run(train_and_export, 2, path, replace(layout(tp=2), lora=lora), str(out))
    assert mtp(out) == mtp(path) and len(mtp(out)) == 15
    before, after = (json.loads((Path(each) / "config.json").read_text()) for each in (path, out))
    untied = {"tie_word_embeddings": False} if lora else {}
    assert after == before | untied | {"text_config": before["text_config"] | untied}
    before, after = tensors(Path(path) / WEIGHTS), tensors(out / WEIGHTS)
    assert before.keys() | ({"lm_head.weight"} if lora else set()) == after.keys()
    assert before != {name: after[name] for name in before}
    assert SENTENCE in (out / "README.md").read_text()
    saved = Path(f"{out}-saved")
    assert not any("mtp" in name for name in json.loads((saved / "index.json").read_text()))
    export_checkpoint(str(saved), str(tmp_path / "again"))
    assert mtp(tmp_path / "again") == mtp(path)
    if not lora:
        assert streamed == [{name: v for name, (_, _, v) in mtp(path).items()}, {}]


def test_an_adapter_has_nothing_of_it(tiny):
    source = opened(tiny(**TINY))
    assert SENTENCE in model_card(source)
    assert SENTENCE not in model_card(source, is_adapter=True)
    assert SENTENCE not in model_card(opened(tiny(**{**TINY, "mtp_layers": 0})))


def test_a_digest_is_of_it_too(tiny, tmp_path):
    path = tiny(**TINY)
    other = edited(path, tmp_path / "a", {"mtp.norm.weight": torch.zeros(64)})
    assert weights_digest(Path(path)) != weights_digest(Path(other))


@pytest.mark.parametrize("form", ExpertStorage)
def test_its_experts_are_of_another_form_than_the_models(form, tiny, tmp_path):
    """The head of a model in one form may have its experts in another."""
    path = tiny(**MOE)
    other = stored_as(path, tmp_path / "other", form)
    single = load_file(Path(stored_as(path, tmp_path / "single", ExpertStorage.single)) / WEIGHTS)
    mixed = {k: v for k, v in load_file(Path(other) / WEIGHTS).items() if not k.startswith("mtp.")}
    mixed |= {name: value for name, value in single.items() if name.startswith("mtp.")}
    assert "mtp.layers.0.mlp.experts.3.up_proj.weight" in mixed
    save_file(mixed, Path(other) / WEIGHTS, metadata={"format": "pt"})
    source = opened(other)
    assert source.experts is form
    assert len(source.passthrough) == 19 + 3 * 4 - 2


@pytest.mark.full
@pytest.mark.parametrize("sizes", [TINY, MOE, {**TINY, "tied": True}], ids=["dense", "moe", "tied"])
def test_transformers_loads_the_export(sizes, pool, tiny, tmp_path):
    out = str(tmp_path / "out")
    pool.run(export_again, 2, tiny(**sizes, dtype="bfloat16"), layout(dp=2), out, 10**9)
    _, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info


def test_fp32_weights_that_are_stored_in_bf16_stay_so(pool, tiny, tmp_path):
    path = tiny(**TINY, dtype="bfloat16")
    kept = {n: v for n, v in load_file(Path(path) / WEIGHTS).items() if v.dtype is torch.float32}
    assert len(kept) == 2 * 3
    rounded = {name: value.bfloat16() for name, value in kept.items()}
    source, out = edited(path, tmp_path / "source", rounded), str(tmp_path / "out")
    case = replace(layout(pp=2), train={"precision": "bf16"})
    pool.run(export_again, 2, str(source), case, out, 10**9)
    assert tensors(tmp_path / "out" / WEIGHTS) == tensors(source / WEIGHTS)


def stream_names(worker: MegatronWorker) -> list[str]:
    return [name for name, _ in worker.named_weights()]


def test_the_stream_to_an_engine_has_every_tensor(pool, tiny):
    path = tiny(**TINY)
    assert sorted(pool.run(call, 1, path, layout(), stream_names)[0]) == sorted(
        tensors(Path(path) / WEIGHTS)
    )
