# .venv/bin/python -m pytest tests/model/test_mutants.py
"""Mutants that show that the parity suite can fail. Each breaks the package the way other trainers
were broken, and the comparison of test_parity.py must then be far outside its tolerance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.model.test_parity import TOLERANCE, errors, full, layout
from tests.support.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.reference import reference_of, rule_by_token
from tests.support.runs import Case, Outcome, loss_and_grads


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
    from megatron_vlm.model.carry import Carry

    with mock.patch.object(Carry, "to_tensor", lambda self, layers: self.hidden_SBH):
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
    from megatron_vlm.model import head

    right = head.predict

    def wrong(products, targets, vocab, *more):
        return right(products, targets, 10**9, *more)

    with mock.patch.object(head, "predict", wrong):
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


@contextmanager
def context_around_the_block() -> Iterator[None]:
    """Set the context of a pass once for the whole chunk. A layer that is recomputed then reads
    that of the micro-batch that came last."""
    from megatron_vlm.model.decoder_layer import PassContext

    @contextmanager
    def leave_behind(self, layer):
        layer.mlp.routing = last.setdefault("routing", self.routing)
        if torch.is_grad_enabled():  # the second forward keeps what the first one left
            yield
            return
        layer.mlp.routing = last["routing"] = self.routing
        yield

    last: dict[str, Any] = {}
    with mock.patch.object(PassContext, "on", leave_behind):
        yield


def replaced(name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    """Replace a function, or the attribute of a class, of the gated delta net by what `make` makes
    of it."""

    @contextmanager
    def mutant() -> Iterator[None]:
        from megatron_vlm.model import delta_kernels, gated_delta_net

        owner, _, leaf = name.rpartition(".")
        target = getattr(gated_delta_net, owner) if owner else gated_delta_net
        if name == "gated_delta_rule":
            target = delta_kernels  # which chooses it
        with mock.patch.object(target, leaf, make(getattr(target, leaf))):
            yield

    return mutant


def unnormalised_rule(_right: Any) -> Any:
    def rule(q, k, v, g, beta):
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
        return rule_by_token(q, k, v, g, beta, normalise=False)

    return rule


def heads_in_turn(right: Any) -> Any:
    def rule(q, k, v, g, beta):
        q, k = (x.repeat(1, 1, v.shape[2] // k.shape[2], 1) for x in (q, k))
        return right(q, k, v, g, beta)

    return rule


def state_kept_between_rows(right: Any) -> Any:
    def rule(*parts):
        rows = len(parts[0])
        out, state = right(*(part.flatten(0, 1)[None] for part in parts))
        return out.unflatten(1, (rows, -1))[0], state.expand(rows, *state.shape[1:]).clone()

    return rule


def decay_in_bf16(right: Any) -> Any:
    return lambda q, k, v, g, beta: right(q, k, v, g.bfloat16().float(), beta)


def convolution_across_rows(right: Any) -> Any:
    return lambda x, weight: right(x.flatten(0, 1)[None], weight).unflatten(1, x.shape[:2])[0]


def gate_before_the_norm(_right: Any) -> Any:
    def gated_norm(self, out, gate):
        gated = out * F.silu(gate.unflatten(-1, out.shape[2:]))
        eps = self.config.layernorm_epsilon
        return F.rms_norm(gated, gated.shape[-1:], self.norm, eps).flatten(2)

    return gated_norm


@contextmanager
def rotary_on_all_of_the_head() -> Iterator[None]:
    from megatron_vlm.model.rope import InterleavedMRoPE

    right = InterleavedMRoPE.__init__

    def init(self, head_dim, *rest):
        right(self, 4 * head_dim, *rest)

    with mock.patch.object(InterleavedMRoPE, "__init__", init):
        yield


@contextmanager
def shared_expert_without_its_gate() -> Iterator[None]:
    from megatron_vlm.model.experts import SharedExpert

    def forward(self, hidden):
        return self.down(self.swiglu(self.gate_up(hidden))) + 0 * self.gate(hidden)

    with mock.patch.object(SharedExpert, "forward", forward):
        yield


QWEN3_5 = dict(family="qwen3_5", head_dim=64)

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
    "norm of the delta net not summed over TP": (
        replaced("copy_to_tensor_model_parallel_region", lambda right: lambda x, group: x),
        layout(tp=2),
        QWEN3_5,
    ),
    "decay in bf16": (replaced("gated_delta_rule", decay_in_bf16), layout(), QWEN3_5),
    "queries and keys not normalised": (
        replaced("gated_delta_rule", unnormalised_rule),
        layout(),
        QWEN3_5,
    ),
    "key heads in the wrong order": (
        replaced("gated_delta_rule", heads_in_turn),
        layout(),
        QWEN3_5,
    ),
    "state carried into the next row": (
        replaced("gated_delta_rule", state_kept_between_rows),
        layout(),
        QWEN3_5,
    ),
    "convolution across rows": (
        replaced("_convolve", convolution_across_rows),
        layout(),
        QWEN3_5,
    ),
    "gate before the norm": (
        replaced("GatedDeltaMixer._gated_norm", gate_before_the_norm),
        layout(),
        QWEN3_5,
    ),
    "rotary on all of the head": (rotary_on_all_of_the_head, layout(), QWEN3_5),
    "shared expert without its gate": (
        shared_expert_without_its_gate,
        layout(),
        QWEN3_5 | {"experts": 4},
    ),
}


def broken(path: str, case: Case, rows: list, name: str) -> Outcome:
    with MUTANTS[name][0]():
        return loss_and_grads(path, case, rows)


# Of the images' gradients, between stages, and between rows.
QUICK = ("gradient times TP", "DeepStack dropped between chunks", "state carried into the next row")


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in MUTANTS])
def test_parity_notices(name, pool, tiny, record_property):
    _, case, sizes = MUTANTS[name]
    path, vocab = tiny(**sizes), sizes.get("vocab", 512)
    outcomes = pool.run(broken, case.world, path, case, make_rows(MIXED, vocab), name)
    deviations = errors(outcomes, reference_of(path, MIXED, vocab), case)
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


def with_one_context(path: str, case: Case, rows: list) -> Outcome:
    with context_around_the_block():
        return loss_and_grads(path, case, rows)


def test_a_recomputed_layer_has_the_context_of_its_micro_batch(pool, tiny):
    """With an attribute of the whole block, it has that of another one: the experts' rows do not
    fit."""
    case = layout(pp=2, recompute="full")
    with pytest.raises(RuntimeError, match="of 2 failed"):
        pool.run(with_one_context, 2, tiny(experts=8), case, make_rows(MIXED))


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
