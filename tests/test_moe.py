# .venv/bin/python -m pytest tests/test_moe.py
"""Losses, log-probs and every gradient of Qwen3-VL-MoE equal Hugging Face's, at each layout."""

from functools import cache

import pytest

from tests.batches import MIXED, TEXT_ON_ONE_RANK, RowSpec, make_rows
from tests.reference import Reference, run_reference
from tests.runs import Case, loss_and_grads
from tests.test_parity import TOLERANCE, errors, layout

EXPERTS = dict(experts=8, layers=4)
# On the ranks of EP 2 and 4 rows of very different length, and an uneven number of micro-batches.
UNEVEN = (
    RowSpec(120, images=((8, 8),)),
    RowSpec(3),
    RowSpec(90),
    RowSpec(2),
    RowSpec(9, images=((4, 6),)),
)
BATCHES = {"mixed": MIXED, "text_on_one_rank": TEXT_ON_ONE_RANK, "uneven": UNEVEN}

CASES: dict[str, tuple[Case, dict[str, object], str]] = {
    "1": (layout(), {}, "mixed"),
    "ep2": (layout(dp=2, ep=2), {}, "uneven"),
    "ep2-dp2-overlap": (
        layout(dp=4, ep=2, overlap_grad_reduce=True),
        {"dense_layers": 1},
        "uneven",
    ),
}


@pytest.fixture(scope="module")
def reference(tiny):
    @cache
    def compute(batch: str, sizes: tuple[tuple[str, object], ...]) -> Reference:
        return run_reference(tiny(**EXPERTS, **dict(sizes)), make_rows(BATCHES[batch]))

    return compute


@pytest.mark.parametrize("name", CASES)
def test_equals_hugging_face(name, pool, tiny, reference, record_property):
    case, sizes, batch = CASES[name]
    rows = make_rows(BATCHES[batch])
    expected = reference(batch, tuple(sorted(sizes.items())))
    outcomes = pool.run(loss_and_grads, case.world, tiny(**{**EXPERTS, **sizes}), case, rows)
    for outcome in outcomes:  # every rank reports the same
        assert outcome.loss == outcomes[0].loss
        assert outcome.num_tokens == outcomes[0].num_tokens
    found = errors(outcomes, expected, case)
    worst = max(found, key=lambda key: found[key])
    record_property("worst", found[worst])
    assert found[worst] <= TOLERANCE, f"{worst}: {found[worst]:.2e} of {len(found)} compared"
