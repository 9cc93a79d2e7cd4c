# .venv/bin/python -m pytest tests/lora/test_head_files.py
"""The head's adapter in and out: PEFT loads the exported adapter, and PEFT's own is loaded here. A
merge into a tied model unties it. Checkpoints hold the adapter at any layout, and a run scores the
same in each form."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.retention import step_folder
from megatron_vlm.checkpoint.save_load import save
from megatron_vlm.cli import main
from megatron_vlm.family import read_sizes
from megatron_vlm.lora.peft_config import lora_of
from megatron_vlm.report.layout_table import short_name
from megatron_vlm.training.worker import MegatronWorker
from tests.checkpoint.test_checkpoint import Part, bf16, go, whole
from tests.lora.test_files import PLACES, difference, refused, score
from tests.lora.test_head import ALONE, EVERY, LANGUAGE, ODD, TIED, VOCAB
from tests.lora.test_head import pytestmark as pytestmark  # PEFT's warnings
from tests.model.test_parity import layout
from tests.run.test_train import go_pooled
from tests.support.batches import MIXED, make_rows
from tests.support.peft_reference import Adapter, peft_model
from tests.support.peft_reference import save as save_peft
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, my_rows
from tests.support.sets import write_set
from tests.support.suites import full, slow

A, B = (f"base_model.model.lm_head.lora_{each}.weight" for each in "AB")
# Relative error. Measured worst case: 1.6e-7.
TOLERANCE = 1.5e-6


def train_and_export(path: str, case: Case, folder: Path) -> list[Tensor]:
    """Train two steps, write each export and a checkpoint, and return the log-probs afterwards."""
    worker = MegatronWorker(case.config(path))
    for seed in range(2):
        worker.forward_backward(my_rows(make_rows(MIXED, VOCAB, seed)))
        worker.optim_step(lr=0.03)
    for kind in ("adapter", "merged"):
        worker.export_hf(str(folder / kind), kind=kind)  # type: ignore[arg-type]
    save(worker, step_folder(folder, 2), {"step": 2})
    return worker.forward(make_rows(MIXED, VOCAB))


def log_probs(model: torch.nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [row_log_probs(model.eval(), row) for row in make_rows(MIXED, VOCAB)]  # type: ignore[arg-type]


def log_probs_here(path: str, case: Case) -> list[Tensor]:
    worker = MegatronWorker(case.config(path), training=False)
    return worker.forward(make_rows(MIXED, VOCAB))


def ties(folder: Path) -> set[bool]:
    """Return the values of `tie_word_embeddings` in all parts of config.json that have it."""
    config = json.loads((folder / "config.json").read_text())
    key = "tie_word_embeddings"
    return {config[key], *(part[key] for part in [config["text_config"]] if key in part)}


def with_a_copy(path: str, folder: Path) -> str:
    """Copy a tied model, with the head stored in its file as well."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("adapter", "case", "sizes"),
    [
        full(LANGUAGE, layout(tp=2, pp=2), TIED),
        slow(EVERY, layout(tp=2), ODD),
        slow(ALONE, layout(pp=2, virtual_stages=2), TIED),
        slow(ALONE, layout(dp=2), ODD),
        slow(LANGUAGE, layout(), {**TIED, "copy": True}),
    ],
)
def test_peft_and_transformers_load_what_is_exported(
    adapter, case, sizes, pool, tiny, tmp_path, record_property
):
    case, tied = replace(case, lora=adapter.ours), bool(sizes.get("tied"))
    path = tiny(**{key: value for key, value in sizes.items() if key != "copy"})
    if "copy" in sizes:
        path = with_a_copy(path, tmp_path / "base")
    trained = pool.run(train_and_export, case.world, path, case, tmp_path)[0]
    base = log_probs(load_reference(path))
    assert difference(trained, base) > 0.01
    checkpoint = str(step_folder(tmp_path, 2))
    export_checkpoint(checkpoint, str(tmp_path / "from_checkpoint"))
    export_checkpoint(checkpoint, str(tmp_path / "merged_from_checkpoint"), kind="merged")
    for one, other in zip(PLACES[:2], PLACES[2:], strict=True):
        files = {each.name: each.read_bytes() for each in (tmp_path / one).iterdir()}
        again = {each.name: each.read_bytes() for each in (tmp_path / other).iterdir()}
        assert [name for name in files if files[name] != again[name] and name != "README.md"] == []
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored[A].shape == (4, 64) and stored[B].shape == (VOCAB, 4)
    assert all(".lora_" in name for name in stored)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]
    loaded = PeftModel.from_pretrained(load_reference(path), tmp_path / "adapter")
    merged = load_reference(str(tmp_path / "merged"))
    again = pool.run(log_probs_here, 1, str(tmp_path / "merged"), layout())[0]
    worst = max(difference(each, trained) for each in (log_probs(loaded), log_probs(merged), again))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    with loaded.disable_adapter():
        assert difference(log_probs(loaded), base) == 0
    # The embedding is unchanged, and the head is no longer the embedding.
    folders = Path(path), tmp_path / "merged"
    before, after = (load_file(each / "model.safetensors") for each in folders)
    embedding = "model.language_model.embed_tokens.weight"
    assert torch.equal(before[embedding], after[embedding])
    assert after.keys() == before.keys() | {"lm_head.weight"}
    head = before.get("lm_head.weight", before[embedding])
    expected = head + 3 * stored[B] @ stored[A]  # alpha 12, rank 4
    assert torch.allclose(after["lm_head.weight"], expected, rtol=0, atol=1e-7)
    assert ties(Path(path)) == {tied} and ties(tmp_path / "merged") == {False}


