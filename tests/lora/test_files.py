# .venv/bin/python -m pytest tests/lora/test_files.py
"""Adapters in and out: PEFT loads the exported adapters, PEFT's own adapters are loaded here, and a
run with adapters can be exported, scored and asked."""

import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.checkpoint.save_load import save
from megatron_vlm.cli import main
from megatron_vlm.commands.chat.command import Settings, find_model
from megatron_vlm.commands.eval import run_eval
from megatron_vlm.config.schema import CheckpointConfig, LoraConfig
from megatron_vlm.config.trainable import scale_of
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.printable import short_name
from megatron_vlm.lora.peft_folder import _PLAIN, base_of, lora_of
from megatron_vlm.lora.targets import adapted_specs, adapted_weights, serving_remark
from megatron_vlm.training.worker import MegatronWorker
from tests.lora.test_lora import (
    ALL,
    BESIDE_MERGER,
    BLOCKS,
    DELTA_NET,
    DOWN,
    EVERY,
    EXPERTS,
    EXPERTS_IN_BLOCKS,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_IN_BLOCKS,
    IN_EXPERTS,
    IN_GEMMA4_EXPERTS,
    SHARED_EXPERT,
    Sizes,
    written,
)
from tests.model.test_parity import layout
from tests.run.test_train import go_pooled, steps_of
from tests.support import gemma4
from tests.support.batches import MIXED, make_rows
from tests.support.gemma4 import TinyGemma4
from tests.support.peft_reference import Adapter, base_model, peft_model
from tests.support.peft_reference import save as save_peft
from tests.support.pool import Pool
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, my_rows, refusal
from tests.support.sets import write_set
from tests.support.suites import full, slow

Rows = Callable[[int], list[Row]]  # a batch of a seed
OF_QWEN = partial(make_rows, MIXED, 512)
OF_GEMMA4 = partial(gemma4.make_rows, gemma4.MIXED)


def rows_for(sizes: Sizes) -> Rows:
    return OF_GEMMA4 if isinstance(sizes, TinyGemma4) else OF_QWEN


def train_and_export(
    path: str, case: Case, folder: Path, rows: Rows = OF_QWEN
) -> list[torch.Tensor]:
    """Train two steps, write each export and a checkpoint, and return the log-probs afterwards."""
    worker = MegatronWorker(case.config(path))
    for seed in range(2):
        worker.forward_backward(my_rows(rows(seed)))
        worker.optim_step(lr=0.03)
    for kind in ("adapter", "merged"):
        worker.export_hf(str(folder / kind), kind=kind)
    save(worker, step_folder(folder, 2), {"step": 2})
    return worker.forward(rows(0))


def log_probs(model: torch.nn.Module, rows: Rows = OF_QWEN) -> list[torch.Tensor]:
    with torch.no_grad():
        return [row_log_probs(model.eval(), row) for row in rows(0)]


def difference(ours, theirs) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def check_exports_of_checkpoint(folder: Path) -> None:
    """Check that the exports of the checkpoint are those that training wrote."""
    for kind in ("adapter", "merged"):
        out = folder / f"{kind}_from_checkpoint"
        export_checkpoint(str(step_folder(folder, 2)), str(out), kind=kind)
        files = {path.name: path.read_bytes() for path in (folder / kind).iterdir()}
        again = {path.name: path.read_bytes() for path in out.iterdir()}
        assert files.keys() == again.keys() - {"megatron_vlm.json"}  # only a checkpoint has an id
        assert [name for name in files if files[name] != again[name] and name != "README.md"] == []


