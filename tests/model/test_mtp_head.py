# .venv/bin/python -m pytest tests/model/test_mtp_head.py
"""An MTP head that is trained (model.mtp): its loss and every gradient equal the formula's in
fp64, at each layout, and the model's own gradients are, bit for bit, those without it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.checkpoint.save_load import save
from megatron_vlm.config.command_checks import check_rl
from megatron_vlm.config.load import load_config
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.training.optimizer_step import main_weights
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import case, layout
from tests.support.batches import ALL_TEXT, MIXED, TEXT_ON_ONE_RANK, RowSpec, make_rows
from tests.support.comparison import check_worst, relative_errors, same
from tests.support.error_fields import raises
from tests.support.mtp_reference import PREFIX, run_drafts
from tests.support.reference import reference_of
from tests.support.runs import Case, collect_grads, loss_and_grads, my_rows, refusal, train
from tests.support.suites import full, slow

pytestmark = pytest.mark.newest  # it depends on the versions

TOLERANCE = 1e-5
FAMILY = dict(family="qwen3_5", head_dim=64, mtp_layers=1)
EXPERTS = dict(experts=8)
ADAPTERS = dict(
    lora={"rank": 2, "targets": ("attention", "mlp", "head")}, checkpoint={"export": "merged"}
)
# Most answers are one token. In the first micro-batch none is supervised, and in the second none
# has two tokens before it. So the first of two replicas has no guess. The one guess of the next row
# is made from the feature of a picture.
FEW = (
    *(RowSpec(1), RowSpec(1), RowSpec(2, supervised=0), RowSpec(2, supervised=0)),
    RowSpec(1, images=((2, 2),), supervised=0),
    RowSpec(40, images=((2, 4), (4, 4), (6, 2)), supervised=0.1),
    RowSpec(3, supervised=0),
    RowSpec(9, images=((4, 6),), supervised=0),
)
BATCHES = {"mixed": MIXED, "all_text": ALL_TEXT, "text_on_one_rank": TEXT_ON_ONE_RANK, "few": FEW}
CASES = {
    "1": case(),
    "tp2": case(tp=2),
    "pp3-stage0-0-layers": case(pp=3, layers_per_stage=[0, 1, 3]),
    "experts-ep2": case("mixed", EXPERTS, dp=2, ep=2),
    "pp2x2": full(*case(pp=2, virtual_stages=2)),
    "dp2-overlap": full(*case("text_on_one_rank", dp=2, overlap_grad_reduce=True)),
    "frozen": full(*case(freeze_vision=True, freeze_merger=True, freeze_language=True)),
    "recompute-tp2-pp2": full(*case(tp=2, pp=2, recompute="full")),
    "few-dp2-overlap": full(*case("few", dp=2, overlap_grad_reduce=True)),
    "few-odd-vocab-tied-tp2": full(*case("few", {"vocab": 509, "tied": True}, tp=2)),
    "few-pp3-delta-net-last": full(*case("few", {"layers": 5}, pp=3, layers_per_stage=[1, 2, 2])),
    "few-experts-pp2-dp4-ep2": slow(*case("few", EXPERTS, pp=2, dp=4, ep=2)),
    "few-experts-ep2": slow(*case("few", EXPERTS, dp=2, ep=2)),
    "pp3x2": slow(*case("few", {"layers": 7}, pp=3, virtual_stages=2)),
    "language-frozen-pp2": slow(*case(pp=2, freeze_language=True)),
    "adapters-tp2": slow(replace(layout(tp=2), **ADAPTERS), {}, "mixed"),
    "adapters-experts-ep2-pp2": slow(
        replace(layout(pp=2, dp=2, ep=2), **ADAPTERS), EXPERTS | {"tied": True}, "few"
    ),
    "experts-1": slow(*case("mixed", EXPERTS)),
    "pp2": slow(*case(pp=2)),
    "dp2": slow(*case(dp=2, distributed_optimizer=False)),
    "all-text-pp2": slow(*case("all_text", pp=2)),
    "tied-tp2-pp2": slow(*case("mixed", {"tied": True}, tp=2, pp=2)),
    "frozen-pp2": slow(*case(pp=2, freeze_vision=True, freeze_merger=True, freeze_language=True)),
    "recompute-selective": slow(*case(recompute="selective")),
    "offload": slow(*case(offload_activations=0.5)),
    "router-losses": slow(*case("mixed", EXPERTS, router_balance_loss=0.1, router_z_loss=0.1)),
    "experts-ep2-pp2-recompute": slow(
        *case("mixed", EXPERTS | {"tied": True}, pp=2, dp=2, ep=2, recompute="full")
    ),
}


@pytest.mark.parametrize(("case", "sizes", "batch"), CASES.values(), ids=CASES)
def test_equals_the_formula(case, sizes, batch, pool, tiny, record_property):
    path, specs, vocab = tiny(**FAMILY, **sizes), BATCHES[batch], sizes.get("vocab", 512)
    expected = reference_of(path, specs, vocab, run_drafts)
    rows = make_rows(specs, vocab)
    training = replace(case, model=case.model | {"mtp": "train"})
    outcomes = pool.run(loss_and_grads, case.world, path, training, rows)
    assert all(each.means == outcomes[0].means for each in outcomes)
    actual = outcomes[0]
    # A divergence near 0 is a difference of log-probs near -5, with their rounding. The loss may
    # be 1e-6 apart, ten times the measured worst case.
    deviations = {"loss": 10 * abs(actual.means["mtp_loss"] - expected.loss)}
    own = {name: grad for name, grad in actual.grads.items() if name.startswith(PREFIX)}
    assert own.keys() == expected.grads.keys()
    check_worst(deviations | relative_errors(own, expected.grads), TOLERANCE, record_property)
    if "freeze_merger" in case.model:  # without the head nothing would learn, which is refused
        assert all(grad.isnan().all() for name, grad in actual.grads.items() if name not in own)
        return
    plain = pool.run(loss_and_grads, case.world, path, case, rows)[0]
    others = {n: grad for n, grad in actual.grads.items() if n not in own}
    # More replicas than two are summed in an order that depends on a gradient's place among all.
    replicas = case.world // (case.parallel["tp"] * case.parallel["pp"])
    assert same(plain.grads, others) if replicas <= 2 else plain.grads.keys() == others.keys()
    assert max(relative_errors(others, plain.grads).values()) <= 1e-6
    assert (plain.loss, plain.num_tokens) == (actual.loss, actual.num_tokens)
    assert plain.means == {n: each for n, each in actual.means.items() if n in plain.means}
    assert same(plain.log_probs + plain.train_log_probs, actual.log_probs + actual.train_log_probs)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (layout(tp=2), {}),
        full(layout(pp=2, dp=2, distributed_optimizer=False), {}),
        full(layout(dp=2, ep=2), EXPERTS),
    ],
    ids=["tp2", "pp2-dp2", "experts-ep2"],
)
def test_steps_move_the_model_as_they_do_without_it(case, sizes, pool, tiny):
    """The norm by which the model's gradients are clipped is without the head's. Replicas that
    divide all weights among themselves sum it in another order."""
    path, batches = tiny(**FAMILY, **sizes), [make_rows(MIXED, seed=seed) for seed in range(2)]
    case = replace(case, optim={"clip_grad": 0.1})
    training = replace(case, model={"mtp": "train"})
    *plain, weights = pool.run(train, case.world, path, case, batches)[0]
    *figures, trained = pool.run(train, case.world, path, training, batches)[0]
    error = 0 if case.parallel.get("ep", 1) == 1 else 1e-6
    for found, expected in zip(figures, plain, strict=True):
        assert found == pytest.approx(expected, rel=error)
    assert max(float((trained[name] - weights[name]).abs().max()) for name in weights) <= error
    before = load_file(f"{path}/model.safetensors")
    own = trained.keys() - weights.keys()
    assert own and not any(torch.equal(trained[name], before[name]) for name in own)


def test_its_norm_is_its_own(pool, tiny):
    """Where nothing else learns, a step returns the norm of the head's gradient, and clips it."""
    path, rows = tiny(**FAMILY), make_rows(ALL_TEXT)
    frozen = {f"freeze_{part}": True for part in ("vision", "merger", "language")}
    case = replace(layout(tp=2), model=frozen | {"mtp": "train"}, optim={"clip_grad": 1e-3})
    grads = reference_of(path, ALL_TEXT, run=run_drafts).grads
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    found = pool.run(clipped, 2, path, case, rows)
    assert found[0] == found[1]
    limit = 1e-3 * norm / (norm + 1e-6)  # as in Megatron and torch
    assert found[0] == pytest.approx((float(norm), float(limit)), rel=TOLERANCE)


