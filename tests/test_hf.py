# .venv/bin/python -m pytest tests/test_hf.py
"""Weights in and out: slices, shards, dtypes, tied heads, and checkpoints that do not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.export import export_hf
from megatron_vlm.hf.load import check_tensors
from megatron_vlm.hf.names import _gate_up, _qkv, _vocab_rows
from megatron_vlm.hf.source import HFCheckpoint
from megatron_vlm.worker import MegatronWorker
from tests.runs import Case, call
from tests.test_parity import layout
from tests.test_properties import tensors


def reader(values: dict[str, torch.Tensor]):
    def read(name, spans):
        return values[name][tuple(slice(None) if s is None else slice(*s) for s in spans)]

    return read


def test_qkv_is_cut_group_by_group():
    """4 heads in 2 groups of head size 1: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    values = {
        "q": torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
        "k": torch.tensor([[10.0], [11.0]]),
        "v": torch.tensor([[20.0], [21.0]]),
    }
    qkv = _qkv(heads=4, groups=2, head_dim=1)
    whole = qkv.load(reader(values), "qkv", 0, 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = [qkv.load(reader(values), "qkv", rank, 2) for rank in range(2)]
    assert parts[1].flatten().tolist() == [2, 3, 11, 21]
    for back, name in zip(qkv.save(parts), "qkv", strict=True):
        assert torch.equal(back, values[name])


def test_gate_up_is_cut_by_halves():
    values = {"gate": torch.arange(4.0)[:, None], "up": torch.arange(10.0, 14.0)[:, None]}
    layout = _gate_up(4)
    parts = [layout.load(reader(values), ("gate", "up"), rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    gate, up = layout.save(parts)
    assert torch.equal(gate, values["gate"]) and torch.equal(up, values["up"])


def test_vocabulary_is_padded_in_memory_only():
    values = {"e": torch.arange(1.0, 6.0)[:, None]}
    layout = _vocab_rows(5)
    parts = [layout.load(reader(values), ("e",), rank, 4) for rank in range(4)]
    assert [part.flatten().tolist() for part in parts] == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert torch.equal(layout.save(parts)[0], values["e"])


@pytest.mark.parametrize("tied", [False, True])
def test_expected_shapes_are_those_of_transformers(tied, tiny):
    path = tiny(tied=tied)
    model = Qwen3VLForConditionalGeneration.from_pretrained(path)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert read_sizes(path).shapes == names


def copy_of(path: str, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "copy"
    shutil.copytree(path, folder)
    return folder, load_file(folder / "model.safetensors")


def check(folder: Path) -> None:
    source = HFCheckpoint(folder)
    source.read_headers()
    check_tensors(source)


def test_missing_surplus_and_misshapen_tensors_are_listed(tiny, tmp_path):
    folder, weights = copy_of(tiny(), tmp_path)
    check(folder)
    weights.pop("model.language_model.norm.weight")
    weights["model.language_model.layers.9.mlp.down_proj.weight"] = torch.zeros(2)
    weights["lm_head.weight"] = torch.zeros(3, 64)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    text = str(caught.value)
    assert "1 missing:\n  model.language_model.norm.weight (64,)" in text
    assert "1 surplus:\n  model.language_model.layers.9.mlp.down_proj.weight (2,)" in text
    assert "lm_head.weight is (3, 64), config.json asks for (512, 64)" in text


def test_truncated_shard_is_named(tiny, tmp_path):
    folder, _ = copy_of(tiny(), tmp_path)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short"):
        check(folder)


def test_missing_shard_is_named(tiny, tmp_path):
    folder, weights = copy_of(tiny(), tmp_path)
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors is missing"):
        check(folder)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='.*' has no config\.json"):
        HFCheckpoint(tmp_path)


def _values_read(worker: MegatronWorker) -> int:
    """Load again, counting what is read."""
    from megatron_vlm.hf.load import load_hf

    class Counting(HFCheckpoint):
        values = 0

        def read(self, name, spans):
            piece = super().read(name, spans)
            self.values += piece.numel()
            return piece

    source = Counting(worker.cfg.model.path)
    source.read_headers()
    load_hf(worker.held, source, worker.grid)
    held = sum(param.numel() for param in worker.chunks[0].parameters())
    assert source.values == held, (source.values, held)
    return source.values


def test_a_rank_reads_only_what_it_holds(pool, tiny):
    """With an even vocabulary the values read are the values held, on each rank."""
    read = pool.run(call, 4, tiny(), layout(tp=2, pp=2), _values_read)
    total = sum(
        p.numel() for p in Qwen3VLForConditionalGeneration.from_pretrained(tiny()).parameters()
    )
    vision_and_norms = max(read) - min(read)
    assert max(read) < 0.6 * total
    assert vision_and_norms > 0  # stage 0 has the tower


def _export_in_shards(worker: MegatronWorker) -> None:
    out = worker.cfg.model.path + "-shards"
    shutil.rmtree(out, ignore_errors=True)
    export_hf(worker.held, worker.source, worker.table, worker.grid, out, max_shard_bytes=300_000)


def test_sharded_export_loads_in_transformers(pool, tiny):
    path = tiny(vocab=509)
    pool.run(call, 4, path, layout(tp=2, pp=2), _export_in_shards)
    folder = Path(path + "-shards")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    found = {name: value for shard in shards for name, value in tensors(shard).items()}
    assert found == tensors(Path(path) / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(len(value[2]) for value in found.values())
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    assert model.config.text_config.vocab_size == 509
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_tied_head_that_was_stored_is_stored_again(pool, tiny, tmp_path):
    folder, weights = copy_of(tiny(tied=True), tmp_path)
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    pool.run(export_again, 2, str(folder), layout(pp=2), str(tmp_path / "out"))
    assert tensors(tmp_path / "out" / "model.safetensors") == tensors(folder / "model.safetensors")


def export_again(path: str, case: Case, out: str) -> None:
    MegatronWorker(case.config(path)).export_hf(out)


def test_an_export_never_overwrites(pool, tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RuntimeError, match="is not empty; choose a new folder"):
        pool.run(export_again, 1, tiny(), layout(), str(tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "precious"
