# .venv/bin/python -m pytest tests/test_mutants.py
"""Mutants that show that the parity suite can fail. Each breaks the package the way other trainers
were broken, and the comparison of test_parity.py must then be far outside its tolerance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.reference import run_reference
from tests.runs import Case, Outcome, loss_and_grads
from tests.test_parity import TOLERANCE, errors, layout


@contextmanager
def reentrant_list_of_features() -> Iterator[None]:
    """Run the tower under one reentrant checkpoint that returns the DeepStack features in a
    list."""
    import megatron_vlm.model.vision as vision

    def run(tower, patches, inputs):
        def body(x):
            out = tower(x, **inputs)
            return out.pooler_output, out.deepstack_features

        main, deepstack = checkpoint(body, patches.requires_grad_(), use_reentrant=True)
        return torch.stack([main, *deepstack])

    with mock.patch.object(vision, "_run_tower", run):
        yield


def scaled_feature_gradient(factor: float) -> Callable[[], Any]:
    """Scale the backward of the gathered features, as replicate-and-reduce schemes do."""

    @contextmanager
    def mutant() -> Iterator[None]:
        from megatron_vlm.model.vision import _GatherFeatures

        right = _GatherFeatures.backward

        def backward(ctx, grad):
            first, *rest = right(ctx, grad)
            return first * factor, *rest

        with mock.patch.object(_GatherFeatures, "backward", staticmethod(backward)):
            yield

    return mutant


@contextmanager
def no_sum_over_tp() -> Iterator[None]:
    """Leave out the sum over TP, so that each rank's tower learns from its own images only."""
    import megatron_vlm.training.optimizer as optimizer

    with mock.patch.object(optimizer, "sum_shared_images", lambda model, tp: None):
        yield


@contextmanager
def features_not_sent_on() -> Iterator[None]:
    """Drop the features that a stage with few layers could not add."""
    from megatron_vlm.model.stage_model import StageModel

    with mock.patch.object(StageModel, "_join_stages", lambda self, hidden, features: hidden):
        yield


@contextmanager
def deepstack_dropped_between_stages() -> Iterator[None]:
    """Drop these features, and let the next stage wait for none."""
    from megatron_vlm.distributed.dims import ParallelDims

    nothing = mock.patch.object(ParallelDims, "features_after", lambda self, place, features: 0)
    with features_not_sent_on(), nothing:
        yield


@contextmanager
def chunks_swapped() -> Iterator[None]:
    """Swap the layers of the first and the second chunk of stage 0."""
    from megatron_vlm.distributed.dims import ParallelDims

    right = ParallelDims.layers_of

    def wrong(self, stage, chunk=0):
        return right(self, stage, 1 - chunk if stage == 0 else chunk)

    with mock.patch.object(ParallelDims, "layers_of", wrong):
        yield


@contextmanager
def chunked_mrope() -> Iterator[None]:
    """Use Megatron's own layout of the three axes."""
    from megatron_vlm.model.rope import InterleavedMRoPE

    right = InterleavedMRoPE.__init__

    def init(self, head_dim, theta, section, *rest):
        right(self, head_dim, theta, section, *rest)
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(section))

    with mock.patch.object(InterleavedMRoPE, "__init__", init):
        yield


@contextmanager
def padding_in_softmax() -> Iterator[None]:
    """Let the rows that round the vocabulary up take part in the softmax."""
    import megatron_vlm.model.stage_model as model

    right = model.predict

    def wrong(products, targets, vocab, *more):
        return right(products, targets, 10**9, *more)

    with mock.patch.object(model, "predict", wrong):
        yield


@contextmanager
def no_touch() -> Iterator[None]:
    """Leave the tower's parameters out of the graph for a micro-batch without images."""
    import megatron_vlm.model.stage_model as model

    with mock.patch.object(model, "mark_ready_with_zero_grads", lambda x, tower: x):
        yield


@contextmanager
def loss_per_micro_batch() -> Iterator[None]:
    """Average the loss in each micro-batch, then over micro-batches."""
    import megatron_vlm.training.worker as worker

    right = worker.loss_of

    def wrong(*args):
        loss, count, report = right(*args)
        return loss / count, torch.ones_like(count), report

    with mock.patch.object(worker, "loss_of", wrong):
        yield


MUTANTS: dict[str, tuple[Callable[[], Any], Case, dict[str, Any]]] = {
    "features in a list": (reentrant_list_of_features, layout(), {}),
    "gradient times TP": (scaled_feature_gradient(2.0), layout(tp=2), {}),
    "gradient over TP": (scaled_feature_gradient(0.5), layout(tp=2), {}),
    "no sum over TP": (no_sum_over_tp, layout(tp=2), {}),
    "DeepStack dropped": (
        deepstack_dropped_between_stages,
        layout(pp=2, layers_per_stage=[1, 3]),
        {},
    ),
    "DeepStack dropped between chunks": (
        deepstack_dropped_between_stages,
        layout(pp=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2]),
        {},
    ),
    "chunks swapped": (chunks_swapped, layout(pp=2, virtual_stages=2), {}),
    "chunked M-RoPE": (chunked_mrope, layout(), {}),
    "padding in the softmax": (padding_in_softmax, layout(tp=2), {"vocab": 509}),
    "loss per micro-batch": (loss_per_micro_batch, layout(), {}),
}


def broken(path: str, case: Case, rows: list, name: str) -> Outcome:
    with MUTANTS[name][0]():
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_notices(name, pool, tiny, record_property):
    _, case, sizes = MUTANTS[name]
    rows = make_rows(MIXED, sizes.get("vocab", 512))
    path = tiny(**sizes)
    outcomes = pool.run(broken, case.world, path, case, rows, name)
    deviations = errors(outcomes, run_reference(path, rows), case)
    worst = max(deviations.values())
    record_property("worst", worst)
    assert worst > 100 * TOLERANCE


def forgetful(path: str, case: Case, rows: list) -> Outcome:
    with features_not_sent_on():
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_sent_has_the_shape_that_the_next_stage_waits_for(chunks, pool, tiny):
    """A stage does not receive shapes. A wrong one ends the run, and no other bytes are read."""
    layers = [1, 3] if chunks == 1 else [0, 1, 1, 2]
    case = layout(pp=2, virtual_stages=chunks, layers_per_stage=layers)
    with pytest.raises(RuntimeError, match=r"next stage waits for \(\d+, 2, 64\), and this one"):
        pool.run(forgetful, 2, tiny(), case, make_rows(MIXED))


def touchless(path: str, case: Case, rows: list) -> Outcome:
    with no_touch():
        return loss_and_grads(path, case, rows)


@pytest.mark.slow
def test_parity_notices_an_untouched_tower(pool, tiny):
    """Without `touch`, the tower's gradients never become ready on the replica without images.
    Megatron's DDP raises there. The other replica waits, which is the hang that users know."""
    case = layout(dp=2, overlap_grad_reduce=True)
    with pytest.raises(RuntimeError, match="per_param_grad_ready_counts"):
        pool.run(touchless, 2, tiny(), case, make_rows(TEXT_ON_ONE_RANK))