def test_a_model_without_it_stays_tied(pool, tiny, tmp_path):
    case = replace(layout(), lora=Adapter().ours)
    pool.run(train_and_export, 1, tiny(**TIED), case, tmp_path)
    assert ties(tmp_path / "merged") == {True}
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


@pytest.mark.parametrize("sizes", [full(ODD), TIED])
def test_what_peft_writes_is_loaded(sizes, pool, tiny, tmp_path, record_property):
    """PEFT's file also has the head's own weight, which must be that of the model."""
    path, model = tiny(**sizes), peft_model(tiny(**sizes), LANGUAGE)
    folder = Path(save_peft(model, tmp_path / "peft"))
    copied = "base_model.model.lm_head.base_layer.weight"
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    assert copied in stored
    lora = lora_of(folder, path)
    assert lora.train == () and "lm_head" in lora.targets
    case = replace(layout(), lora=vars(lora))
    worst = difference(pool.run(log_probs_here, 1, path, case)[0], log_probs(model))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    for wrong in (stored[copied] * (1 + 1e-3), stored[copied][:-1]):
        save_file(stored | {copied: wrong.contiguous()}, file)
        message = pool.run(refused, 1, path, case)[0]
        assert f": model.path={path} " in message and f"{copied} [{len(wrong)}, 64]; " in message
    save_file(stored | {copied: stored[copied].bfloat16()}, file)
    assert pool.run(log_probs_here, 1, path, case)[0]  # PEFT may have loaded the model in bf16
    without = dict(vars(lora), targets=tuple(t for t in lora.targets if t != "lm_head"))
    message = pool.run(refused, 1, path, replace(case, lora=without))[0]
    assert ": lora.targets=" in message and " 3 of them" in message


LORA = dict(rank=4, alpha=8.0, targets=("attention", "head"), dropout=0.2)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [ODD, TIED])
def test_checkpoints_hold_the_same_bits_at_any_layout(sizes, pool, tiny, tmp_path):
    """The run moves from TP2 to DP2 and to TP2 x PP2, with its values and moments."""
    before = None
    for number, case in enumerate((layout(tp=2), layout(dp=2), layout(tp=2, pp=2))):
        case, run = replace(case, lora=LORA), tmp_path / f"{number}"
        steps = range(1) if before is None else range(1, 1)
        part = Part(run, steps, before, (1,), False, VOCAB)
        pool.run(go, case.world, tiny(**sizes), case, part)
        folder = step_folder(run, 1)
        if before is not None:
            actual, expected = whole(folder), whole(before)
            assert actual.keys() == expected.keys()
            assert {f"{kind}{B}" for kind in ("", "exp_avg/", "exp_avg_sq/")} < actual.keys()
            assert len(actual[B]) == VOCAB
            assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []
        before = folder


