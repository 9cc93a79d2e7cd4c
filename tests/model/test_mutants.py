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

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.model import delta_rule, fused_ops, gated_delta_net, head, stage_model, vision
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.experts import SharedExpert
from megatron_vlm.model.rope import InterleavedMRoPE
from megatron_vlm.training import data_parallel, worker
from tests.model.test_parity import TOLERANCE, errors, full, layout
from tests.support.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.reference import reference_of, rule_by_token
from tests.support.runs import Case, Outcome, loss_and_grads

Mutant = Callable[[], Any]  # makes the context in which the package is broken


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    """Replace a function of a module, or a method, by what `make` makes of it."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def reentrant_list_of_features(_right: Any) -> Any:
    """Run the tower under one reentrant checkpoint that returns the DeepStack features in a
    list."""

    def run(tower, patches, plan, own):
        def body(x):
            out = tower(x, **plan.of_patches, **plan.of_host, starts=plan.starts)
            return out.pooler_output, out.deepstack_features

        main, deepstack = checkpoint(body, patches.requires_grad_(), use_reentrant=True)
        return torch.stack([main, *deepstack])

    return run


def scaled_by(factor: float, place: int = 0) -> Callable[[Any], Any]:
    """Scale a gradient of a backward, as replicate-and-reduce schemes do."""

    def make(right: Any) -> Any:
        def backward(ctx, grad):
            grads = list(right(ctx, grad))
            grads[place] = grads[place] * factor
            return tuple(grads)

        return staticmethod(backward)

    return make


# Drops the features that a stage with few layers could not add.
FEATURES_NOT_SENT_ON = replaced(Carry, "to_tensor", lambda _: lambda self, layers: self.hidden_SBH)


@contextmanager
def deepstack_dropped_between_stages() -> Iterator[None]:
    """Drop these features, and let the next stage wait for none."""
    nothing = mock.patch.object(ParallelDims, "features_after", lambda self, place, features: 0)
    with FEATURES_NOT_SENT_ON(), nothing:
        yield


def chunks_swapped(right: Any) -> Any:
    """Swap the layers of the first and the second chunk of stage 0."""
    return lambda self, stage, chunk=0: right(self, stage, 1 - chunk if stage == 0 else chunk)


def chunked_mrope(right: Any) -> Any:
    """Use Megatron's own layout of the three axes."""

    def init(self, head_dim, theta, section, *rest):
        right(self, head_dim, theta, section, *rest)
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(section))

    return init


def padding_in_softmax(right: Any) -> Any:
    """Let the rows that round the vocabulary up take part in the softmax."""
    return lambda products, targets, vocab, *more: right(products, targets, 10**9, *more)


def loss_per_micro_batch(right: Any) -> Any:
    """Average the loss in each micro-batch, then over micro-batches."""

    def wrong(*args):
        loss, count, report = right(*args)
        return loss / count, torch.ones_like(count), report

    return wrong


def context_around_the_block(_right: Any) -> Any:
    """Set the context of a pass once for the whole chunk. A layer that is recomputed then reads
    that of the micro-batch that came last."""
    last: dict[str, Any] = {}

    @contextmanager
    def leave_behind(self, layer):
        layer.mlp.routing = last.setdefault("routing", self.routing)
        if torch.is_grad_enabled():  # the second forward keeps what the first one left
            yield
            return
        layer.mlp.routing = last["routing"] = self.routing
        yield

    return leave_behind


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
        normed = F.rms_norm(gated, gated.shape[-1:], self.norm, eps)
        return normed.flatten(2).transpose(0, 1).contiguous()

    return gated_norm


def shared_expert_without_its_gate(_right: Any) -> Any:
    return lambda self, hidden: self.down(self.swiglu(self.gate_up(hidden))) + 0 * self.gate(hidden)


def of_rule(make: Callable[[Any], Any]) -> Mutant:
    return replaced(delta_rule, "gated_delta_rule", make)


QWEN3_5 = dict(family="qwen3_5", head_dim=64)

