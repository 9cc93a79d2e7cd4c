# .venv/bin/python -m pytest tests/training/test_offload_activations.py
"""Activations on the host: the same gradients, bit for bit, at each layout."""

from dataclasses import dataclass, replace

import pytest

from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import same
from tests.support.runs import Case, collect_grads, my_rows
from tests.support.suites import in_turn, quick

WIDE = {"hidden": 128, "heads": 8, "intermediate": 256}


@dataclass(frozen=True)
class Compared:
    """A step with and without offloading, on this rank."""

    differing: list[str]  # gradients with other bits
    losses: tuple[float, float]
    pages: int  # of the host's memory
    pages_in_use: int  # after the step


def compare(path: str, case: Case, share: float) -> Compared:
    results = []
    for offloaded in (0.0, share):
        model = {**case.model, "offload_activations": offloaded}
        worker = MegatronWorker(replace(case, model=model).config(path))
        rows = my_rows(make_rows(MIXED))
        for _ in range(2 if offloaded else 1):  # the second step uses the first one's pages
            loss = worker.forward_backward(rows).loss
        results.append((loss, collect_grads(worker)))
    (before, grads), (after, offloaded_grads) = results
    assert grads.keys() == offloaded_grads.keys()
    differing = [name for name, grad in grads.items() if not same(grad, offloaded_grads[name])]
    pages = worker.chunks[0].offload.copies.pages
    return Compared(differing, (before, after), pages.allocated, pages.allocated - len(pages.free))


DELTA = {"family": "qwen3_5", "head_dim": 64}
CASES = {
    "1": (layout(), {}, 1.0),
    "compiled": (layout(compile=True), SHALLOW, 1.0),
    "bf16": (replace(layout(), train={"precision": "bf16"}), {}, 1.0),
    "selective-half": (layout(recompute="selective"), {}, 0.5),
    "full": (layout(recompute="full", recompute_vision=True), {}, 1.0),
    "tp2-pp2": (layout(tp=2, pp=2), {}, 1.0),
    "pp2-full-half": (layout(pp=2, recompute="full"), {"layers": 5}, 0.5),
    "pp2x2": (layout(pp=2, virtual_stages=2), {}, 1.0),
    "pp2x2-full": (layout(pp=2, virtual_stages=2, recompute="full"), {"layers": 8}, 1.0),
    "fused-gradients-overlap": (
        replace(
            layout(tp=2, dp=2, overlap_grad_reduce=True, fp32_weight_gradients=True),
            train={"precision": "bf16"},
        ),
        {},
        1.0,
    ),
    "experts-ep2": (layout(dp=2, ep=2), {"experts": 4}, 1.0),
    "experts-full": (layout(recompute="full"), {"experts": 4}, 1.0),
    "delta": (layout(), DELTA, 1.0),
    "delta-experts-tp1-pp2": (layout(pp=2), {**DELTA, "experts": 4}, 1.0),
    "lora": (replace(layout(), lora=dict(rank=4, targets=("attention", "mlp"))), {}, 1.0),
    "language-frozen": (layout(freeze_language=True), {}, 1.0),
    "all-but-merger-frozen": (layout(freeze_vision=True, freeze_language=True), {}, 1.0),
}


@pytest.mark.parametrize(
    "name", quick(("1", "selective-half", "pp2x2"), CASES, in_turn(5, "offload"))
)
def test_gradients_have_the_same_bits(name, pool, tiny):
    case, sizes, share = CASES[name]
    for rank in pool.run(compare, case.world, tiny(**{**WIDE, **sizes}), case, share):
        assert rank.differing == []
        assert rank.losses[0] == rank.losses[1]
        assert rank.pages > 0 and rank.pages_in_use == 0