@pytest.mark.parametrize(
    ("adapter", "case", "sizes"),
    [
        (ALL, layout(tp=2, pp=2), {}),
        full(BESIDE_MERGER, layout(dp=2), {}),
        full(ALL, layout(tp=2, pp=2, layers_per_stage=[1, 3]), DELTA_NET),
        full(Adapter(), layout(pp=2, dp=2, ep=2), SHARED_EXPERT),
        full(replace(ALL, base="nf4"), layout(tp=2, pp=2), BLOCKS),
        slow(replace(BESIDE_MERGER, base="int8"), layout(tp=2), BLOCKS),
        slow(replace(IN_EXPERTS, base="nf4"), layout(pp=2, dp=2, ep=2), EXPERTS_IN_BLOCKS),
        slow(Adapter(("in_proj_qkv", "in_proj_a", "q_proj")), layout(tp=2), DELTA_NET),
        slow(Adapter(("in_proj_?", "shared_expert.*_proj")), layout(dp=2, ep=2), SHARED_EXPERT),
        slow(Adapter(), layout(pp=2, dp=2, ep=2), {**EXPERTS, "dense_layers": 1}),
        slow(replace(ALL, rslora=True), layout(pp=2), {}),
        slow(Adapter(("q_proj", "linear_fc1")), layout(tp=2), {}),
        slow(Adapter(("layers.2.mlp.experts.down_proj",)), layout(dp=2, ep=2), EXPERTS),
        slow(Adapter(("gate_up_proj", "q_proj"), rslora=True), layout(), EXPERTS),
        slow(Adapter(("mlp", "merger"), whole_merger=False), layout(dp=4, ep=4), EXPERTS),
        full(Adapter(), layout(tp=2, pp=2), GEMMA4),
        full(replace(ALL, base="nf4"), layout(tp=2), GEMMA4_IN_BLOCKS),
        slow(replace(BESIDE_MERGER, rslora=True), layout(pp=2), GEMMA4),
        slow(Adapter(), layout(pp=2, dp=2, ep=2), GEMMA4_EXPERTS),
        slow(Adapter(("gate_up_proj", "q_proj.linear", "input_proj")), layout(), GEMMA4_EXPERTS),
    ],
)
def test_peft_loads_what_is_exported(adapter, case, sizes, pool, tiny, tmp_path):
    case, path, rows = replace(case, lora=adapter.ours), written(tiny, sizes), rows_for(sizes)
    trained = pool.run(train_and_export, case.world, path, case, tmp_path, rows)[0]
    base = log_probs(base_model(path, adapter), rows)
    assert difference(trained, base) > 0.01
    check_exports_of_checkpoint(tmp_path)
    loaded = PeftModel.from_pretrained(base_model(path, adapter), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert get_peft_model_state_dict(loaded).keys() == stored.keys()
    assert isinstance(loaded.peft_config["default"].lora_alpha, int)  # the type that PEFT declares
    assert difference(log_probs(loaded, rows), trained) < 5e-6
    with loaded.disable_adapter():  # whole mergers are modules_to_save, and are disabled as well
        assert difference(log_probs(loaded, rows), base) == 0
    whole = load_reference(str(tmp_path / "merged"))
    assert difference(log_probs(whole, rows), trained) < 5e-6
    expected = dict(loaded.merge_and_unload().named_parameters())
    for name, tensor in whole.named_parameters():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-7), name


def log_probs_here(path: str, case: Case, rows: Rows = OF_QWEN) -> list[torch.Tensor]:
    return MegatronWorker(case.config(path), training=False).forward(rows(0))


@pytest.mark.parametrize(
    ("adapter", "sizes"),
    [
        (ALL, {}),
        full(IN_EXPERTS, {**EXPERTS, "dense_layers": 1}),
        full(ALL, DELTA_NET),
        full(IN_EXPERTS, SHARED_EXPERT),
        slow(replace(IN_EXPERTS, targets=("nothing",), parameters=(DOWN,)), EXPERTS),
        full(ALL, GEMMA4),
        full(IN_GEMMA4_EXPERTS, GEMMA4_EXPERTS),
    ],
)
def test_an_adapter_says_how_to_go_on_from_it(adapter, sizes, pool, tiny, tmp_path):
    path, rows = written(tiny, sizes), rows_for(sizes)
    model = peft_model(path, adapter)
    folder = Path(save_peft(model, tmp_path / "peft"))
    lora = lora_of(folder, path)
    assert (lora.rank, lora.alpha, lora.rslora, lora.train) == (4, 12.0, False, ())
    case = replace(layout(), lora=vars(lora))
    ours = pool.run(log_probs_here, 1, path, case, rows)[0]
    assert difference(ours, log_probs(model, rows)) < 5e-6


