# .venv/bin/python -m pytest tests/training/test_moe_balance.py
"""The balancing loss and the z loss of routers: values and gradients are those of transformers for
the whole global batch, however it is cut and laid out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeTextTopKRouter,
    load_balancing_loss_func,
)

from megatron_vlm.config import load_config
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.model import router as routing
from megatron_vlm.model.constraints import check_config
from megatron_vlm.model.router import RouterLosses
from megatron_vlm.training import router_losses, stage_inputs
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.preflight import check_run
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.model.test_moe import EXPERTS, UNEVEN, with_fillers
from tests.model.test_mutants import Mutant, replaced, scaled_by
from tests.model.test_parity import TOLERANCE, case, errors, layout
from tests.support.batches import ALL_TEXT, MIXED, SHALLOW, TEXT_ON_ONE_RANK, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.error_fields import raises
from tests.support.reference import Reference, grads_of, inputs_of, load_reference
from tests.support.runs import Case, Outcome, call, loss_and_grads, my_rows
from tests.support.suites import full, slow

# The coefficients are so large that a tenth of either would be noticed in the gradients of most
# parameters.
BALANCE, Z = 2.0, 0.5
BOTH = dict(router_balance_loss=BALANCE, router_z_loss=Z)
OF_SMALL = tuple(sorted(SHALLOW.items()))  # as an argument of a cached function
BATCHES = {"mixed": MIXED, "uneven": UNEVEN, "text_on_one_rank": TEXT_ON_ONE_RANK}


@dataclass(frozen=True)
class Losses:
    """Results of transformers for a batch; the gradients are those of all three losses."""

    plain: Reference
    balance: float
    z: float


def run_in_one_batch(path: str, rows: list[Row], balance: float, z: float) -> Losses:
    """Run all rows in one batch, padded on the right, with transformers' own attention mask."""
    model = load_reference(path)
    config = model.config.text_config
    ids_BS = pad_sequence([row.ids_S for row in rows], batch_first=True)
    mask_BS = pad_sequence([torch.ones_like(row.ids_S) for row in rows], batch_first=True)
    labels_BS = pad_sequence([row.labels_S for row in rows], True, IGNORE)
    inputs = [inputs_of(model, row) for row in rows]
    types_BS = pad_sequence([one["mm_token_type_ids"][0] for one in inputs], batch_first=True)
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    tensors = {name: [one[name] for one in inputs if name in one] for name in names}
    visuals = {name: torch.cat(parts) for name, parts in tensors.items() if parts}
    out = model(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        mm_token_type_ids=types_BS,
        output_router_logits=True,
        **visuals,
    )
    log_probs_BS = out.logits[:, :-1].float().log_softmax(-1)
    log_probs_BS = log_probs_BS.gather(-1, ids_BS[:, 1:, None])[..., 0]
    log_probs_BS = log_probs_BS * (labels_BS[:, 1:] != IGNORE)
    loss = -(log_probs_BS * weights_of(rows)[:, 1:]).sum()
    loss = loss / (weights_of(rows)[:, 1:] * (labels_BS[:, 1:] != IGNORE)).sum()
    balance_loss = load_balancing_loss_func(
        out.router_logits, config.num_experts, config.num_experts_per_tok, mask_BS
    )
    squares = [
        logits.logsumexp(-1).square()[mask_BS.flatten().bool()] for logits in out.router_logits
    ]
    z_loss = torch.stack(squares).mean()
    (loss + balance * balance_loss + z * z_loss).backward()
    grads = grads_of(model.named_parameters())
    shifted_BS = torch.cat([torch.zeros(len(rows), 1), log_probs_BS.detach()], dim=1)
    by_row = [line[: len(row.ids_S)] for line, row in zip(shifted_BS, rows, strict=True)]
    loss, balance_loss, z_loss = (float(each.detach()) for each in (loss, balance_loss, z_loss))
    return Losses(Reference(loss, by_row, grads), balance_loss, z_loss)


def weights_of(rows: list[Row]) -> Tensor:
    weights = [
        torch.ones(len(row.ids_S)) if row.loss_weights_S is None else row.loss_weights_S
        for row in rows
    ]
    return pad_sequence(weights, batch_first=True)


