# .venv/bin/python -m pytest tests/hf/test_moe_files.py
"""Experts in config.json, and the forms in which checkpoints store them."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from megatron_vlm.config.schema import CheckpointConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.config_json import read_counts
from megatron_vlm.family.decoder_layers import Experts
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.training.worker import MegatronWorker
from tests.family.test_model_fields import changed
from tests.model.test_parity import layout
from tests.support.batches import ALL_TEXT, RowSpec, make_rows
from tests.support.error_fields import raises
from tests.support.field_tables import released
from tests.support.moe import opened, stored_as
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, call, loss_and_grads
from tests.support.suites import full, slow

TINY = dict(experts=4, layers=3, deepstack=1, vision_depth=2)
OTHER = dict(family="qwen3_5", mtp_layers=1, full_attention_interval=2)
QWEN3_5 = dict(**OTHER, experts=4, layers=3, vision_depth=2)
OF_LAYER = "model.language_model.layers.{}.mlp.experts.{}"


def changed_text(path: str, folder: Path, **fields: object) -> Path:
    """Write a config.json with other fields in text_config."""
    return changed(path, folder, {f"text_config.{key}": value for key, value in fields.items()})


def test_the_sizes_of_experts(tiny, tmp_path):
    path = tiny(**TINY)
    assert read_family(path).model_type == "qwen3_vl_moe"
    sizes = read_sizes(path).text
    assert sizes.experts == Experts(count=4, top_k=2, width=40)
    assert sizes.expert_layers == (0, 1, 2)
    assert read_counts(path).experts == 4
    every_other = changed_text(path, tmp_path / "a", decoder_sparse_step=2, mlp_only_layers=[0])
    assert read_sizes(every_other).text.expert_layers == (1,)
    with_plain = changed_text(path, tmp_path / "b", mlp_only_layers=[1], norm_topk_prob=True)
    assert read_sizes(with_plain).text.expert_layers == (0, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_topk_prob": False}, "text_config.norm_topk_prob=False, and it computes only True"),
        ({"num_experts_per_tok": 5}, "text_config.num_experts_per_tok=5, of num_experts=4"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\], not layers of num_hidden_layers=3"),
        ({"output_router_logits": True}, "text_config.output_router_logits=True, and it computes"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8, a field that"),
        ({"decoder_sparse_step": 0}, "text_config.decoder_sparse_step=0, not a whole number"),
    ],
)
def test_other_experts_are_refused(fields, words, tiny, tmp_path):
    with pytest.raises(ConfigError, match=words):
        read_sizes(changed_text(tiny(**TINY), tmp_path / "a", **fields))


@pytest.mark.parametrize("form", [ExpertStorage.out_in, ExpertStorage.in_out])
def test_transformers_reads_both_forms_alike(form, tiny, tmp_path):
    """transformers decides what the forms mean."""
    path = tiny(**TINY)
    row = make_rows(ALL_TEXT)[0]
    with torch.no_grad():
        actual = row_log_probs(load_reference(stored_as(path, tmp_path / "a", form)), row)
        torch.testing.assert_close(actual, row_log_probs(load_reference(path), row), atol=0, rtol=0)


def export_of(path: str, case: Case, out: str) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Export the model, and return its log-probs and the shapes that this rank read of experts."""
    reads: dict[str, list] = {}
    right = HFCheckpoint._read

    def noted(self, name, spans):
        tensor = right(self, name, spans)
        if ".mlp.experts." in name and not name.startswith("mtp."):
            reads.setdefault(name, []).append(list(tensor.shape))
        return tensor

    with mock.patch.object(HFCheckpoint, "_read", noted):
        worker = MegatronWorker(case.config(path))
    worker.export_hf(out)
    return worker.forward(make_rows(ALL_TEXT)), reads


