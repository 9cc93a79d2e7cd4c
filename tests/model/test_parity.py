# make test-parity, or: .venv/bin/python -m pytest tests/model/test_parity.py
"""Losses, per-token log-probs and every gradient equal Hugging Face's, at each layout."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.batches import (
    ALL_TEXT,
    MIXED,
    SHARED,
    SHARED_ON_ONE_RANK,
    TEXT_ON_ONE_RANK,
    make_rows,
)
from tests.support.comparison import check_worst, relative_errors
from tests.support.reference import Reference, reference_of
from tests.support.runs import Case, Outcome, loss_and_grads
from tests.support.suites import full

pytestmark = pytest.mark.newest  # it depends on the versions

# Relative error in fp32 on the CPU. Log-probs and loss: the largest difference over the largest
# value. Gradients: the norm of the difference over the norm, for each tensor of the checkpoint.
# Measured worst case over all cases below: 2.1e-6 (each case in cards/tiny-qwen3-vl.yaml).
TOLERANCE = 5e-6

BATCHES = {"mixed": MIXED, "all_text": ALL_TEXT, "text_on_one_rank": TEXT_ON_ONE_RANK}
BATCHES |= {"shared": SHARED, "shared_on_one_rank": SHARED_ON_ONE_RANK}


def layout(tp: int = 1, pp: int = 1, dp: int = 1, **more: object) -> Case:
    of_model = ("recompute", "freeze", "share", "compile", "attention", "router", "offload", "fp32")
    of_model += ("mtp",)
    model = {k: v for k, v in more.items() if k.startswith(of_model)}
    parallel = {k: v for k, v in more.items() if k not in model}
    return Case(world=tp * pp * dp, model=model, parallel=dict(tp=tp, pp=pp, **parallel))


def case(batch: str = "mixed", sizes: dict[str, object] | None = None, **degrees: Any) -> Any:
    """Return a layout, the sizes of the tiny model and a batch."""
    of_train = {"micro_batch_size": 4} if batch == "shared" else {}
    return replace(layout(**degrees), train=of_train), sizes or {}, batch


CASES: dict[str, tuple[Case, dict[str, object], str]] = {
    "1x1x1": case(),
    "tp2": case(tp=2),
    "pp2": case(pp=2),
    "dp2": case(dp=2, overlap_grad_reduce=False),
    "tp2-pp2": case(tp=2, pp=2),
    "tp2-dp2": case(tp=2, dp=2),
    "pp2-dp2": case(pp=2, dp=2),
    "pp4": case(pp=4),
    "stage0-0-layers": case(pp=2, layers_per_stage=[0, 4]),
    "stage0-1-layer": case(pp=2, layers_per_stage=[1, 3]),
    "stages-0-1-1-2": case("mixed", {"tied": True}, pp=4, layers_per_stage=[0, 1, 1, 2]),
    "tp2-stage0-0-layers": case(tp=2, pp=2, layers_per_stage=[0, 4]),
    "recompute-selective": case(recompute="selective"),
    "recompute-full": case(recompute="full"),
    "recompute-vision": case(recompute_vision=True),
    "recompute-all-tp2-pp2": case(
        tp=2, pp=2, recompute="full", recompute_vision=True, layers_per_stage=[1, 3]
    ),
    "vision-frozen": case(pp=2, freeze_vision=True),
    "vision-merger-frozen": case(tp=2, freeze_vision=True, freeze_merger=True),
    "language-frozen": case(pp=2, freeze_language=True),
    "merger-only-tp2": case(tp=2, freeze_vision=True, freeze_language=True),
    "tied": case("mixed", {"tied": True}),
    "tied-tp2-pp2": case("mixed", {"tied": True}, tp=2, pp=2),
    "kv-heads-4": case("mixed", {"kv_heads": 4}, tp=2),  # no grouping
    "odd-vocab-tp2": case("mixed", {"vocab": 509}, tp=2),
    "odd-vocab-tied-tp2-pp2": case("mixed", {"vocab": 509, "tied": True}, tp=2, pp=2),
    "overlap-text-on-one-rank": case("text_on_one_rank", dp=2, overlap_grad_reduce=True),
    "overlap-tp2-dp2-images-shared": case("text_on_one_rank", tp=2, dp=2, overlap_grad_reduce=True),
    "overlap-plain-optimizer": case(dp=2, overlap_grad_reduce=True, distributed_optimizer=False),
    "no-deepstack-pp2": case("mixed", {"deepstack": 0}, pp=2),
    "all-text": case("all_text", pp=2),
    "all-text-tp2-dp2": case("all_text", tp=2, dp=2, overlap_grad_reduce=True),
    "images-not-shared": case(tp=2, share_images=False),
    "images-not-shared-pp2": case(tp=2, pp=2, share_images=False),
    "pp2x2": case(pp=2, virtual_stages=2),
    "pp2x3-uneven": case(
        "mixed", {"layers": 7}, pp=2, virtual_stages=3, layers_per_stage=[0, 1, 2, 1, 1, 2]
    ),
    "pp2x2-stage0-0-layers-tied": case(
        "mixed", {"tied": True}, pp=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2]
    ),
    "tp2-pp2x2-recompute": case(
        tp=2, pp=2, virtual_stages=2, recompute="full", recompute_vision=True
    ),
    "pp2x2-dp2-overlap": case(
        "text_on_one_rank", pp=2, dp=2, virtual_stages=2, overlap_grad_reduce=True
    ),
    "pp4x2": case("mixed", {"layers": 9}, pp=4, virtual_stages=2),
    "plain-optimizer": case(tp=2, dp=2, distributed_optimizer=False, overlap_grad_reduce=False),
    # The tower encodes a picture of several rows once.
    "pictures-of-several-rows": case("shared"),
    "pictures-of-several-rows-pp2": case("shared", pp=2),
    "pictures-of-several-rows-tp2-stage0-0-layers": case(
        "shared", tp=2, pp=2, layers_per_stage=[0, 4]
    ),
    "pictures-of-several-rows-recompute-tp2": case(
        "shared", tp=2, recompute="full", recompute_vision=True
    ),
    "pictures-of-several-rows-not-over-tp2": case("shared", tp=2, share_images=False),
    "pictures-of-several-rows-vision-frozen": case("shared", pp=2, freeze_vision=True),
    "pictures-of-several-rows-merger-frozen": case(
        "shared", tp=2, freeze_vision=True, freeze_merger=True
    ),
    "pictures-of-several-rows-no-deepstack": case("shared", {"deepstack": 0}),
    "pictures-of-several-rows-on-one-rank": case(
        "shared_on_one_rank", dp=2, overlap_grad_reduce=True
    ),
}
# One layout of each kind; experts and gated delta nets have theirs in files of their own.
QUICK = ("tp2", "stage0-0-layers", "tp2-pp2", "overlap-text-on-one-rank")
QUICK += ("pp2x2-stage0-0-layers-tied", "pictures-of-several-rows-tp2-stage0-0-layers")


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to, as in model.freeze_*."""
    if "merger" in name or ".embed_vision." in name:
        return "merger"
    return "vision" if ".visual." in name or ".vision_tower." in name else "language"