def batch_of(name: str) -> list[Row]:
    """Return a batch whose last row has nothing supervised. It counts for the routers all the
    same."""
    rows = make_rows(BATCHES[name.removesuffix("_weighted")])
    rows[-1] = replace(rows[-1], labels_S=torch.full_like(rows[-1].ids_S, IGNORE))
    if name.endswith("_weighted"):
        generator = torch.Generator().manual_seed(1)
        rows = [
            replace(row, loss_weights_S=3 * torch.rand(len(row.ids_S), generator=generator) + 0.1)
            for row in rows
        ]
    return rows


@pytest.fixture(scope="module")
def reference(tiny):
    @cache
    def compute(
        batch: str, sizes: tuple[tuple[str, object], ...], balance: float, z: float
    ) -> Losses:
        return run_in_one_batch(tiny(**EXPERTS | dict(sizes)), batch_of(batch), balance, z)

    return compute


CASES = {
    "1": full(*case("mixed_weighted", SHALLOW, **BOTH)),
    "ep2": case("uneven", SHALLOW, dp=2, ep=2, **BOTH),
    "ep2-pp2-recompute": case(
        "mixed",
        {"dense_layers": 1},
        pp=2,
        dp=2,
        ep=2,
        recompute="full",
        layers_per_stage=[1, 3],
        **BOTH,
    ),
    "balance-alone": slow(*case(dp=2, router_balance_loss=BALANCE)),
    "z-alone-recompute": slow(*case("uneven", dp=2, recompute="full", router_z_loss=Z)),
    "ep1-dp2-pp2": slow(*case("uneven", {"tied": True}, pp=2, dp=2, **BOTH)),
    "ep2-dp2-overlap": slow(
        *case("mixed", {"dense_layers": 1}, dp=4, ep=2, overlap_grad_reduce=True, **BOTH)
    ),
    "ep4-pp2": slow(
        *case("uneven", {"sparse_step": 2}, pp=1, dp=4, ep=4, recompute="full", **BOTH)
    ),
    "ep2-pp2x2": slow(
        *case("uneven", pp=2, dp=2, ep=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2], **BOTH)
    ),
    "ep2-plain-optimizer-weighted": slow(
        *case("uneven_weighted", dp=2, ep=2, distributed_optimizer=False, **BOTH)
    ),
    "ep2-recompute-all": slow(
        *case("text_on_one_rank", dp=2, ep=2, recompute="full", recompute_vision=True, **BOTH)
    ),
    "language-frozen": slow(
        *case("text_on_one_rank", pp=2, dp=2, ep=2, freeze_language=True, **BOTH)
    ),
    "top-1": slow(*case("mixed", {"top_k": 1}, dp=2, ep=2, **BOTH)),
}


def all_errors(outcomes: list[Outcome], expected: Losses, case: Case) -> dict[str, float]:
    """Return the relative errors of the gradients and of the reported losses."""
    deviations, means = errors(outcomes, expected.plain, case), outcomes[0].means
    for name, expected_loss in (("balance_loss", expected.balance), ("z_loss", expected.z)):
        assert (name in means) == bool(case.model.get(f"router_{name}"))
        if name in means:
            deviations[name] = abs(means[name] / expected_loss - 1)
    return deviations


@pytest.mark.parametrize(("case", "sizes", "batch"), CASES.values(), ids=CASES)
def test_equals_hugging_face(case, sizes, batch, pool, tiny, reference, record_property):
    coefficients = [case.model.get(key, 0.0) for key in BOTH]
    expected = reference(batch, tuple(sorted(sizes.items())), *coefficients)
    path = tiny(**EXPERTS | sizes)
    outcomes = pool.run(loss_and_grads, case.world, path, case, batch_of(batch))
    assert all(outcome.means == outcomes[0].means for outcome in outcomes)
    deviations = all_errors(outcomes, expected, case)
    check_worst(deviations, TOLERANCE, record_property)


def test_fillers_count_for_nothing(pool, tiny, reference):
    """A replica with all rows and one without any give the same gradients."""
    case, expected = layout(dp=2, ep=2, **BOTH), reference("uneven", OF_SMALL, BALANCE, Z)
    outcomes = pool.run(with_fillers, 2, tiny(**EXPERTS | SHALLOW), case, batch_of("uneven"))
    assert outcomes[0].grads.keys() == expected.plain.grads.keys()
    apart = relative_errors(outcomes[0].grads, expected.plain.grads)
    assert max(apart.values()) <= TOLERANCE, apart


def passes(worker: MegatronWorker) -> tuple[int, set[str], float]:
    """Return how often the micro-batches of a step go through the model, and what the step
    reports."""
    rows, right, count = make_rows(ALL_TEXT), Stage.run, 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return right(*args, **kwargs)

    with mock.patch.object(Stage, "run", run):
        means = worker.forward_backward(rows).means
    return count, set(means), means["expert_load"]