@pytest.mark.parametrize("sizes", [TINY, QWEN3_5], ids=["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "form", [ExpertStorage.single, full(ExpertStorage.out_in), full(ExpertStorage.in_out)]
)
def test_a_checkpoint_goes_out_as_it_came_in(form, sizes, pool, tiny, tmp_path):
    """The export has the same bits in any form, and each rank reads only its own experts."""
    source = stored_as(tiny(**sizes), tmp_path / "source", form)
    out = tmp_path / "out"
    case = layout(dp=2, ep=2)
    outcomes = pool.run(export_of, 2, source, case, str(out))
    before, after = (load_file(Path(f) / "model.safetensors") for f in (source, out))
    assert any("shared_expert" in name for name in before) == (sizes is QWEN3_5)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    for log_probs, reads in outcomes:
        for actual, reference in zip(log_probs, outcomes[0][0], strict=True):
            assert torch.equal(actual, reference)
        if form is ExpertStorage.single:
            assert len(reads) == 3 * 2 * 3  # 3 layers, two experts of four, three tensors each
        else:
            assert len(reads) == 6 and all(shapes[0][0] == 2 for shapes in reads.values())
    if sizes is QWEN3_5:
        pool.run(export_of, 1, source, layout(), str(tmp_path / "alone"))
        alone = load_file(tmp_path / "alone" / "model.safetensors")
        assert all(torch.equal(value, alone[name]) for name, value in before.items())
        assert before.keys() == alone.keys()
    # transformers takes Qwen3-VL's experts turned, and Qwen3.5's one by one.
    unread = ExpertStorage.in_out if sizes is QWEN3_5 else ExpertStorage.single
    if form is not unread:
        with torch.no_grad():
            reference = AutoModelForImageTextToText.from_pretrained(out).eval()
            expected = row_log_probs(reference, make_rows(ALL_TEXT)[0])
        torch.testing.assert_close(outcomes[0][0][0], expected, atol=2e-5, rtol=0)


def train_and_merge(path: str, case: Case, out: str) -> None:
    cfg = replace(case.config(path), checkpoint=CheckpointConfig(export="merged"))
    worker = MegatronWorker(cfg)
    worker.forward_backward(make_rows(ALL_TEXT))
    worker.optim_step(lr=0.01)
    worker.export_hf(out)


@pytest.mark.full
@pytest.mark.parametrize("trained", [(), ("language",)])
@pytest.mark.parametrize("form", [ExpertStorage.in_out, ExpertStorage.single])
def test_adapters_are_merged_into_a_model_with_experts(form, trained, pool, tiny, tmp_path):
    """The export has the form of the source, with experts as they were or as trained."""
    source, out = stored_as(tiny(**TINY), tmp_path / "source", form), tmp_path / "out"
    targets = ("merger",) if trained else ("attention",)
    case = replace(layout(dp=2, ep=2), lora=dict(rank=2, targets=targets, train=trained))
    pool.run(train_and_merge, 2, source, case, str(out))
    before, after = (load_file(Path(f) / "model.safetensors") for f in (source, out))
    assert {n: v.shape for n, v in before.items()} == {n: v.shape for n, v in after.items()}
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    experts = {name for name in before if ".mlp.experts." in name}
    assert experts <= moved if trained else not experts & moved
    assert {name for name in before if "_proj.weight" in name and "self_attn" in name} <= moved


@pytest.mark.parametrize("form", [full(ExpertStorage.single), slow(ExpertStorage.in_out)])
def test_adapters_in_experts_are_merged_into_each_form(form, pool, tiny, tmp_path):
    """The result is that of transformers' form, which test_files.py compares with PEFT's."""
    case = replace(layout(dp=2, ep=2), lora=dict(rank=2, targets=("mlp",)))
    source, out = stored_as(tiny(**TINY), tmp_path / "source", form), tmp_path / "out"
    pool.run(train_and_merge, 2, source, case, str(out))
    pool.run(train_and_merge, 2, tiny(**TINY), case, str(tmp_path / "theirs"))
    reference = stored_as(str(tmp_path / "theirs"), tmp_path / "turned", form)
    actual, expected = (load_file(Path(f) / "model.safetensors") for f in (out, reference))
    before = load_file(Path(source) / "model.safetensors")
    assert actual.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
        assert torch.equal(before[name], value) != (".mlp.experts." in name), name


def test_a_square_matrix_is_told_by_the_other(tiny, tmp_path):
    """Where gate_up is square, the shape of down decides, and transformers must agree."""
    path = tiny(**TINY, expert_intermediate=32)
    assert opened(path).experts is ExpertStorage.out_in
    turned = stored_as(path, tmp_path / "turned", ExpertStorage.in_out)
    with raises(CheckpointError, place=turned) as caught:
        opened(turned)
    assert caught.value.key.endswith(".mlp.experts.down_proj")
    assert (
        opened(stored_as(path, tmp_path / "a", ExpertStorage.single)).experts
        is ExpertStorage.single
    )
    other = tiny(**TINY, expert_intermediate=64)  # down is square
    assert opened(other).experts is ExpertStorage.out_in
    with raises(CheckpointError, problem_has="down_proj (4, 64, 64)"):
        opened(stored_as(other, tmp_path / "b", ExpertStorage.in_out))


def test_experts_that_do_not_fit_are_listed(tiny, tmp_path):
    folder = Path(stored_as(tiny(**TINY), tmp_path / "a", ExpertStorage.single))
    weights = load_file(folder / "model.safetensors")
    weights.pop(OF_LAYER.format(1, "2.up_proj.weight"))
    weights[OF_LAYER.format(1, "4.up_proj.weight")] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        opened(str(folder))
    (missing,), (surplus,) = caught.value.found["missing"], caught.value.found["surplus"]
    assert missing == "model.language_model.layers.1.mlp.experts.2.up_proj.weight (40, 64)"
    assert surplus.startswith("model.language_model.layers.1.mlp.experts.4.")
    # One layer is turned, and the others are not.
    folder = Path(stored_as(tiny(**TINY), tmp_path / "b", ExpertStorage.out_in))
    weights = load_file(folder / "model.safetensors")
    name = OF_LAYER.format(1, "down_proj")
    weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is \(4, 40, 64\), config.json asks for"):
        opened(str(folder))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (layout(tp=2), r"parallel\.tp=2 with 4 experts "),
        (layout(dp=3, ep=3), r"parallel\.ep=3 .*num_experts=4; "),
    ],
)
def test_layouts_without_meaning_are_refused(case, words, pool, tiny):
    with pytest.raises(RuntimeError, match=words):
        pool.run(loss_and_grads, case.world, tiny(**TINY), case, make_rows(ALL_TEXT))