@pytest.mark.full
def test_what_does_not_fit_is_refused(pool, tiny, tmp_path):
    folder = Path(save_peft(peft_model(tiny(), ALL), tmp_path / "peft"))
    right = dict(ALL.ours, path=str(folder))

    def said(model=tiny(), edit=None, **lora) -> str:
        if edit is not None:
            changed = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
            shutil.copytree(folder, changed)
            edit(changed)
            lora = dict(lora, path=str(changed))
        return str(pool.run(refusal, 1, model, replace(layout(), lora=dict(right, **lora)))[0])

    def config(**changes):
        def edit(folder):
            file = folder / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))

        return edit

    def without_first(folder):
        file = folder / "adapter_model.safetensors"
        stored = load_file(file)
        save_file({name: stored[name] for name in sorted(stored)[1:]}, file)

    assert re.search(": lora.rank=8 .* r, 4; set lora.rank=4$", said(rank=8, alpha=12.0))
    assert re.search(": lora.alpha=8.0 .* lora_alpha, 12.0; ", said(alpha=8.0))
    assert re.search(": lora.rslora=true .* use_rslora, false; ", said(rslora=True))
    assert ": lora.targets=[attention] and lora.train " in said(targets=("attention",))
    lacking = said(edit=without_first)
    assert re.search(r": lora.targets=.* 1 of them, such as base_model\.", lacking)
    assert re.search(r"\.shape=\[\d+,\d+\] .*model.path$", said(tiny(intermediate=192)))
    assert ": use_dora=true " in said(edit=config(use_dora=True))
    assert ": rank_pattern={'q_proj': 2} " in said(edit=config(rank_pattern={"q_proj": 2}))
    assert "adapter_config.json: peft_type=IA3 " in said(edit=config(peft_type="IA3"))
    missing = said(edit=lambda folder: (folder / "adapter_config.json").unlink())
    assert "adapter_config.json" in missing
    assert "lora.targets=q_prj matches no linear layer" in said(targets=("q_prj",), path=None)
    assert "only repeat it" in said(targets=("merger",), train=("merger",), path=None)
    case = replace(layout(freeze_vision=True), lora=dict(ALL.ours))
    frozen = str(pool.run(refusal, 1, tiny(), case)[0])
    assert "model.freeze_vision=true keeps the part vision as it is" in frozen
    with pytest.raises(ConfigError, match=r"give its base model as model.path and this folder"):
        HFCheckpoint(str(folder))
    theirs = PeftConfig().to_dict()  # with the default of each option
    assert [key for key, plain in _PLAIN.items() if theirs.get(key, "no option") not in plain] == []


UNTRAINABLE = (
    (math.nan, torch.float32, " has values that are NaN"),
    (-math.inf, torch.bfloat16, " has values that are NaN"),
    (1e300, torch.float64, " has values that are NaN"),  # infinite in fp32
    (1, torch.int32, ".dtype=I32 "),
    (1, torch.float8_e4m3fn, ".dtype=F8_E4M3 "),
    (1, torch.bool, ".dtype=BOOL "),
    (1, torch.complex64, ".dtype=C64 "),
)


@pytest.mark.full
def test_values_that_cannot_be_trained_are_refused(pool, tiny, tmp_path):
    """They are refused at the start, in adapters and in weights that are trained whole."""
    folder = Path(save_peft(peft_model(tiny(), BESIDE_MERGER), tmp_path / "peft"))
    case = replace(layout(), lora=dict(BESIDE_MERGER.ours, path=str(folder)))
    file = folder / "adapter_model.safetensors"
    tensors, failures = load_file(file), []
    for ending in ("q_proj.lora_B.weight", "merger.linear_fc1.bias"):
        name = next(each for each in sorted(tensors) if each.endswith(ending))
        for value, dtype, words in UNTRAINABLE:
            changed = tensors[name].clone().to(dtype)
            changed.view(-1)[-1] = value
            save_file(tensors | {name: changed}, file)
            message = str(pool.run(refusal, 1, tiny(), case)[0])
            if f"lora.path={folder}: {name}{words}" not in message:
                failures.append((name, value, dtype, message))
    assert not failures


