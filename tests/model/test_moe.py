# .venv/bin/python -m pytest tests/model/test_moe.py
"""Losses, log-probs and every gradient of Qwen3-VL-MoE equal Hugging Face's, at each layout."""

import pytest

from megatron_vlm.data.batches.collate import filler_batch
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, case, errors, layout
from tests.support.batches import ALL_TEXT, MIXED, TEXT_ON_ONE_RANK, RowSpec, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.reference import reference_of
from tests.support.runs import Case, Outcome, collect_grads, loss_and_grads
from tests.support.suites import full, slow

EXPERTS = dict(experts=8, layers=4)
# The ranks of EP 2 and 4 get rows of very different lengths, and uneven numbers of micro-batches.
UNEVEN = (
    RowSpec(120, images=((8, 8),)),
    RowSpec(3),
    RowSpec(90),
    RowSpec(2),
    RowSpec(9, images=((4, 6),)),
)
BATCHES = {
    "mixed": MIXED,
    "text_on_one_rank": TEXT_ON_ONE_RANK,
    "uneven": UNEVEN,
    "all_text": ALL_TEXT,
}


CASES = {
    "1": full(*case()),
    "ep2": full(*case("uneven", dp=2, ep=2)),
    "ep2-pp2-recompute": case(pp=2, dp=2, ep=2, recompute="full", layers_per_stage=[0, 4]),
    "ep2-dp2-overlap": slow(
        *case("uneven", {"dense_layers": 1}, dp=4, ep=2, overlap_grad_reduce=True)
    ),
    "ep1-dp2": slow(*case(dp=2)),
    "ep1-pp2": slow(*case("mixed", {"tied": True}, pp=2)),
    "ep2-plain-optimizer": slow(*case(dp=2, ep=2, distributed_optimizer=False)),
    "ep4": slow(*case("uneven", {"tied": True}, dp=4, ep=4)),
    "ep4-pp2": slow(*case("uneven", pp=2, dp=4, ep=4, layers_per_stage=[1, 3])),
    "ep2-dp2-pp2": slow(*case("mixed", {"tied": True}, pp=2, dp=4, ep=2, overlap_grad_reduce=True)),
    "ep2-stage-without-experts": slow(
        *case("mixed", {"dense_layers": 2, "sparse_step": 2}, pp=2, dp=2, ep=2)
    ),
    "ep2-pp2x2": slow(
        *case("uneven", pp=2, dp=2, ep=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2])
    ),
    "ep2-pp2x2-dp2-overlap-recompute": slow(
        *case(
            "mixed",
            {"tied": True},
            pp=2,
            dp=4,
            ep=2,
            virtual_stages=2,
            overlap_grad_reduce=True,
            recompute="full",
        )
    ),
    "ep2-recompute-all": slow(
        *case("text_on_one_rank", dp=2, ep=2, recompute="full", recompute_vision=True)
    ),
    "ep2-text-on-one-rank-overlap": slow(
        *case("text_on_one_rank", dp=2, ep=2, overlap_grad_reduce=True)
    ),
    "ep2-all-text": slow(*case("all_text", dp=2, ep=2)),
    "ep2-vision-frozen": slow(*case(dp=2, ep=2, freeze_vision=True)),
    "ep2-language-frozen": slow(*case("text_on_one_rank", pp=2, dp=2, ep=2, freeze_language=True)),
    "ep2-merger-only": slow(
        *case("text_on_one_rank", dp=2, ep=2, freeze_language=True, freeze_vision=True)
    ),
    "top-1": slow(*case("mixed", {"top_k": 1}, dp=2, ep=2)),
    "top-all": slow(*case("mixed", {"top_k": 8}, dp=2, ep=2)),
}


@pytest.mark.parametrize(("case", "sizes", "batch"), CASES.values(), ids=CASES)
def test_equals_hugging_face(case, sizes, batch, pool, tiny, record_property):
    path, rows = tiny(**EXPERTS, **sizes), make_rows(BATCHES[batch])
    expected = reference_of(path, BATCHES[batch])
    outcomes = pool.run(loss_and_grads, case.world, path, case, rows)
    for outcome in outcomes:  # every rank reports the same
        assert outcome.loss == outcomes[0].loss
        assert outcome.num_tokens == outcomes[0].num_tokens
    deviations = errors(outcomes, expected, case)
    if sizes.get("top_k") == 1:  # the only weight is always 1, so the gradient is only rounding
        deviations = {
            key: value for key, value in deviations.items() if "mlp.gate.weight" not in key
        }
    check_worst(deviations, TOLERANCE, record_property)


def with_fillers(path: str, case: Case, rows: list) -> Outcome:
    """Run all rows on the first replica; the others have no row of their own."""
    worker = MegatronWorker(case.config(path))
    micro_batches = worker.micro_batches(rows) if worker.grid.dp.rank == 0 else [filler_batch()]
    if case.parallel.get("overlap_grad_reduce"):
        worker.forward_backward(micro_batches)
    metrics = worker.forward_backward(micro_batches)
    return Outcome(metrics.loss, metrics.num_tokens, [], [], collect_grads(worker))


@pytest.mark.parametrize(
    "case", [full(layout(dp=2, ep=2)), slow(layout(pp=2, dp=2, ep=2, overlap_grad_reduce=True))]
)
def test_replicas_without_rows_take_part(case, pool, tiny):
    """The filler of such a replica goes to no expert, and its experts serve the other replicas."""
    outcomes = pool.run(with_fillers, case.world, tiny(**EXPERTS), case, make_rows(MIXED))
    expected = reference_of(tiny(**EXPERTS), MIXED)
    assert outcomes[0].loss == pytest.approx(expected.loss, rel=TOLERANCE)
    grads = outcomes[0].grads
    errors_by_name = relative_errors(grads, {name: expected.grads[name] for name in grads})
    assert max(errors_by_name.values()) <= TOLERANCE, errors_by_name
