# .venv/bin/python -m pytest tests/lora/test_base.py
"""Frozen weights beside adapters in 4 or 8 bits (lora.base), apart from their products, which
test_lora.py compares with PEFT's: codes, memory, files of bitsandbytes, exports, refusals."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.cli import main
from megatron_vlm.commands.eval import locate
from megatron_vlm.config import load_config
from megatron_vlm.config.command_checks import check_serve
from megatron_vlm.config.lora_base_types import base_bytes
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.block_weight import NF4_VALUES, BlockCodes, BlockWeight, rounded
from megatron_vlm.hf.export_mark import read_export_mark
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.lora.peft_folder import lora_of
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.parameters import count, fits_blocks
from megatron_vlm.training.preflight import check_model
from megatron_vlm.training.worker import MegatronWorker
from tests.lora.test_files import (
    ask,
    check_equal_scores,
    difference,
    log_probs,
    score,
    train_and_export,
)
from tests.lora.test_lora import BLOCKS, EXPERTS_IN_BLOCKS
from tests.model.test_parity import layout
from tests.rl.test_rl import learnt, lines
from tests.run.test_train import go_pooled, steps_of
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.moe import opened
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, refusal
from tests.support.sets import write_set
from tests.support.suites import full
from tests.training.test_preferences import pairs

CPU = torch.device("cpu")
NF4 = dict(rank=4, targets=("attention", "mlp"), base="nf4")
SMALL = dict(BLOCKS, layers=2, vision_depth=1, deepstack=1)
BLOCK = 64
SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
STATE = "quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_values_of_codes_become_the_same_codes(base):
    """So a checkpoint of codes can be read as values."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(96, 64, generator=generator) * torch.rand(96, 1, generator=generator)
    weights[3] = 0
    weights[5] *= 1e-30
    values = rounded(weights, base)
    codes, again = (BlockCodes.empty(base, weights.numel(), CPU) for _ in range(2))
    codes.encode(weights)
    again.encode(values)
    assert torch.equal(codes.codes_K, again.codes_K) and torch.equal(codes.scales_B, again.scales_B)
    assert torch.equal(rounded(values, base), values) and not values[3].any()
    largest = weights.abs().amax(1)
    assert torch.equal(values.abs().amax(1), largest)
    widest = max(b - a for a, b in pairwise(NF4_VALUES))
    half = widest / 2 if base == "nf4" else 0.5 / 127
    assert bool(((values - weights).abs() <= (half + 1e-6) * largest[:, None]).all())
    stored = codes.codes_K.nbytes + codes.scales_B.nbytes
    assert stored == base_bytes(base) * weights.numel()


def test_a_weight_of_codes_cannot_be_changed_by_mistake():
    weight = BlockWeight.empty("nf4", torch.Size([4, 64]), torch.float32, CPU)
    weight.codes.encode(torch.ones(4, 64))
    with torch.no_grad(), pytest.raises(AssertionError, match="copy_"):
        weight.copy_(torch.zeros(4, 64))
    assert torch.equal(weight.dequantize(), torch.ones(4, 64))
    assert type(weight + 1) is Tensor


def held_bytes(path: str, case: Case) -> tuple[int, int]:
    """Return the bytes of this rank's weights: as they are, and as the planner counts them."""
    worker, total = MegatronWorker(case.config(path), training=False), 0
    for param in worker.held.values():
        if isinstance(param, BlockWeight):
            total += param.codes.codes_K.nbytes + param.codes.scales_B.nbytes
        else:
            total += param.nbytes
    counts = count(
        ModelLayout(worker.cfg, worker.source.sizes, worker.dims, 4), worker.grid.pp.rank
    )
    return total, counts.weight_bytes(worker.cfg.lora.base, 4)