MUTANTS: dict[str, tuple[Mutant, Case, dict[str, Any]]] = {
    "features in a list": (
        replaced(vision, "_run_tower", reentrant_list_of_features),
        layout(),
        {},
    ),
    "gradient times TP": (
        replaced(vision._GatherFeatures, "backward", scaled_by(2.0)),
        layout(tp=2),
        {},
    ),
    "gradient over TP": (
        replaced(vision._GatherFeatures, "backward", scaled_by(0.5)),
        layout(tp=2),
        {},
    ),
    # Each rank's tower learns from its own images only.
    "no sum over TP": (
        replaced(data_parallel, "all_reduce_tower_grads", lambda _: lambda model, tp: None),
        layout(tp=2),
        {},
    ),
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
    "chunks swapped": (
        replaced(ParallelDims, "layers_of", chunks_swapped),
        layout(pp=2, virtual_stages=2),
        {},
    ),
    "chunked M-RoPE": (replaced(InterleavedMRoPE, "__init__", chunked_mrope), layout(), {}),
    "padding in the softmax": (
        replaced(head, "predict", padding_in_softmax),
        layout(tp=2),
        {"vocab": 509},
    ),
    "loss per micro-batch": (replaced(worker, "loss_of", loss_per_micro_batch), layout(), {}),
    "norm of the delta net not summed over TP": (
        replaced(
            gated_delta_net,
            "copy_to_tensor_model_parallel_region",
            lambda right: lambda x, group: x,
        ),
        layout(tp=2),
        QWEN3_5,
    ),
    "decay in bf16": (of_rule(decay_in_bf16), layout(), QWEN3_5),
    "queries and keys not normalised": (of_rule(unnormalised_rule), layout(), QWEN3_5),
    "key heads in the wrong order": (of_rule(heads_in_turn), layout(), QWEN3_5),
    "state carried into the next row": (of_rule(state_kept_between_rows), layout(), QWEN3_5),
    "convolution across rows": (
        replaced(fused_ops, "convolve", convolution_across_rows),
        layout(),
        QWEN3_5,
    ),
    "gate before the norm": (
        replaced(gated_delta_net.GatedDeltaMixer, "_gated_norm", gate_before_the_norm),
        layout(),
        QWEN3_5,
    ),
    "rotary on all of the head": (
        replaced(
            InterleavedMRoPE,
            "__init__",
            lambda right: lambda self, head_dim, *rest: right(self, 4 * head_dim, *rest),
        ),
        layout(),
        QWEN3_5,
    ),
    "shared expert without its gate": (
        replaced(SharedExpert, "forward", shared_expert_without_its_gate),
        layout(),
        QWEN3_5 | {"experts": 4},
    ),
}
# These end a run.
FATAL: dict[str, Mutant] = {
    "features not sent on": FEATURES_NOT_SENT_ON,
    "context of the block": replaced(PassContext, "on", context_around_the_block),
    # The tower's parameters are not in the graph of a micro-batch without images.
    "untouched tower": replaced(
        stage_model, "mark_ready_with_zero_grads", lambda _: lambda x, tower: x
    ),
}


def broken(path: str, case: Case, rows: list, name: str) -> Outcome:
    with FATAL[name]() if name in FATAL else MUTANTS[name][0]():
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


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_sent_has_the_shape_that_the_next_stage_waits_for(chunks, pool, tiny):
    """A stage does not receive shapes. A wrong one ends the run, and no other bytes are read."""
    layers = [1, 3] if chunks == 1 else [0, 1, 1, 2]
    case = layout(pp=2, virtual_stages=chunks, layers_per_stage=layers)
    with pytest.raises(RuntimeError, match=r"next stage waits for \(\d+, 2, 64\), and this one"):
        pool.run(broken, 2, tiny(), case, make_rows(MIXED), "features not sent on")


def test_a_recomputed_layer_has_the_context_of_its_micro_batch(pool, tiny):
    """With an attribute of the whole block, it has that of another one: the experts' rows do not
    fit."""
    case = layout(pp=2, recompute="full")
    with pytest.raises(RuntimeError, match="of 2 failed"):
        pool.run(broken, 2, tiny(experts=8), case, make_rows(MIXED), "context of the block")


@pytest.mark.slow
def test_parity_notices_an_untouched_tower(pool, tiny):
    """The tower's gradients never become ready on the replica without images. Megatron's DDP raises
    there. The other replica waits, which is the hang that users know."""
    case = layout(dp=2, overlap_grad_reduce=True)
    with pytest.raises(RuntimeError, match="per_param_grad_ready_counts"):
        pool.run(broken, 2, tiny(), case, make_rows(TEXT_ON_ONE_RANK), "untouched tower")