def test_only_the_balancing_loss_takes_another_pass(pool, tiny):
    """The tokens of that pass are not counted twice."""
    path, loads = tiny(**EXPERTS | SHALLOW), []
    for model, times, names in (
        ({}, 1, set()),
        ({"router_z_loss": 0.1}, 1, {"z_loss"}),
        ({"router_balance_loss": 0.1}, 2, {"balance_loss"}),
    ):
        [(count, means, load)] = pool.run(call, 1, path, layout(**model), passes)
        assert (count, means) == (times, {"expert_load", *names})
        loads.append(load)
    assert loads[0] == loads[1] == loads[2]


def balance_of_given(worker: MegatronWorker) -> float:
    """Return the balancing loss when every token is sent to the first two experts."""
    rows = [
        replace(row, routing_SLK=torch.tensor([0, 1]).expand(len(row.ids_S), 1, 2))
        for row in my_rows(make_rows(ALL_TEXT))
    ]
    return worker.forward_backward(rows).means["balance_loss"]


def test_a_given_routing_is_what_is_balanced(pool, tiny):
    """The model has experts only in its last layer."""
    path = tiny(**EXPERTS, dense_layers=3)
    model, probs = load_reference(path), []
    for row in make_rows(ALL_TEXT):
        with torch.no_grad():
            [logits_SE] = model(**inputs_of(model, row), output_router_logits=True).router_logits
        probs.append(logits_SE.softmax(-1))
    expected = 8 * float(torch.cat(probs)[:, :2].mean(0).sum())
    case = layout(dp=2, ep=2, router_balance_loss=1.0)
    assert pool.run(call, 2, path, case, balance_of_given) == pytest.approx([expected] * 2)


def choices_under_dropout(worker: MegatronWorker) -> list[Tensor]:
    """Return the choices of each router for each micro-batch, in the order of the calls."""
    for name, param in worker.chunks[0].named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(param)
    choices, right = [], routing.choose_experts

    def choose(*args: Any) -> Tensor:
        choices.append(right(*args))
        return choices[-1]

    with mock.patch.object(routing, "choose_experts", choose):
        worker.forward_backward(make_rows(ALL_TEXT))
    return choices


def test_what_is_counted_ahead_is_what_is_routed(pool, tiny):
    """The dropout is drawn alike in both passes."""
    case = layout(router_balance_loss=0.1)
    case = replace(case, lora=dict(rank=4, dropout=0.5, targets=("attention",)))
    [choices] = pool.run(call, 1, tiny(**EXPERTS), case, choices_under_dropout)
    assert len(choices) == 2 * 2 * 4  # two passes of two micro-batches, in four layers
    ahead, routed = choices[:8], choices[8:]
    assert all(torch.equal(one, other) for one, other in zip(ahead, routed, strict=True))