def products(worker: MegatronWorker) -> tuple[int, int, int]:
    """Return the operations in the forward of a row, its tokens, and the supervised ones."""
    [row] = rows = make_rows((RowSpec(60),))
    with FlopCounterMode(display=False) as counter:
        worker.forward(rows)
    counts = counter.get_flop_counts()["Global"]
    supervised = int((row.labels_S[1:] != IGNORE).sum())
    return (
        counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0),
        len(row.ids_S),
        supervised,
    )


def test_the_work_that_mfu_is_of_is_what_runs(pool, tiny):
    """The work is that of the products that a step really does: 2 of 8 experts for each token."""
    path = tiny(**{**TINY, "experts": 8})
    [(measured, tokens, supervised)] = pool.run(call, 1, path, layout(), products)
    work = WorkModel.from_sizes(read_sizes(path))
    assert measured == work.row((tokens,), supervised, 0, 0) - work.attention((tokens,), 0)


RELEASED = {
    # name: (layers, hidden, MLP, experts' width, heads, numbers in all weights, numbers in those of
    # a token); the last two are as in the names
    "30B-A3B": (48, 2048, 6144, 768, 32, 31.07e9, 3.3e9),
    "235B-A22B": (94, 4096, 12288, 1536, 64, 235.7e9, 22e9),
}


def released_sizes(name: str, folder: Path) -> ModelSizes:
    """Return the sizes of a config.json as transformers 4.57 wrote it."""
    layers, hidden, ffn, width, heads, _, _ = RELEASED[name]
    config = released("8B")
    config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
    config["vision_config"]["out_hidden_size"] = hidden
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read_sizes(folder)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_accepted(name, tmp_path):
    layers, hidden, *_, values, active = RELEASED[name]
    sizes, counts = released_sizes(name, tmp_path), read_counts(str(tmp_path))
    assert counts is not None and counts.experts == 128
    assert sizes.text.expert_layers == tuple(range(layers))
    assert sum(each.num_values for each in sizes.tensors) == pytest.approx(values, rel=0.01)
    vocabulary = 2 * 151936 * hidden
    assert WorkModel.from_sizes(sizes).per_token / 2 + vocabulary == pytest.approx(active, rel=0.05)
