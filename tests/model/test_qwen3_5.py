# .venv/bin/python -m pytest tests/model/test_qwen3_5.py
"""Losses, log-probs and every gradient of Qwen3.5 equal Hugging Face's, at each layout.

Gradients that go through the decay are compared with transformers in fp64 with the rule token by
token: its own rule in fp32 loses digits of exactly these."""

import pytest

from tests.model.test_parity import TOLERANCE, case, errors
from tests.support.batches import ALL_TEXT, MIXED, TEXT_ON_ONE_RANK, RowSpec, make_rows
from tests.support.comparison import check_worst
from tests.support.reference import reference_of, run_exact_reference
from tests.support.runs import loss_and_grads
from tests.support.suites import full, slow

pytestmark = pytest.mark.newest  # it depends on the versions

FAMILY = dict(family="qwen3_5", head_dim=64)
# The lengths around chunks of 32 and 64 tokens, and the shortest row.
LENGTHS = (
    RowSpec(1),
    RowSpec(63),
    RowSpec(64),
    RowSpec(65),
    RowSpec(500, supervised=0.1),
    RowSpec(31, images=((2, 2),)),
)
BATCHES = {
    "mixed": MIXED,
    "lengths": LENGTHS,
    "all_text": ALL_TEXT,
    "text_on_one_rank": TEXT_ON_ONE_RANK,
}
WIDE = dict(kv_heads=4, linear_key_heads=4, linear_value_heads=12)
DECAY = (".A_log", ".dt_bias", ".in_proj_a.weight")
EXPERTS = dict(experts=8)
# Released decays are up to 16. The bar is ten times the worst that was measured, and transformers'
# own fp32 is farther from the truth.
STRONG_DECAY = dict(max_decay=16.0)


CASES = {
    "1": full(*case("lengths")),
    "tp2-pp2-recompute": case(
        tp=2, pp=2, recompute="full", recompute_vision=True, layers_per_stage=[1, 3]
    ),
    "strong-decay-tp2": full(*case("mixed", STRONG_DECAY, tp=2)),
    "experts-ep2": full(*case("mixed", EXPERTS, dp=2, ep=2)),
    "mixed": slow(*case()),
    "tp2": slow(*case("lengths", tp=2)),
    "tp4": slow(*case("mixed", WIDE, tp=4)),
    "pp2": slow(*case(pp=2)),
    "pp4": slow(*case(pp=4)),
    "stage0-0-layers": slow(*case(pp=2, layers_per_stage=[0, 4])),
    "dp2-overlap": slow(*case("text_on_one_rank", dp=2, overlap_grad_reduce=True)),
    "pp2x2": slow(*case("mixed", {"layers": 8}, pp=2, virtual_stages=2)),
    "recompute-selective": slow(*case(recompute="selective")),
    "tied-tp2-pp2": slow(*case("mixed", {"tied": True}, tp=2, pp=2)),
    "all-text-pp2": slow(*case("all_text", pp=2)),
    "compiled": slow(*case(compile=True)),
    "language-frozen": slow(*case(pp=2, freeze_language=True)),
    "experts-1": slow(*case("lengths", EXPERTS)),
    "experts-ep4": slow(*case("text_on_one_rank", EXPERTS, dp=4, ep=4)),
    "experts-ep2-pp2-recompute": slow(
        *case("mixed", EXPERTS | {"tied": True}, pp=2, dp=2, ep=2, recompute="full")
    ),
}


def is_of_decay(kind: str) -> bool:
    return kind.endswith(DECAY)


@pytest.mark.parametrize(("case", "sizes", "batch"), CASES.values(), ids=CASES)
def test_equals_hugging_face(case, sizes, batch, pool, tiny, record_property):
    path, specs = tiny(**FAMILY, **sizes), BATCHES[batch]
    theirs, exact = reference_of(path, specs), reference_of(path, specs, run=run_exact_reference)
    outcomes = pool.run(loss_and_grads, case.world, path, case, make_rows(specs))
    to_theirs, to_exact = errors(outcomes, theirs, case), errors(outcomes, exact, case)
    deviations = {kind: (to_exact if is_of_decay(kind) else to_theirs)[kind] for kind in to_theirs}
    check_worst(deviations, TOLERANCE, record_property)
    # No gradient is farther from the truth than transformers' own, beyond rounding.
    for kind in filter(is_of_decay, to_exact):
        name = kind.removeprefix("grad ")
        norm = float(exact.grads[name].norm())
        own_error = float((theirs.grads[name] - exact.grads[name]).norm()) / norm
        assert to_exact[kind] <= max(2 * own_error, TOLERANCE / 2), kind