def test_routers_compute_in_fp32_where_transformers_does():
    """Logits are rounded with weights in bf16, and nothing after them is."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_EH = (
        torch.randn(size, 64, generator=generator).bfloat16() for size in (40, 8)
    )
    router = Qwen3VLMoeTextTopKRouter(
        Qwen3VLMoeTextConfig(hidden_size=64, num_experts=8, num_experts_per_tok=2)
    ).bfloat16()
    router.weight.data = weight_EH
    logits_NE, scores_NK, indices_NK = router(hidden_NH)
    mean, balance_E = 1 / 40, torch.rand(8, generator=generator)
    scales = {"balance_loss": 1.0, "z_loss": 1.0}
    sums = {name: torch.zeros((), dtype=torch.float64) for name in scales}
    state = routing.Routing(losses=RouterLosses(scales, sums, mean, balance_E))
    chosen_NK, weights_NK = routing.route(hidden_NH, weight_EH, 2, state, 1)
    assert torch.equal(chosen_NK, indices_NK) and torch.equal(weights_NK, scores_NK)
    exact_NE = logits_NE.detach().double()
    balance = float((exact_NE.softmax(-1) @ balance_E.double()).sum())
    assert float(sums["balance_loss"]) == pytest.approx(balance, rel=1e-6)
    z = float(exact_NE.logsumexp(-1).square().mean())
    assert float(sums["z_loss"]) == pytest.approx(z, rel=1e-6)


def distilled(worker: MegatronWorker) -> StepMetrics:
    rows = []
    for row in make_rows(MIXED[:3]):
        tokens = int((row.labels_S[1:] != IGNORE).sum())
        ids_NJ, log_probs_NR = torch.arange(3).repeat(tokens, 1), torch.full((tokens, 4), -1.386)
        rows.append(replace(row, teacher_ids_NJ=ids_NJ.int(), teacher_log_probs_NR=log_probs_NR))
    return worker.forward_backward(rows, loss="distill")


def test_a_student_looks_ahead_without_its_head(pool, tiny):
    [plain] = pool.run(call, 1, tiny(**EXPERTS), layout(), distilled)
    [metrics] = pool.run(call, 1, tiny(**EXPERTS), layout(router_balance_loss=0.1), distilled)
    assert metrics.loss == plain.loss and metrics.means["balance_loss"] > 1


@pytest.mark.parametrize("key", BOTH)
def test_a_dense_model_has_no_router(key, tiny):
    cfg = load_config([f"model.path={tiny()}", f"model.{key}=0.1"])
    fields = dict(key=f"model.{key}", found=0.1, remedy_has=f"model.{key}=0")
    with raises(ConfigError, **fields):
        check_run(cfg)
    with raises(ConfigError, **fields):
        check_config(cfg, read_sizes(tiny()), ParallelDims.create(cfg.parallel, 1, 4))
    with raises(ConfigError, key=f"model.{key}", found=-1, allowed="a finite number, 0 or more"):
        load_config([f"model.path={tiny()}", f"model.{key}=-1"])


# Mutants.


def of_losses(change: Callable[[RouterLosses, int], RouterLosses]) -> Mutant:
    """Change the routers' losses, also by the number of micro-batches of this replica."""
    return replaced(
        router_losses.RouterTerms,
        "_losses",
        lambda right: lambda self, step: change(right(self, step), len(self.batches)),
    )


def of_add(change: Callable[..., Any]) -> Mutant:
    return replaced(
        RouterLosses, "add", lambda right: lambda self, *args: right(self, *change(*args))
    )


def shares_of_one_replica(right: Any) -> Any:
    """Count only a replica's own tokens, as if the other replica's were routed alike."""

    def wrong(chunks, text, device):
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        own_LE = 2 * torch.stack([layer.mlp.load for layer in layers]).double()
        right(chunks, text, device)
        return DeferredFigures(torch.cat([own_LE.flatten(), torch.zeros(2)]))

    return wrong


MUTANTS: dict[str, Mutant] = {
    "averaged over micro-batches": of_losses(
        lambda losses, count: replace(
            losses, scales={name: each / count for name, each in losses.scales.items()}
        )
    ),
    "divided by supervised tokens": of_losses(
        lambda losses, _: replace(losses, scales={"balance_loss": BALANCE, "z_loss": Z})
    ),
    "shares of one replica": replaced(router_losses, "take_counts", shares_of_one_replica),
    "padding counts": replaced(
        stage_inputs,
        "real_places",
        lambda right: lambda lengths, tokens: right([tokens] * len(lengths), tokens),
    ),
    "recomputed layers count again": of_add(lambda *given: (*given[:3], False)),
    "probabilities in bf16": of_add(lambda *given: (*given[:2], given[2].bfloat16(), given[3])),
    "gradient twice": replaced(routing._AddGradient, "backward", scaled_by(2, place=1)),
}


def broken(path: str, case: Case, rows: list[Row], names: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for name in names:
        with MUTANTS[name]():
            outcomes.append(loss_and_grads(path, case, rows))
    return outcomes


QUICK = ("shares of one replica", "recomputed layers count again")
OTHERS = tuple(name for name in MUTANTS if name not in QUICK)


@pytest.mark.parametrize("names", [QUICK, full(OTHERS)], ids=["counts", "others"])
def test_the_comparison_notices(names, pool, tiny, reference, record_property):
    case = layout(dp=2, ep=2, recompute="full", **BOTH)
    rows, expected = batch_of("uneven"), reference("uneven", OF_SMALL, BALANCE, Z)
    answers = pool.run(broken, 2, tiny(**EXPERTS | SHALLOW), case, rows, names)
    worst = {
        name: max(all_errors(outcomes, expected, case).values())
        for name, *outcomes in zip(names, *answers, strict=True)
    }
    record_property("worst", worst)
    assert [name for name, error in worst.items() if error <= 100 * TOLERANCE] == []