@pytest.mark.parametrize(
    "case",
    [
        full(bf16(layout(tp=2))),
        slow(layout(pp=2, virtual_stages=2)),
        slow(layout(dp=2)),
    ],
)
def test_resumed_is_bit_for_bit_the_run_without_a_break(case, pool, tiny, tmp_path):
    case, path = replace(case, lora=LORA), tiny(**TIED)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    part = Part(straight, range(3), None, (2, 3), False, VOCAB)
    figures = pool.run(go, case.world, path, case, part)[0]
    part = Part(resumed, range(2, 3), step_folder(straight, 2), (3,), False, VOCAB)
    assert pool.run(go, case.world, path, case, part)[0] == figures[2:]
    actual, expected = whole(step_folder(resumed, 3)), whole(step_folder(straight, 3))
    assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []


@pytest.mark.full
def test_dropout_is_the_same_whatever_the_layout(pool, tiny, tmp_path):
    def figures(case: Case, dropout: float = 0.2) -> list[tuple[float, float]]:
        case = replace(case, lora=dict(LORA, targets=("head",), dropout=dropout))
        part = Part(tmp_path, range(2), vocab=VOCAB)
        return pool.run(go, case.world, tiny(**ODD), case, part)[0]

    plain = figures(layout())
    other = figures(layout(tp=2, pp=2, recompute="full"))
    assert other == [pytest.approx(step, rel=2e-5) for step in plain]
    without = figures(layout(), dropout=0.0)
    # In the first step B is zero, and so is the gradient of A. Dropout changes the gradient of B.
    assert abs(without[0][1] / plain[0][1] - 1) > 1e-3


@pytest.fixture(scope="module")
def a_run(pool, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_set(folder)
    words = ("lora=default", "lora.targets=[attention,head]", "checkpoint.export=both")
    more = ("train.steps=3", "optim.lr=0.03")
    status, out, err = go_pooled(pool, 2, folder, tiny(tied=True), "run", *words, *more)
    assert status == 0, err
    return folder, out


@pytest.mark.full
def test_a_run_its_adapter_and_the_merged_model_score_the_same(a_run, pool):
    folder, _ = a_run
    data = [f"data.eval={folder / 'train.jsonl'}", "data.cache_dir=null", "data.num_workers=0"]
    losses = [
        json.loads(pool.run(score, 1, str(folder / "run" / name), words)[0])["loss"]
        for name, words in (
            ("", [*data, "parallel.pp=1"]),
            ("export", ["model=tiny_cpu", *data]),
            ("merged", ["model=tiny_cpu", *data]),
        )
    ]
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3
    card = (folder / "run" / "export" / "README.md").read_text()
    assert "in `attention`, `head`" in card


@pytest.mark.full
def test_a_dry_run_counts_it(a_run, tiny, capfd):
    folder, _ = a_run
    words = [f"model.path={tiny(tied=True)}", "model=tiny_cpu", "data.cache_dir=null"]
    words += [f"data.train={folder / 'train.jsonl'}", "lora=default", "lora.targets=[lm_head]"]
    assert main(["train", *words, "--dry-run"]) == 0
    head = read_sizes(tiny(tied=True)).head
    out = capfd.readouterr().out
    assert out.count(short_name(16 * sum(head.shape))) == 3, out
    frozen = ["lora.train=[language]", "checkpoint.export=merged"]
    assert main(["train", *words, *frozen, "--dry-run"]) == 2
    assert "lora.targets has lm_head of the part language" in capfd.readouterr().err