def errors(outcomes: list[Outcome], expected: Reference, case: Case) -> dict[str, float]:
    """Return the largest relative error of each kind."""
    actual = outcomes[0]
    dp = case.world // (case.parallel["tp"] * case.parallel["pp"])
    # Megatron's ranks run tp first, then dp, then pp: these are one rank of each replica, in order.
    tp = case.parallel["tp"]
    replicas = [outcomes[rank * tp] for rank in range(dp)]
    deviations = {"loss": abs(actual.loss - expected.loss) / abs(expected.loss)}
    for kind in ("log_probs", "train_log_probs"):
        rows = [row for replica in replicas for row in getattr(replica, kind)]
        assert [len(row) for row in rows] == [len(row) for row in expected.log_probs]
        deviations[kind] = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(rows, expected.log_probs, strict=True)
        )
    assert actual.grads.keys() <= expected.grads.keys() | {"lm_head.weight"}
    frozen = {part for part in ("vision", "merger", "language") if case.model.get(f"freeze_{part}")}
    for name, grad in actual.grads.items():
        if part_of(name) in frozen:
            assert grad.isnan().all(), f"{name} is frozen but has a gradient"
            continue
        assert not grad.isnan().any(), f"{name} is not frozen and has no gradient"
        expected_grad = expected.grads[name]
        deviations |= relative_errors({f"grad {name}": grad}, {f"grad {name}": expected_grad})
    return deviations


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in CASES])
def test_equals_hugging_face(name, pool, tiny, record_property):
    case, sizes, batch = CASES[name]
    rows = make_rows(BATCHES[batch], sizes.get("vocab", 512))
    expected = reference_of(tiny(**sizes), BATCHES[batch], sizes.get("vocab", 512))
    outcomes = pool.run(loss_and_grads, case.world, tiny(**sizes), case, rows)
    for outcome in outcomes:  # every rank reports the same
        assert outcome.loss == outcomes[0].loss
        assert outcome.num_tokens == outcomes[0].num_tokens
    deviations = errors(outcomes, expected, case)
    check_worst(deviations, TOLERANCE, record_property)