@pytest.mark.parametrize(
    ("case", "sizes"), [full(layout(tp=2, pp=2), BLOCKS), (layout(dp=2, ep=2), EXPERTS_IN_BLOCKS)]
)
def test_the_planner_knows_the_bytes(case, sizes, pool, tiny):
    for base in ("nf4", "int8"):
        on_ranks = pool.run(
            held_bytes, case.world, tiny(**sizes), replace(case, lora=dict(NF4, base=base))
        )
        assert all(held == planned for held, planned in on_ranks), on_ranks


# Checkpoints in the form of bitsandbytes. test_codes_and_files_are_those_of_bitsandbytes compares
# this form with its own.


def write_in_blocks(
    folder: Path, out: Path, chosen: Callable[[str], bool], nested: bool = True
) -> None:
    """Write a copy of a checkpoint with these matrices in NF4. If the scales are codes of 8 bits,
    they have a simpler map than that of bitsandbytes."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if chosen(each)]:
        weight = tensors[name]
        codes = BlockCodes.empty("nf4", weight.numel(), CPU)
        codes.encode(weight)
        state = dict(quant_type="nf4", blocksize=BLOCK, dtype="float32", shape=list(weight.shape))
        sides = {"absmax": codes.scales_B, "quant_map": torch.tensor(NF4_VALUES)}
        if nested:
            scales, mean = codes.scales_B, float(codes.scales_B.mean())
            padded = torch.nn.functional.pad(scales - mean, (0, -len(scales) % 256)).view(-1, 256)
            factors, steps = padded.abs().amax(1), torch.linspace(-1, 1, 256)
            shares = (padded / factors[:, None]).flatten()[: len(scales)]
            sides["absmax"] = (shares[:, None] - steps).abs().argmin(1).to(torch.uint8)
            sides |= {"nested_absmax": factors, "nested_quant_map": steps}
            state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=mean)
        tensors[name] = codes.codes_K[:, None]
        tensors |= {f"{name}.{side}": value for side, value in sides.items()}
        tensors[f"{name}.{STATE}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    change_config(out, quantization_config=QUANTIZATION)


QUANTIZATION = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def is_linear(name: str) -> bool:
    """Return whether transformers would store this tensor in 4 bits."""
    is_matrix = name.endswith((".weight", "_proj")) and "norm" not in name and "embed" not in name
    return is_matrix and name != "lm_head.weight" and not name.endswith("mlp.gate.weight")


def change_tensors(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of a checkpoint, or remove them."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changed
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def in_blocks(tiny, tmp_path_factory):
    """Return the folder of a tiny checkpoint in 4 bits, with scales in 8 bits."""
    out = tmp_path_factory.mktemp("blocks") / "nested"
    write_in_blocks(Path(tiny(**SMALL)), out, is_linear)
    return out


def test_a_checkpoint_in_4_bits_is_read_as_it_is(pool, tiny, in_blocks, tmp_path):
    """Its codes are kept, also where a rank reads a part of them, and what is not in 4 bits there
    is not put into 4 bits."""
    whole = opened(in_blocks)
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    value = whole.read(name, ())
    assert value.dtype is torch.float32 and torch.equal(rounded(value, "nf4"), value)
    assert torch.equal(whole.read(name, ((16, 48), (64, 128))), value[16:48, 64:])
    assert whole.tensors[name].dtype == "F32" and whole.tensors[name].shape == (64, 128)
    plain = opened(tiny(**SMALL))
    assert whole.tensors.keys() == plain.tensors.keys()
    error = float((value - plain.read(name, ())).norm() / value.norm())
    assert 0.05 < error < 0.15  # 4 bits

    some = tmp_path / "some"
    write_in_blocks(Path(tiny(**SMALL)), some, lambda n: is_linear(n) and "k_proj" not in n, False)
    rows = make_rows(MIXED, 512)
    for folder, left_out in ((in_blocks, False), (some, True)):
        outputs = []
        for case in (layout(), layout(tp=2, pp=2)):
            case = replace(case, lora=NF4)
            outputs.append(pool.run(scores_and_names, case.world, str(folder), case, rows)[0])
        (scores, names), (on_four_ranks, _) = outputs
        assert ("decoder.layers.0.self_attention.linear_qkv.weight" in names) != left_out
        assert "decoder.layers.0.mlp.linear_fc1.weight" in names
        model = load_reference(tiny(**SMALL))
        source = opened(folder)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(source.read(key, ()))
            for row, ours, others in zip(rows, scores, on_four_ranks, strict=True):
                expected = row_log_probs(model, row)
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
                torch.testing.assert_close(ours, others, atol=1e-4, rtol=0)


def scores_and_names(path: str, case: Case, rows: list) -> tuple[list[Tensor], list[str]]:
    worker = MegatronWorker(case.config(path), training=False)
    held = worker.held.items()
    names = [entry.our_name for entry, param in held if isinstance(param, BlockWeight)]
    return worker.forward(rows), names


def test_an_export_of_a_checkpoint_in_4_bits_has_plain_weights(pool, tiny, in_blocks, tmp_path):
    """They are those that it was trained with, so that it needs no bitsandbytes."""
    trained = pool.run(train_and_export, 1, str(in_blocks), Case(lora=NF4), tmp_path)[0]
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == load_file(Path(tiny(**SMALL)) / "model.safetensors").keys()
    assert difference(log_probs(load_reference(str(tmp_path / "merged"))), trained) < 5e-6
    # What PEFT writes beside such a model says nothing about 4 bits, but the model does.
    adapter = tmp_path / "adapter"
    assert lora_of(adapter, str(in_blocks)).base == "nf4"
    assert lora_of(adapter, tiny(**SMALL)).base is None


@pytest.fixture(scope="module")
def a_run(pool, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_set(folder)
    words = ("lora=default", "lora.base=nf4", "checkpoint.export=both", "train.steps=2")
    for more in ((), ("train.steps=3", "parallel.pp=1", "parallel.tp=2")):  # it resumes
        status, out, err = go_pooled(pool, 2, folder, tiny(**SMALL), "run", *words, *more)
        assert status == 0, err
    return folder, out


@pytest.mark.full
def test_a_run_says_what_it_trains_beside(a_run):
    folder, out = a_run
    assert "frozen linear layers in 4 bits (NF4)" in " ".join(out.split())
    for form in ("export", "merged"):
        card = (folder / "run" / form / "README.md").read_text()
        assert "beside linear layers in 4 bits (NF4), blocks of 64" in card
    assert read_export_mark(folder / "run" / "export").base_type == "nf4"
    assert [step["step"] for step in steps_of(folder / "run")] == [1, 2, 3]


@pytest.mark.full
def test_a_run_its_adapter_and_the_merged_model_are_the_same(a_run, pool):
    """Scores and answers of the adapter are those beside the weights in 4 bits."""
    folder, _ = a_run
    run = folder / "run"
    data = check_equal_scores(folder, pool, "eval.generate=true", "eval.samples=4")
    beside_codes, beside_fp32 = (
        json.loads(pool.run(score, 1, str(run / "export"), ["model=tiny_cpu", *data, *more])[0])
        for more in ((), ("lora.base=null",))
    )
    assert abs(beside_fp32["loss"] / beside_codes["loss"] - 1) > 1e-4
    with raises(ConfigError, key="lora.alpha", remedy_has="only lora.base"):
        locate(str(run / "export"), ["lora.alpha=8", "lora.base=int8", *data])
    assert pool.run(ask, 1, str(run)) == pool.run(ask, 1, str(run / "merged"))
    out = folder / "again"
    assert main(["export", str(run), str(out), "--as", "merged"]) == 0
    name = "model.safetensors"
    assert (out / name).read_bytes() == (run / "merged" / name).read_bytes()


@pytest.mark.slow
def test_the_policy_begins_as_its_reference(pool, tiny, tmp_path):
    """In reinforcement learning this is a second model in 4 bits."""
    write_set(tmp_path, rows=7)
    more = ("lora=default", "lora.base=nf4", "parallel.pp=2", "optim.lr=1e-2")
    run = learnt(pool, 2, tmp_path, tiny(**SMALL), "nf4", *more)
    kl = [line["kl"] for line in lines(run, "rl")]
    assert abs(kl[0]) < 1e-7 < kl[2]


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["adapters_off", "keep", "model"])
def test_pairs_begin_with_equal_rewards(reference, pool, tiny, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs()))
    words = ("lora=default", "lora.base=nf4", "train.steps=2", "train.objective=dpo")
    words += (f"preference.reference={reference}", f"data.train={data}")
    status, _, err = go_pooled(pool, 2, tmp_path, tiny(**SMALL), "run", *words)
    assert status == 0, err
    first, second = steps_of(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) != second["loss"]


def test_what_blocks_cannot_store_is_refused(pool, tiny):
    base, tower = dict(key="lora.base", found="nf4"), dict(vision_hidden=8, vision_intermediate=9)
    cut = dict(key="parallel.tp", found=2, allowed=[1])
    for tp, sizes, fields, words in (
        (2, dict(BLOCKS, intermediate=192), cut, "192 weights, into parts"),
        (1, dict(intermediate=128), base, "self_attn.o_proj.weight [64, 96]"),
        (1, dict(EXPERTS_IN_BLOCKS, expert_intermediate=40), base, "experts.down_proj [8, 64, 40]"),
        (1, dict(BLOCKS, **tower), base, "of model.visual.blocks.0.mlp.linear_fc1"),
    ):
        error = pool.run(refusal, tp, tiny(**sizes), replace(layout(tp=tp), lora=NF4))[0]
        with raises(ConfigError, **fields, problem_has=words):
            raise error
    cfg, sizes = Case(lora=NF4).config("x"), read_sizes(tiny(**dict(BLOCKS, intermediate=192)))
    assert [tp for tp in (1, 2, 4) if fits_blocks(cfg, sizes, tp)] == [1]


def test_engines_and_services_load_other_weights(tmp_path):
    cfg = load_config(["model.path=x", "lora=default", "lora.base=nf4", "engine.name=vllm"])
    cfg = replace(cfg, engine=replace(cfg.engine, python="python"))
    with raises(ConfigError, key="lora.base", remedy_has="engine.name=own"):
        check_engine(cfg, "rl")
    with raises(ConfigError, key="lora.rank", remedy_has="serve.max_rank"):
        check_serve(cfg)


def test_stored_codes_go_only_beside_adapters(pool, in_blocks):
    for lora in ({}, dict(NF4, base=None), dict(NF4, base="int8")):
        error = pool.run(refusal, 1, str(in_blocks), Case(lora=lora))[0]
        with raises(ConfigError, key="lora.base", allowed=("nf4",), problem_has="22 weights"):
            raise error


NAME = "model.language_model.layers.1.mlp.down_proj.weight"
OTHERS = {
    "fp8": dict(quant_method="fp8"),
    "gptq": dict(quant_method="gptq", bits=4),
    "llm_int8": dict(QUANTIZATION, load_in_4bit=False, load_in_8bit=True),
    "fp4": dict(QUANTIZATION, bnb_4bit_quant_type="fp4"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_quantizations_are_refused_before_weights_are_read(kind, in_blocks, tmp_path):
    shutil.copytree(in_blocks, tmp_path / "model")
    change_config(tmp_path / "model", quantization_config=OTHERS[kind])
    for read in (HFCheckpoint, check_model):
        with raises(ConfigError, problem_has="quantization_config=", remedy_has="lora.base=nf4"):
            read(str(tmp_path / "model"))


def state_of(folder: Path, **changed: object) -> Tensor:
    raw = bytes(load_file(folder / "model.safetensors")[f"{NAME}.{STATE}"].tolist())
    return torch.tensor(list(json.dumps(json.loads(raw) | changed).encode()), dtype=torch.uint8)


DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # names of tensors or keys of their description, and the fields of the error
    "blocks": ({"blocksize": 128}, dict(key="blocksize", found=128)),
    "nested blocks": ({"nested_blocksize": 64}, dict(key="nested_blocksize", found=64)),
    "a type": ({"dtype": "int8"}, dict(key="dtype", found="int8")),
    "types": ({"dtype": ["float32"]}, dict(key="dtype", found=["float32"])),
    "a mean": ({"nested_offset": "x"}, dict(key="nested_offset", found="x")),
    "no mean": ({"nested_offset": None}, dict(key="nested_offset")),
    "another shape": ({"shape": [64, 64]}, dict(key=NAME, problem_has="(4096, 1) values")),
    "one side": ({"shape": [8192]}, dict(key="shape")),
    "sides of text": ({"shape": ["a", 1]}, dict(key="shape[0]")),
    "no scales": ({".absmax": None}, dict(key=NAME, problem_has=f"lacks {NAME}.absmax")),
    "no factors": ({".nested_absmax": None}, dict(key=NAME, problem_has="lacks")),
    "another table": ({".quant_map": torch.linspace(-1, 1, 16)}, dict(key=NAME)),
    "a short table": ({".quant_map": torch.linspace(-1, 1, 15)}, dict(key=NAME)),
    "a short nested table": ({".nested_quant_map": torch.ones(255)}, dict(key=NAME)),
    "a number as factors": ({".nested_absmax": torch.tensor(1.0)}, dict(remedy_has="download")),
    "a number as codes": ({"": torch.tensor(1.0)}, dict(remedy_has="download")),
    f"{STATE} in fp32": ({f".{STATE}": torch.ones(9)}, {}),
    f"{STATE} of no text": ({f".{STATE}": torch.tensor([255, 0], dtype=torch.uint8)}, {}),
}
_WRONG_TYPES = {
    "": "bool int64 complex64 float8_e4m3fn",
    ".absmax": "int8 int64 bool float32 complex64 float8_e4m3fn",  # codes of the nested scales
    ".quant_map": "uint8 int64 bool complex64 float8_e4m3fn",
    ".nested_absmax": "uint8 int64 bool complex64 float8_e4m3fn",
    ".nested_quant_map": "uint8 int64 bool complex64 float8_e4m3fn",
}


@pytest.mark.full
def test_damaged_codes_are_refused(in_blocks, tiny, tmp_path):
    """Each is refused as the headers are read, with the weight or the field that is wrong."""
    failures = []
    plain = tmp_path / "plain"
    write_in_blocks(Path(tiny(**SMALL)), plain, is_linear, nested=False)
    cases = [(name, in_blocks, change, fields) for name, (change, fields) in DAMAGED.items()]
    folders = [(in_blocks, side, kinds) for side, kinds in _WRONG_TYPES.items()]
    for folder, side, kinds in (*folders, (plain, ".absmax", "uint8 int64 bool complex64")):
        stored = load_file(folder / "model.safetensors")[NAME + side]
        for kind in kinds.split():
            change = {side: stored.to(getattr(torch, kind))}
            cases.append((f"{side} of {kind}", folder, change, dict(key=NAME, problem_has=kind)))
    for number, (name, source, change, fields) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "model.safetensors").unlink()
        keys = {key: value for key, value in change.items() if key and key[0] != "."}
        changed = {NAME + key: value for key, value in change.items() if key not in keys}
        changed |= {f"{NAME}.{STATE}": state_of(source, **keys)} if keys else {}
        shutil.copy(source / "model.safetensors", folder / "model.safetensors")
        change_tensors(folder, **changed)
        try:
            with raises(CheckpointError, **{"remedy_has": "in bf16"} | fields):
                HFCheckpoint(folder).read_headers()
        except BaseException as error:
            failures.append(f"{name}: {error!r}")
    assert not failures, "\n".join(failures)
