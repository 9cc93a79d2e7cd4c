# .venv/bin/python -m pytest tests/hf/test_hf.py
"""Weights in and out: slices, shards, dtypes, tied heads, and checkpoints that do not fit."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3VLForConditionalGeneration
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)
from transformers.utils.hub import CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

from megatron_vlm.errors import CheckpointError, ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.checkpoint_files import SETTINGS, copy_files
from megatron_vlm.hf.expert_layouts import ReadSlice, slices_of
from megatron_vlm.hf.hf_checkpoint import INDEX, WEIGHTS_FILE, HFCheckpoint
from megatron_vlm.hf.weight_map import head_groups, rows, vocab_rows
from megatron_vlm.hf.write_export import export_hf
from megatron_vlm.io.atomic import MARK
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.error_fields import raises
from tests.support.moe import edited, opened
from tests.support.runs import Case, call, refusal
from tests.training.test_properties import tensors

pytestmark = pytest.mark.newest  # it depends on the versions
Arrange = Callable[[Path, dict[str, torch.Tensor]], object]


def reader(values: dict[str, torch.Tensor]) -> ReadSlice:
    return lambda name, spans: values[name][slices_of(spans)]


def test_qkv_is_cut_group_by_group():
    """4 heads in 2 groups of head size 1 become [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    values = {
        "q": torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
        "k": torch.tensor([[10.0], [11.0]]),
        "v": torch.tensor([[20.0], [21.0]]),
    }
    qkv = head_groups(2, [4, 2, 2])
    whole = qkv.load(reader(values), "qkv", 0, 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = [qkv.load(reader(values), "qkv", rank, 2) for rank in range(2)]
    assert parts[1].flatten().tolist() == [2, 3, 11, 21]
    for back, name in zip(qkv.save(parts), "qkv", strict=True):
        assert torch.equal(back, values[name])


def test_gate_up_is_cut_by_halves():
    values = {"gate": torch.arange(4.0)[:, None], "up": torch.arange(10.0, 14.0)[:, None]}
    layout = rows([4], [4])
    parts = [layout.load(reader(values), ("gate", "up"), rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    gate, up = layout.save(parts)
    assert torch.equal(gate, values["gate"]) and torch.equal(up, values["up"])


def test_vocabulary_is_padded_in_memory_only():
    values = {"e": torch.arange(1.0, 6.0)[:, None]}
    layout = vocab_rows(5)
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


def test_missing_surplus_and_misshapen_tensors_are_listed(tiny, tmp_path):
    opened(tiny())
    tensors = {
        "model.language_model.norm.weight": None,
        "model.language_model.layers.9.mlp.down_proj.weight": torch.zeros(2),
        "lm_head.weight": torch.zeros(3, 64),
    }
    folder = edited(tiny(), tmp_path / "copy", tensors)
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    problems = caught.value.found
    assert problems["missing"] == ["model.language_model.norm.weight (64,)"]
    assert problems["surplus"] == ["model.language_model.layers.9.mlp.down_proj.weight (2,)"]
    (misshapen,) = problems["misshapen"]
    assert re.search(r"lm_head\.weight .*\(3, 64\).*\(512, 64\)", misshapen)


def changed(weights: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: weight + by for name, weight in weights.items()}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def in_shards(folder: Path, weights: dict[str, torch.Tensor], kept_twice: str = "") -> None:
    """Write two shards and their index in place of model.safetensors. Both hold the tensor
    `kept_twice`, with another value in the second, though the index names the first."""
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    if kept_twice:
        second = {name: weights[name] for name in names[9:]} | {kept_twice: weights[kept_twice] + 3}
        save_file(second, folder / "model-2.safetensors")
    write_index(folder, {name: file for file, part in parts.items() for name in part})


def beside_a_backup(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(changed(weights, 1), folder / "model_old.safetensors")


def beside_a_stale_index(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(changed(weights, 1), folder / "model-00001-of-00001.safetensors")
    write_index(folder, dict.fromkeys(weights, "model-00001-of-00001.safetensors"))


def indexed(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    in_shards(folder, changed(weights, 2))
    beside_a_backup(folder, weights)


def indexed_with_a_tensor_twice(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    in_shards(folder, weights, kept_twice=min(weights))


def indexed_in_a_subfolder(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "all.safetensors")
    write_index(folder, dict.fromkeys(weights, "weights/all.safetensors"))


def linked_as_in_the_cache_of_the_hub(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "0a1b2c")
    (folder / "model.safetensors").symlink_to(Path("..", "blobs", "0a1b2c"))


LAYOUTS = (
    beside_a_backup,
    beside_a_stale_index,
    indexed,
    indexed_with_a_tensor_twice,
    indexed_in_a_subfolder,
    linked_as_in_the_cache_of_the_hub,
)


@pytest.mark.parametrize("arrange", LAYOUTS)
def test_the_weights_read_are_those_that_transformers_reads(arrange, tiny, tmp_path):
    folder, weights = copy_of(tiny(), tmp_path)
    arrange(folder, weights)
    source = opened(folder)
    expected = Qwen3VLForConditionalGeneration.from_pretrained(folder).state_dict()
    assert expected.keys() == source.tensors.keys()
    for name, value in expected.items():
        assert torch.equal(source.read(name, ()), value), name


def with_header(text: bytes) -> Arrange:
    whole = len(text).to_bytes(8, "little") + text
    return lambda folder, _: (folder / WEIGHTS_FILE).write_bytes(whole)


def renamed(name: str) -> Arrange:
    return lambda folder, _: (folder / WEIGHTS_FILE).rename(folder / name)


def indexed_as(name: object) -> Arrange:
    """Return a function that moves the weights to a file elsewhere and names them so."""

    def arrange(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        (folder.parent / "other").mkdir()
        (folder / WEIGHTS_FILE).rename(folder.parent / "other" / WEIGHTS_FILE)
        write_index(folder, dict.fromkeys(weights, name))

    return arrange


def with_broken_index(folder: Path, _: dict[str, torch.Tensor]) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / INDEX).write_text("{")


HEADER = f"{WEIGHTS_FILE}: its header is damaged"
SHARD = "model-00001-of-00001.safetensors"
REFUSED: dict[str, tuple[Arrange, str, dict[str, Any]]] = {
    # name: (change, file that is named, other fields of the error)
    "truncated": (
        lambda folder, _: os.truncate(folder / WEIGHTS_FILE, 10**5),
        WEIGHTS_FILE,
        {"problem_has": "it has 100000 bytes"},
    ),
    "half a header": (with_header(b"{"), HEADER, {}),
    "a list as header": (with_header(b"[1]"), HEADER, {}),
    "a number as tensor": (with_header(b'{"a": 1}'), HEADER, {}),
    "no offsets": (with_header(b'{"a": {"data_offsets": []}}'), HEADER, {}),
    "no text as header": (with_header(b"\xff"), HEADER, {}),
    # transformers refuses the first name and would read the second.
    "another name": (renamed("a.safetensors"), "", {"found": ["a.safetensors"]}),
    "a pickle": (renamed("pytorch_model.bin"), "", {"found": ["pytorch_model.bin"]}),
    # transformers with peft would load the base model that the adapter names.
    "an adapter": (
        lambda folder, _: (folder / "adapter_config.json").write_text("{}"),
        "",
        {"remedy_has": "lora.path"},
    ),
    "a missing shard": (indexed_as(SHARD), SHARD, {"problem_has": INDEX}),
    "an absolute path": (indexed_as("/etc/a.safetensors"), INDEX, {"found": "/etc/a.safetensors"}),
    "a path elsewhere": (indexed_as(f"../other/{WEIGHTS_FILE}"), INDEX, {}),
    "a number as path": (indexed_as(7), INDEX, {"found": 7}),
    "half an index": (with_broken_index, INDEX, {"problem_has": "is not JSON: "}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_checkpoint_is_refused_by_file(name, tiny, tmp_path):
    arrange, place, fields = REFUSED[name]
    folder, weights = copy_of(tiny(), tmp_path)
    arrange(folder, weights)
    with raises(CheckpointError, place=str(folder / place), **fields):
        opened(folder)


DTYPES = (torch.int8, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_no_plain_floats_are_refused(dtype, tiny, tmp_path):
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    folder = edited(tiny(), tmp_path / "copy", {name: torch.zeros(96, 64).to(dtype)})
    with raises(CheckpointError, place=str(folder)) as caught:
        opened(folder)
    (other,) = caught.value.found["of another type"]
    assert other.startswith(f"{name} ") and "BF16" in other and "dequantized" in other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_plain_floats_are_taken(dtype, tiny, tmp_path):
    weights = load_file(Path(tiny()) / WEIGHTS_FILE)
    opened(edited(tiny(), tmp_path / "copy", {k: v.to(dtype) for k, v in weights.items()}))


def test_a_stored_head_other_than_the_embedding_is_not_tied(tiny, tmp_path):
    """transformers would not tie it, and would train two weights where config.json declares one."""
    folder, weights = copy_of(tiny(tied=True), tmp_path)
    embedding = weights["model.language_model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    save_file(weights, folder / "model.safetensors")
    opened(folder)
    weights["lm_head.weight"][-1, -1] += 1e-3
    save_file(weights, folder / "model.safetensors")
    with raises(
        CheckpointError, key="tie_word_embeddings", found=True, problem_has="lm_head.weight"
    ):
        opened(folder)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.* has no config\.json"):
        HFCheckpoint(tmp_path)


def test_a_named_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(
        DataError, match=r"tokenizer\.json: is a named pipe, and only files are read"
    ):
        read_sizes(tmp_path)


def _values_read(worker: MegatronWorker) -> int:
    """Load the weights again, and return the number of values read."""
    from megatron_vlm.hf.load_weights import load_hf

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
    """The vocabulary is even, so the values read are the values held, on each rank."""
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
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    exported = {name: value for shard in shards for name, value in tensors(shard).items()}
    assert exported == tensors(Path(path) / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(len(value[2]) for value in exported.values())
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


def test_the_export_takes_the_files_of_a_list(pool, tiny, tmp_path):
    """Secrets, also behind links, and files of other formats are not exported."""
    folder, _ = copy_of(tiny(), tmp_path)
    names = {file.name for file in folder.iterdir()}
    secret = tmp_path / "id_ed25519"
    secret.write_text("secret")
    blobs = tmp_path / "models--Qwen--Tiny" / "blobs"
    blobs.mkdir(parents=True)
    (folder / "chat_template.jinja").rename(blobs / "0a1b2c")
    (folder / "chat_template.jinja").symlink_to(blobs / "0a1b2c")
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    (folder / "config.json").rename(folder / "config-v2.json")
    (folder / "config.json").symlink_to("config-v2.json")
    for name in (".env", "weights.gguf", "consolidated.pth", "notes.txt", "pytorch_model.bin"):
        (folder / name).write_text("secret")
    for name in ("notes", "README.md", "merges.txt"):
        (folder / name).symlink_to(secret)
    (folder / "LICENSE").write_text("free")
    (folder / "vocab.json").symlink_to("/nowhere/vocab.json")
    (folder / "added_tokens.json").mkdir()
    pool.run(export_again, 1, str(folder), layout(), str(tmp_path / "out"))
    out = {file.name: file for file in (tmp_path / "out").iterdir()}
    assert out.keys() == names | {"LICENSE", "README.md"}
    assert not any(file.is_symlink() for file in out.values())
    assert all(file.read_bytes() != b"secret" for file in out.values())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_what_the_export_leaves_out_is_said(tiny, tmp_path, capsys):
    folder, _ = copy_of(tiny(), tmp_path)
    copy_files(folder, tmp_path)
    assert capsys.readouterr().err == ""
    (folder / "\x1b[2Jnotes").write_text("")
    (folder / "LICENSE").symlink_to("/etc/hostname")
    (folder / "README.md").write_text("another model's")
    (folder / MARK).write_text("{}")  # the folder is an export of a first stage
    copy_files(folder, tmp_path)
    output = capsys.readouterr().err
    assert "the export leaves out '\\x1b[2Jnotes', 'LICENSE' of" in output
    assert not (tmp_path / "README.md").exists() and not (tmp_path / MARK).exists()


def test_the_list_has_every_file_that_transformers_writes(tiny, tmp_path):
    Qwen3VLForConditionalGeneration.from_pretrained(tiny()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny()).save_pretrained(tmp_path)
    names = {CONFIG_NAME, GENERATION_CONFIG_NAME, PROCESSOR_NAME, IMAGE_PROCESSOR_NAME}
    names |= {VIDEO_PROCESSOR_NAME, CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE}
    names |= set(Qwen2Tokenizer.vocab_files_names.values())
    names |= {file.name for file in tmp_path.iterdir()} - {"model.safetensors"}
    assert names <= set(SETTINGS)


def test_an_export_never_overwrites(pool, tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RuntimeError, match=rf"CheckpointError: {tmp_path}: "):
        pool.run(export_again, 1, tiny(), layout(), str(tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_only_finite_weights_are_loaded(value, pool, tiny, tmp_path):
    """One value of a tensor that one of two ranks reads is not finite in the training dtype."""
    folder, weights = copy_of(tiny(), tmp_path)
    name = "model.language_model.layers.3.mlp.down_proj.weight"
    weights[name] = weights[name].double()
    weights[name][-1, -1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for error in pool.run(refusal, 2, str(folder), layout(pp=2)):
        assert type(error) is CheckpointError and str(error).startswith(f"{folder}: {name} ")


def export_nan(worker: MegatronWorker, out: str) -> None:
    """Export a model of which one weight of the last stage is NaN."""
    if worker.grid.is_last_stage:
        next(reversed(worker.held.values())).data.view(-1)[3] = torch.nan
    worker.export_hf(out)


def test_only_finite_weights_are_exported(pool, tiny, tmp_path):
    out = str(tmp_path / "out")
    for error in pool.run(refusal, 4, tiny(), layout(tp=2, pp=2), partial(export_nan, out=out)):
        assert str(error).startswith(f"{out}: lm_head.weight ") and "NaN" in str(error)
        assert type(error) is CheckpointError
    assert list(tmp_path.iterdir()) == []