def weighted(path: str, case: Case, rows: list[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of two equal calls whose rows have weights."""
    worker = MegatronWorker(case.config(path))
    rows = [replace(row, loss_weights_S=2.0 * (row.labels_S != IGNORE)) for row in rows]
    for accumulate in (False, True):
        divisor = 7.0 if accumulate else None
        done = worker.forward_backward(my_rows(rows), divisor=divisor, accumulate=accumulate)
    return done.means["mtp_loss"], collect_grads(worker)


@pytest.mark.full
def test_what_divides_the_models_loss_does_not_divide_its_own(pool, tiny, record_property):
    path, rows = tiny(**FAMILY), make_rows(FEW)
    expected = reference_of(path, FEW, run=run_drafts)
    loss, grads = pool.run(weighted, 2, path, layout(dp=2, mtp="train"), rows)[0]
    assert loss == pytest.approx(expected.loss, abs=1e-6)
    halves = {name: grads[name] / 2 for name in expected.grads}
    check_worst(relative_errors(halves, expected.grads), TOLERANCE, record_property)


def with_adapters(path: str, case: Case, folder: Path) -> None:
    """Train two steps, and write the merged model and a checkpoint."""
    worker = MegatronWorker(case.config(path))
    for seed in range(2):
        worker.forward_backward(my_rows(make_rows(MIXED, seed=seed)))
        worker.optim_step(lr=0.03)
    worker.export_hf(str(folder / "merged"))
    save(worker, step_folder(folder, 2), {"step": 2})


@pytest.mark.full
def test_a_merged_model_has_the_head_that_learnt_beside_adapters(pool, tiny, tmp_path):
    path, files = tiny(**FAMILY), list[dict[str, torch.Tensor]]()
    for mtp in ("carry", "train"):
        folder, case = tmp_path / mtp, replace(layout(tp=2, mtp=mtp), **ADAPTERS)
        pool.run(with_adapters, 2, path, case, folder)
        export_checkpoint(str(step_folder(folder, 2)), str(folder / "again"), kind="merged")
        written = [folder / name / "model.safetensors" for name in ("merged", "again")]
        assert written[0].read_bytes() == written[1].read_bytes()
        files.append(load_file(written[0]))
    plain, trained = files
    before = load_file(f"{path}/model.safetensors")
    assert any(not torch.equal(plain[name], before[name]) for name in before)
    changed = {name for name in plain if not torch.equal(plain[name], trained[name])}
    assert changed == {name for name in before if name.startswith(PREFIX)}
    with raises(CheckpointError, key="model.mtp", found="train"):
        export_checkpoint(str(step_folder(folder, 2)), str(tmp_path / "adapter"), kind="adapter")


def clipped(path: str, case: Case, rows: list[Row]) -> tuple[float, float]:
    """Return the norm of a step's gradients, and that of what the optimizer applied."""
    worker = MegatronWorker(case.config(path))
    worker.forward_backward(rows)
    norm = worker.optim_step()[0]
    weights = main_weights(worker.optimizer, worker.held.values())
    parts = {each.param: each.main.grad for each in weights}
    is_first, held = not worker.grid.tp.rank, worker.held.items()
    once = {p for e, p in held if is_first or e.layout.shard_group == "tp"}
    total = torch.stack([x.square().sum() for p, x in parts.items() if p in once]).sum()
    dist.all_reduce(total, group=worker.grid.tp.group)
    return norm, float(total.sqrt())


@pytest.mark.parametrize(
    ("sizes", "case", "key"),
    [
        (dict(family="qwen3_5"), Case(), "model.mtp"),
        ({}, Case(), "model.mtp"),
        (FAMILY, Case(train={"objective": "dpo"}), "model.mtp"),
        (FAMILY, Case(train={"objective": "distill"}), "model.mtp"),
        (FAMILY, Case(lora={"rank": 2}), "model.mtp"),
    ],
    ids=["without-tensors", "another-family", "dpo", "distill", "adapter"],
)
def test_where_it_cannot_be_trained(sizes, case, key, pool, tiny):
    training = replace(case, model={"mtp": "train"})
    [error] = pool.run(refusal, 1, tiny(**sizes), training)
    assert (error.key, error.found) == (key, "train")


def test_adapters_of_rl_are_refused_beside_it():
    words = ["model.path=x", "data.train=a.jsonl", "train.steps=3", "rl.reward=a:b"]
    with raises(ConfigError, key="model.mtp", found="train", problem_has="engines get adapters"):
        check_rl(load_config([*words, "model.mtp=train", "lora.rank=2", "checkpoint.export=false"]))