def test_adapters_of_other_experts_are_refused(pool, tiny, tmp_path):
    """Both weights' adapters have the same names; PEFT before 0.19.1 wrote them transposed."""
    path = tiny(**EXPERTS)
    model = peft_model(path, replace(IN_EXPERTS, targets=("nothing",), parameters=(DOWN,)))
    folder = Path(save_peft(model, tmp_path / "peft"))
    right = dict(Adapter((DOWN,)).ours, path=str(folder))

    def said(**lora) -> str:
        return str(pool.run(refusal, 1, path, replace(layout(), lora=dict(right, **lora)))[0])

    named = r"target_parameters=\[mlp.experts.down_proj\] are 4 weights"
    for target, count in (("gate_up_proj", 4), ("mlp", 8), (f"layers.0.{DOWN}", 1)):
        assert re.search(f"{named} .*lora.targets names {count} others", said(targets=(target,)))
    file = folder / "adapter_model.safetensors"
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    turned = {
        re.sub("lora_[AB]", lambda found: other[found[0]], name): value.T.contiguous()
        for name, value in load_file(file).items()
    }
    save_file(turned, file)
    assert "Or PEFT before 0.19.1 wrote it" in said()


@pytest.fixture(scope="module")
def a_run(pool, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_set(folder)
    words = ("lora=default", "lora.targets=[attention,mlp,head]", "lora.dropout=0.1")
    words += ("checkpoint.export=both", "train.steps=3")
    status, out, err = go_pooled(pool, 2, folder, tiny(tied=True), "run", *words)
    assert status == 0, err
    return folder, out


def test_a_run_trains_exports_and_is_scored_by_its_adapters(a_run, tiny, capfd):
    folder, out = a_run
    run = folder / "run"
    assert re.search(r"head +lora +trainable", out) and "40.4k" in out, out
    assert str(run / "export") in out.replace("\n", ""), out
    assert {"adapter_config.json", "adapter_model.safetensors"} < {
        path.name for path in (run / "export").iterdir()
    }
    card = (run / "export" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "LoRA of rank 16, alpha 32, in `attention`, `mlp`, `head`" in card
    assert (run / "merged" / "config.json").is_file()
    assert find_model(str(run)) == (str(Path(tiny(tied=True)).resolve()), run / "export")
    assert all(step["loss"] > 0 for step in steps_of(run)) and len(steps_of(run)) == 3
    assert scale_of(LoraConfig(rank=16, alpha=32)) == 2


OF_SGLANG = (
    "lora: SGLang does not start with an adapter of in_proj_qkv and in_proj_z (its issue 30168), "
    "and drops the adapter of in_proj_b and in_proj_a (its pull request 30499); "
    "checkpoint.export=both also writes the merged model, which has no adapters"
)


@pytest.mark.parametrize(
    ("adapter", "export", "said", "sizes"),
    [
        (ALL, True, "vLLM silently ignores the adapters of merger and vision unless", {}),
        (BESIDE_MERGER, "both", "vLLM refuses an adapter with the whole merger beside it", {}),
        (ALL, "merged", "", {}),
        (Adapter(), True, "", {}),
        (IN_EXPERTS, True, "", EXPERTS),
        (Adapter((f"layers.0.{DOWN}",)), True, "only where both of a layer's", EXPERTS),
        (Adapter(("self_attn.*", "out_proj", "mlp")), True, "", DELTA_NET),
        (Adapter(), True, OF_SGLANG, DELTA_NET),
        (Adapter(("in_proj_a",)), True, "SGLang drops the adapter of in_proj_a (", DELTA_NET),
        (
            Adapter(("in_proj_z", "layers.0.linear_attn.in_proj_qkv")),
            True,
            "lora: vLLM refuses an adapter of in_proj_z where in_proj_qkv has none; SGLang does",
            DELTA_NET,
        ),
        (Adapter(), "merged", "", DELTA_NET),
    ],
)
def test_adapters_that_an_engine_may_not_serve_are_named(adapter, export, said, sizes, tiny):
    path = tiny(**sizes)
    cfg = replace(layout(), lora=adapter.ours).config(path)
    cfg = replace(cfg, checkpoint=CheckpointConfig(export=export))
    remark = serving_remark(cfg, adapted_weights(cfg, read_sizes(path)))
    assert bool(remark) == bool(said) and said in remark


def score(where: str, overrides: list[str]) -> str:
    with redirect_stdout(StringIO()) as out:
        run_eval([where, *overrides])
    return out.getvalue()


def check_equal_scores(folder: Path, pool: Pool, *words: str) -> list[str]:
    """Check that a run, its adapter and the merged model score the same; return the data's keys."""
    data = [f"data.eval={folder / 'train.jsonl'}", "data.cache_dir=null", "data.num_workers=0"]
    data += words
    losses = [
        json.loads(pool.run(score, 1, str(folder / "run" / name), [*data, *more])[0])["loss"]
        for name, more in (
            ("", ("parallel.tp=1", "parallel.pp=1")),
            ("export", ("model=tiny_cpu",)),
            ("merged", ("model=tiny_cpu",)),
        )
    ]
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3
    return data


@pytest.mark.full
def test_a_run_its_adapter_and_the_merged_model_score_the_same(a_run, pool):
    check_equal_scores(a_run[0], pool)


def ask(given: str) -> str:
    from megatron_vlm.commands.chat.conversation import ChatSession

    base, adapter = find_model(given)
    conversation = ChatSession(base, Settings(max_new_tokens=4), adapter)
    return conversation.ask("What colour?", [], lambda piece: None)


def test_an_adapter_answers_as_the_merged_model_does(a_run, pool):
    run = a_run[0] / "run"
    adapter, merged = (pool.run(ask, 1, str(path))[0] for path in (run, run / "merged"))
    assert adapter == merged


@pytest.mark.full
def test_a_base_that_was_replaced_in_place_is_refused(a_run, pool, tiny, tmp_path):
    """Chat and evaluation refuse it wherever they load the adapter of a run."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(tiny(tied=True), base)
    shutil.copytree(a_run[0] / "run" / "export", run / "export")
    config = run / "export" / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(base)})
    )
    assert pool.run(ask, 1, str(run))[0]  # the same weights in another place
    weights = load_file(base / "model.safetensors")
    weights["model.language_model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    words = ["model=tiny_cpu", f"data.eval={a_run[0] / 'train.jsonl'}", "data.cache_dir=null"]
    for action, *args in (
        (ask, str(run)),
        (ask, str(run / "export")),
        (score, str(run / "export"), words),
    ):
        with pytest.raises(RuntimeError, match=f"lora.path=.*: model.path={base}: "):
            pool.run(action, 1, *args)


@pytest.mark.parametrize(
    ("name", "revision", "base"),
    [
        ("org/name", "ab12", "org/name@ab12"),
        ("org/name", None, "org/name"),
        ("org/name@v1", "ab12", "org/name@v1"),
        ("/models/name", "ab12", "/models/name"),
    ],
)
def test_the_base_of_an_adapter_is_of_the_revision_that_it_names(name, revision, base, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": name, "revision": revision}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert base_of(tmp_path) == base


@pytest.mark.full
def test_the_command_writes_either_form(a_run, tmp_path, capfd):
    run = a_run[0] / "run"
    assert main(["export", str(run), str(tmp_path / "a")]) == 0
    assert main(["export", str(run), str(tmp_path / "m"), "--as", "merged"]) == 0
    for out, source, file in (("a", "export", "adapter_model"), ("m", "merged", "model")):
        name = f"{file}.safetensors"
        assert (tmp_path / out / name).read_bytes() == (run / source / name).read_bytes()


@pytest.mark.full
def test_a_dry_run_shows_what_is_trained_and_refuses_what_cannot_be(a_run, tiny, capfd):
    folder, _ = a_run
    path, groups = tiny(tied=True), ("head", *EVERY)
    words = [f"model.path={path}", "model=tiny_cpu", f"data.train={folder / 'train.jsonl'}"]
    words += ["data.cache_dir=null", "lora=all", f"lora.targets=[{','.join(groups)}]"]
    words = ["train", *words, "--dry-run"]
    assert main(words) == 0
    chosen = adapted_specs(read_sizes(path).with_head, groups)
    trained = sum(16 * sum(weight.shape) for weight in chosen)
    out = capfd.readouterr().out
    assert re.search(r"head +lora +trainable", out) and out.count(short_name(trained)) == 3, out
    assert main([*words, "lora.targets=[q_prj]"]) == 2
    assert "lora.targets=q_prj matches no linear layer" in capfd.readouterr().err
