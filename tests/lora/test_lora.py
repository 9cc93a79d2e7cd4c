# .venv/bin/python -m pytest tests/lora/test_lora.py
"""Adapters equal PEFT's on Hugging Face's model at each layout: losses, every gradient, and weights
after three steps."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_5 import modeling_qwen3_5

from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.export_weights import gather_tensors
from megatron_vlm.hf.weight_map import Origin
from megatron_vlm.lora import targets
from megatron_vlm.lora.layers import Adapters, ExpertAdapters, dropout_rng
from megatron_vlm.lora.peft_config import PeftTensor
from megatron_vlm.lora.targets import AdaptedLinear, HFLinear
from megatron_vlm.model.experts import times
from tests.model.test_parity import layout
from tests.support.batches import ALL_TEXT, MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.peft_reference import Adapter, peft_model, run_peft, save, train_peft
from tests.support.runs import call, loss_and_grads, train
from tests.support.suites import slow

EXPERTS = dict(experts=8, layers=4)
# Decays are at most 1 here. Up to 16, as transformers draws them, its rule in chunks loses digits
# of what feeds the decay: the adapters of in_proj_a differ by 4.5e-4, and all others by 1.3e-6.
DELTA_NET = dict(family="qwen3_5", head_dim=64)
SHARED_EXPERT = dict(DELTA_NET, experts=4)

# Sizes with rows of whole blocks of 64 weights, for lora.base.
BLOCKS = dict(head_dim=32, intermediate=128)
EXPERTS_IN_BLOCKS = dict(EXPERTS, **BLOCKS, expert_intermediate=64)
DELTA_NET_IN_BLOCKS = dict(DELTA_NET, intermediate=128, linear_value_dim=32)
SHARED_EXPERT_IN_BLOCKS = dict(
    SHARED_EXPERT, linear_value_dim=32, expert_intermediate=64, shared_expert_intermediate=64
)

# The error is relative, as in test_parity.py. Measured worst case over all cases below: 3.3e-6.
TOLERANCE = 5e-6
OPTIM = dict(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
STEPS = 3

BATCHES = {"mixed": MIXED, "all_text": ALL_TEXT, "text_on_one_rank": TEXT_ON_ONE_RANK}
EVERY = ("attention", "mlp", "merger", "vision_attention", "vision_mlp")
LANGUAGE = Adapter()
ALL = Adapter(EVERY)
TOWER = Adapter(("vision_attention", "vision_mlp"))
BESIDE_MERGER = Adapter(("attention",), whole_merger=True)
DOWN = "mlp.experts.down_proj"
IN_EXPERTS = Adapter(parameters=("mlp.experts.gate_up_proj", DOWN))

CASES = {
    # name: (layout, adapter, sizes of the tiny model, batch)
    "1x1x1": (layout(), LANGUAGE, {}, "mixed"),
    "all-1x1x1": (layout(), ALL, {}, "mixed"),
    "all-tp2": (layout(tp=2), ALL, {}, "mixed"),
    "all-pp2": (layout(pp=2), ALL, {}, "mixed"),
    "all-tp2-pp2": (layout(tp=2, pp=2), ALL, {}, "mixed"),
    "language-tp2-pp2-recompute": (layout(tp=2, pp=2, recompute="full"), LANGUAGE, {}, "mixed"),
    "recompute-text": (layout(recompute="full"), LANGUAGE, {}, "all_text"),
    "recompute-all": (layout(recompute="full", recompute_vision=True), ALL, {}, "mixed"),
    "recompute-selective": (layout(recompute="selective"), LANGUAGE, {}, "mixed"),
    "dp2-overlap": (
        layout(dp=2, overlap_grad_reduce=True, overlap_param_gather=True),
        ALL,
        {},
        "text_on_one_rank",
    ),
    "tp2-dp2-overlap": (
        layout(tp=2, dp=2, overlap_grad_reduce=True),
        ALL,
        {},
        "text_on_one_rank",
    ),
    "plain-optimizer-dp2": (layout(dp=2, distributed_optimizer=False), LANGUAGE, {}, "mixed"),
    "pp2x2": (layout(pp=2, virtual_stages=2), ALL, {}, "mixed"),
    "language-pp2x2-recompute": (
        layout(pp=2, virtual_stages=2, recompute="full"),
        LANGUAGE,
        {},
        "mixed",
    ),
    "stage0-0-layers": (layout(pp=2, layers_per_stage=[0, 4]), LANGUAGE, {}, "mixed"),
    "tower-pp2": (layout(pp=2), TOWER, {}, "mixed"),
    "tower-tp2": (layout(tp=2), TOWER, {}, "mixed"),
    "tower-tp2-not-shared": (layout(tp=2, share_images=False), TOWER, {}, "mixed"),
    "tower-text": (layout(pp=2), TOWER, {}, "all_text"),
    "merger-adapters-tp2": (layout(tp=2), Adapter(("merger",)), {}, "mixed"),
    "mlp-tp2": (layout(tp=2), Adapter(("mlp",)), {}, "mixed"),
    "q-v-tp2": (layout(tp=2), Adapter(("q_proj", "v_proj")), {}, "mixed"),
    "up-tp2": (layout(tp=2), Adapter(("up_proj",)), {}, "mixed"),
    "last-layer-pp2": (layout(pp=2), Adapter(("layers.3.self_attn.o_proj",)), {}, "mixed"),
    "merger-whole": (layout(), BESIDE_MERGER, {}, "mixed"),
    "merger-whole-tp2-pp2": (layout(tp=2, pp=2), BESIDE_MERGER, {}, "mixed"),
    "tied-tp2-pp2": (layout(tp=2, pp=2), ALL, {"tied": True}, "mixed"),
    "tied-language": (layout(), LANGUAGE, {"tied": True}, "mixed"),
    "rslora-tp2": (layout(tp=2), Adapter(EVERY, rslora=True), {}, "mixed"),
    "kv-heads-4-tp2": (layout(tp=2), LANGUAGE, {"kv_heads": 4}, "mixed"),
    "no-deepstack-pp2": (layout(pp=2), ALL, {"deepstack": 0}, "mixed"),
    "experts-ep2": (layout(dp=2, ep=2), Adapter(("attention",)), EXPERTS, "mixed"),
    "experts-beside-dense-ep2-pp2-recompute": (
        layout(pp=2, dp=2, ep=2, recompute="full"),
        Adapter(("attention", "layers.0.mlp.up_proj", "merger")),
        {**EXPERTS, "dense_layers": 1},
        "mixed",
    ),
    "in-experts": (layout(), IN_EXPERTS, EXPERTS, "mixed"),
    "in-experts-ep2": (layout(dp=2, ep=2), IN_EXPERTS, EXPERTS, "mixed"),
    "in-experts-ep2-pp2-recompute": (
        layout(pp=2, dp=2, ep=2, recompute="full"),
        replace(IN_EXPERTS, targets=("attention", "mlp", "merger")),
        {**EXPERTS, "dense_layers": 1},
        "mixed",
    ),
    "in-experts-ep4-tied": (layout(dp=4, ep=4), IN_EXPERTS, {**EXPERTS, "tied": True}, "mixed"),
    "in-experts-ep2-dp2-overlap": (
        layout(dp=4, ep=2, overlap_grad_reduce=True),
        replace(IN_EXPERTS, rslora=True),
        EXPERTS,
        "text_on_one_rank",
    ),
    "in-experts-ep2-pp2x2": (
        layout(pp=2, dp=2, ep=2, virtual_stages=2),
        IN_EXPERTS,
        EXPERTS,
        "mixed",
    ),
    "in-experts-ep2-plain-optimizer": (
        layout(dp=2, ep=2, distributed_optimizer=False),
        IN_EXPERTS,
        EXPERTS,
        "mixed",
    ),
    "in-experts-alone-ep2-pp2": (
        layout(pp=2, dp=2, ep=2),
        replace(IN_EXPERTS, targets=("mlp",)),
        EXPERTS,
        "mixed",
    ),
    "in-experts-of-a-layer-ep2-pp2": (  # a stage that learns nothing
        layout(pp=2, dp=2, ep=2, overlap_grad_reduce=True),
        Adapter((f"layers.1.{DOWN}",), parameters=(f"layers.1.{DOWN}",)),
        EXPERTS,
        "mixed",
    ),
    "delta-net-all": (layout(), ALL, DELTA_NET, "mixed"),
    "delta-net-all-tp2": (layout(tp=2), ALL, DELTA_NET, "mixed"),
    "delta-net-all-pp2": (layout(pp=2, layers_per_stage=[1, 3]), ALL, DELTA_NET, "mixed"),
    "delta-net-all-tp2-pp2-recompute": (
        layout(tp=2, pp=2, layers_per_stage=[2, 2], recompute="full"),
        ALL,
        DELTA_NET,
        "mixed",
    ),
    "delta-net-8-layers-pp2x2": (
        layout(pp=2, virtual_stages=2),
        ALL,
        {**DELTA_NET, "layers": 8},
        "mixed",
    ),
    "delta-net-qkv-tp2": (layout(tp=2), Adapter(("in_proj_qkv",)), DELTA_NET, "mixed"),
    "delta-net-decay-tp2": (layout(tp=2), Adapter(("in_proj_a",)), DELTA_NET, "mixed"),
    "delta-net-q-out-tp2": (layout(tp=2), Adapter(("q_proj", "out_proj")), DELTA_NET, "mixed"),
    "delta-net-dp2-overlap": (
        layout(dp=2, overlap_grad_reduce=True),
        ALL,
        DELTA_NET,
        "text_on_one_rank",
    ),
    "shared-expert": (layout(), IN_EXPERTS, SHARED_EXPERT, "mixed"),
    "shared-expert-ep2": (layout(dp=2, ep=2), IN_EXPERTS, SHARED_EXPERT, "mixed"),
    "shared-expert-ep2-pp2-recompute": (
        layout(pp=2, dp=2, ep=2, recompute="full"),
        IN_EXPERTS,
        SHARED_EXPERT,
        "mixed",
    ),
    "shared-expert-gate-ep2": (
        layout(dp=2, ep=2),
        Adapter(("shared_expert_gate",)),
        SHARED_EXPERT,
        "mixed",
    ),
    "nf4": (layout(), replace(LANGUAGE, base="nf4"), BLOCKS, "mixed"),
    "nf4-all-tp2": (layout(tp=2), replace(ALL, base="nf4"), BLOCKS, "mixed"),
    "nf4-all-pp2": (layout(pp=2), replace(ALL, base="nf4"), BLOCKS, "mixed"),
    "nf4-all-tp2-pp2-recompute": (
        layout(tp=2, pp=2, recompute="full", recompute_vision=True),
        replace(ALL, base="nf4"),
        BLOCKS,
        "mixed",
    ),
    "nf4-text-recompute": (
        layout(recompute="full"),
        replace(LANGUAGE, base="nf4"),
        BLOCKS,
        "all_text",
    ),
    "nf4-tied-pp2x2": (
        layout(pp=2, virtual_stages=2),
        replace(ALL, base="nf4"),
        {**BLOCKS, "tied": True},
        "mixed",
    ),
    "nf4-merger-whole-tp2-dp2-overlap": (
        layout(tp=2, dp=2, overlap_grad_reduce=True),
        replace(BESIDE_MERGER, base="nf4"),
        BLOCKS,
        "text_on_one_rank",
    ),
    "nf4-in-experts": (layout(), replace(IN_EXPERTS, base="nf4"), EXPERTS_IN_BLOCKS, "mixed"),
    "nf4-in-experts-ep2-pp2-recompute": (
        layout(pp=2, dp=2, ep=2, recompute="full"),
        replace(IN_EXPERTS, targets=("attention", "mlp", "merger"), base="nf4"),
        {**EXPERTS_IN_BLOCKS, "dense_layers": 1},
        "mixed",
    ),
    "nf4-delta-net-all-tp2-pp2": (
        layout(tp=2, pp=2, layers_per_stage=[2, 2]),
        replace(ALL, base="nf4"),
        DELTA_NET_IN_BLOCKS,
        "mixed",
    ),
    "nf4-shared-expert-ep2": (
        layout(dp=2, ep=2),
        replace(IN_EXPERTS, base="nf4"),
        SHARED_EXPERT_IN_BLOCKS,
        "mixed",
    ),
    "int8-all-tp2-pp2": (layout(tp=2, pp=2), replace(ALL, base="int8"), BLOCKS, "mixed"),
    "int8-in-experts-ep2": (
        layout(dp=2, ep=2),
        replace(IN_EXPERTS, base="int8"),
        EXPERTS_IN_BLOCKS,
        "mixed",
    ),
    "int8-delta-net-all-tp2": (
        layout(tp=2),
        replace(ALL, base="int8"),
        DELTA_NET_IN_BLOCKS,
        "mixed",
    ),
}


# `make test` runs QUICK, `make test-full` FULL as well, and `make test-slow` the rest.
QUICK = ("all-tp2-pp2", "dp2-overlap", "in-experts-ep2-pp2-recompute")
FULL = ("recompute-text", "pp2x2", "delta-net-all-tp2-pp2-recompute")
FULL += ("shared-expert-ep2-pp2-recompute", "nf4-all-tp2-pp2-recompute")
FULL += ("nf4-in-experts-ep2-pp2-recompute", "int8-delta-net-all-tp2")


def marked(names: Iterable[str], quick: Sequence[str], full: Sequence[str] = ()) -> list[Any]:
    """Return the names as parameters, of which some are not slow."""
    marks = {**dict.fromkeys(full, pytest.mark.full), **dict.fromkeys(quick, ())}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in names]


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    """Return functions for the folder of PEFT's adapter, its results for a batch, and its weights
    after three steps."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def folder(adapter, sizes):
        return save(
            peft_model(tiny(**dict(sizes)), in_peft(adapter)), root / str(len(list(root.iterdir())))
        )

    @cache
    def batch(adapter, sizes, name):
        vocab = dict(sizes).get("vocab", 512)
        model = peft_model(tiny(**dict(sizes)), in_peft(adapter))
        return run_peft(model, make_rows(BATCHES[name], vocab))

    @cache
    def steps(adapter, sizes, name):
        model = peft_model(tiny(**dict(sizes)), in_peft(adapter))
        return train_peft(model, batches(name), OPTIM)

    return folder, batch, steps


def in_peft(adapter):
    """Return the adapter with the names that end a longer name as regular expressions, as PEFT
    takes them."""
    patterns = {
        "q_proj": r".*\.q_proj",
        "v_proj": r".*\.v_proj",
        "up_proj": r".*\.up_proj",
        "out_proj": r".*\.out_proj",
        "in_proj_qkv": r".*\.in_proj_qkv",
        "in_proj_a": r".*\.in_proj_a",
        "shared_expert_gate": r".*\.shared_expert_gate",
        "layers.3.self_attn.o_proj": r".*layers\.3\.self_attn\.o_proj",
        "layers.0.mlp.up_proj": r".*layers\.0\.mlp\.up_proj",
        f"layers.1.{DOWN}": "no linear layer",
    }
    return replace(adapter, targets=tuple(patterns.get(each, each) for each in adapter.targets))


def batches(name):
    return [make_rows(BATCHES[name], 512, seed) for seed in range(STEPS)]


@pytest.mark.parametrize("name", marked(CASES, QUICK, FULL))
def test_equals_peft(name, pool, tiny, adapters, record_property):
    case, adapter, sizes, batch = CASES[name]
    folder, reference, _ = adapters
    key = tuple(sorted(sizes.items()))
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, key)))
    expected = reference(adapter, key, batch)
    rows = make_rows(BATCHES[batch], sizes.get("vocab", 512))
    outcomes = pool.run(loss_and_grads, case.world, tiny(**sizes), case, rows)
    errors = compared(outcomes, expected, case)
    worst = max(errors, key=lambda each: errors[each])
    record_property("worst", errors[worst])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e} of {len(errors)} compared"


def compared(outcomes, expected, case) -> dict[str, float]:
    """Return the relative errors of one run."""
    actual = outcomes[0]
    errors = {"loss": abs(actual.loss - expected.loss) / abs(expected.loss)}
    tp = case.parallel["tp"]
    replicas = case.world // (tp * case.parallel["pp"])
    for kind in ("log_probs", "train_log_probs"):
        log_probs = [row for i in range(replicas) for row in getattr(outcomes[i * tp], kind)]
        pairs = zip(log_probs, expected.log_probs, strict=True)
        errors[kind] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    assert actual.grads.keys() == expected.grads.keys()
    for tensor, expected_grad in expected.grads.items():
        error = float((actual.grads[tensor] - expected_grad).norm())
        errors[f"grad {tensor}"] = (
            error / float(expected_grad.norm()) if expected_grad.any() else error
        )
    return errors


@pytest.mark.full
def test_large_decays_equal_peft_with_the_rule_token_by_token(
    pool, tiny, adapters, record_property
):
    """transformers trains by its rule in chunks, whose gradient of large decays is far off in fp32.
    With its own rule for single tokens in the same place, all gradients are equal: measured 1.6e-6.
    """
    sizes = dict(DELTA_NET, max_decay=16.0)
    key = tuple(sorted(sizes.items()))
    folder, reference, _ = adapters
    case = replace(layout(), lora=dict(LANGUAGE.ours, path=folder(LANGUAGE, key)))
    outcomes = pool.run(loss_and_grads, 1, tiny(**sizes), case, make_rows(MIXED))
    in_chunks = compared(outcomes, reference(LANGUAGE, key, "mixed"), case)
    by_token = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    with mock.patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", by_token):
        model = peft_model(tiny(**sizes), LANGUAGE)
        errors = compared(outcomes, run_peft(model, make_rows(MIXED)), case)
    record_property("worst", max(errors.values()))
    record_property("chunks", max(in_chunks.values()))
    assert max(errors.values()) <= TOLERANCE
    off = {name for name, error in in_chunks.items() if error > TOLERANCE}
    assert off and all(".in_proj_a." in name for name in off)


FULL_STEPS = ("all-tp2-pp2", "in-experts-ep2", "delta-net-all-tp2-pp2-recompute")
SLOW_STEPS = ("1x1x1", "pp2x2", "merger-whole-tp2-pp2", "in-experts")
SLOW_STEPS += ("in-experts-ep2-pp2-recompute", "in-experts-ep2-plain-optimizer")
SLOW_STEPS += ("shared-expert-ep2-pp2-recompute",)
STEP_CASES = marked(("dp2-overlap", *FULL_STEPS, *SLOW_STEPS), ("dp2-overlap",), FULL_STEPS)
# The tolerances are as in test_steps.py, in units of the learning rate. Measured: 3.5e-5, 0.014 and
# 3.9e-7.
MEAN_TOLERANCE_LR = 3e-4
MAX_TOLERANCE_LR = 0.2
NORM_TOLERANCE = 8e-6


@pytest.mark.parametrize("name", STEP_CASES)
def test_weights_after_three_steps(name, pool, tiny, adapters, record_property):
    case, adapter, sizes, batch = CASES[name]
    folder, _, steps = adapters
    key = tuple(sorted(sizes.items()))
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, key)), optim=dict(OPTIM))
    expected_norms, expected = steps(adapter, key, batch)
    _, norms, weights = pool.run(train, case.world, tiny(**sizes), case, batches(batch))[0]
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    assert weights.keys() == expected.keys()
    mean = {n: float((weights[n] - expected[n]).abs().mean()) / OPTIM["lr"] for n in weights}
    largest = {n: float((weights[n] - expected[n]).abs().max()) / OPTIM["lr"] for n in weights}
    record_property("mean", max(mean.values()))
    record_property("max", max(largest.values()))
    record_property("norm", norm_error)
    assert norm_error <= NORM_TOLERANCE
    worst = max(mean, key=lambda n: mean[n])
    assert mean[worst] <= MEAN_TOLERANCE_LR, f"{worst}: {mean[worst]:.2e} lr on average"
    worst = max(largest, key=lambda n: largest[n])
    assert largest[worst] <= MAX_TOLERANCE_LR, f"{worst}: {largest[worst]:.2e} lr"


def gathered(worker):
    """Return every adapter's tensors, on rank 0."""
    named = gather_tensors(
        worker.held, worker.table, worker.grid, of=lambda entry: entry.origin is Origin.added
    )
    return {name: value.clone() for name, value in named if value is not None}


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "sizes"), [(layout(tp=2, pp=2), {}), (layout(pp=2, dp=2, ep=2), EXPERTS)]
)
def test_adapters_begin_as_peft_begins_in_every_layout(case, sizes, pool, tiny):
    lora, path = dict(rank=8, targets=EVERY), tiny(**sizes)
    one_rank = pool.run(call, 1, path, replace(layout(), lora=lora), gathered)[0]
    four_ranks = pool.run(call, 4, path, replace(case, lora=lora), gathered)[0]
    assert one_rank.keys() == four_ranks.keys()
    assert [name for name in one_rank if not torch.equal(one_rank[name], four_ranks[name])] == []
    firsts = {name: value for name, value in one_rank.items() if "lora_A" in name}
    assert all(not value.any() for name, value in one_rank.items() if "lora_B" in name)
    numbers = [
        number for value in firsts.values() for number in value.flatten()[:: value.shape[-1]]
    ]
    assert len(set(map(float, numbers))) > 0.99 * len(numbers)
    for name, value in firsts.items():
        # The variance of kaiming_uniform(a=sqrt(5)) is 1 / (3 inputs), its bound 1 / sqrt(inputs).
        expected = (3 * value.shape[-1]) ** -0.5
        assert float(value.std()) == pytest.approx(expected, rel=0.2), name
        assert float(value.abs().max()) <= value.shape[-1] ** -0.5


def operations(worker):
    """Return the number of operations in the matrix products of a step on text."""
    with FlopCounterMode(display=False) as counter:
        worker.forward_backward(make_rows(ALL_TEXT))
    return counter.get_total_flops()


@pytest.mark.full
@pytest.mark.parametrize(
    ("recompute", "sizes"),
    [
        ("none", {}),
        ("full", {}),
        ("none", EXPERTS),
        slow("full", EXPERTS),
    ],
)
def test_no_product_is_computed_for_the_gradient_of_a_frozen_weight(recompute, sizes, pool, tiny):
    """Full training takes 3 products for each weight in forward and backward. Without the product
    for the weight's gradient 2 are left, and recomputation adds one to either."""
    case, path = layout(recompute=recompute), tiny(**sizes)
    whole = pool.run(call, 1, path, case, operations)[0]
    lora = dict(rank=1, targets=("attention", "mlp"))
    adapted = pool.run(call, 1, path, replace(case, lora=lora), operations)[0]
    expected = 2 / 3 if recompute == "none" else 3 / 4
    # Nothing before the first adapters needs a gradient.
    assert expected - 0.02 < adapted / whole < expected + 0.06


def test_dropout_keeps_the_mean():
    """Each mask is a function of the place where it is drawn, and the mean over many masks is the
    output without dropout."""
    base = TensorSpec("a.q_proj.weight", (6, 40), Part.decoder)
    plan = AdaptedLinear("a", 0, 0, (HFLinear(base, True),), None, 1)
    settings = LoraConfig(rank=4, dropout=0.25)
    linear = torch.nn.Linear(40, 6)
    adapters = Adapters(linear.weight, plan, settings, None)
    torch.manual_seed(0)
    for param in adapters.parameters():
        torch.nn.init.normal_(param)
    x = torch.ones(50, 40)
    with torch.no_grad():
        whole = adapters.eval()(x)
        adapters.train()
        with dropout_rng(1, 2, 3):
            first = adapters(x)
            state = torch.get_rng_state()
        with dropout_rng(1, 2, 3):
            assert torch.equal(adapters(x), first)
        outputs = []
        for number in range(40):
            with dropout_rng(1, 2, number):
                outputs.append(adapters(x))
        assert not torch.equal(outputs[0], outputs[1])
    mean = torch.cat(outputs).mean(0)
    spread = torch.cat(outputs).std(0)
    assert ((mean - whole[0]).abs() < 5 * spread / (50 * 40) ** 0.5).all()
    assert not torch.equal(torch.get_rng_state(), state)  # the outer generator's state is restored


# Mutants of adapters.


def patched_adapters(change):
    """Patch the product of the adapters in experts. `change` gets the module and the arguments of
    the right product."""
    return mock.patch.object(ExpertAdapters, "forward", change)


def of_the_next_expert(adapters, rows, counts):
    low = times(rows, adapters.A.roll(1, 0), counts) * adapters.scale
    return times(low, adapters.B, counts)


def unscaled(adapters, rows, counts):
    return times(times(rows, adapters.A, counts), adapters.B, counts)


def b_by_expert():
    """Read B as if the columns of each expert were together, as the rows of A are."""
    right = PeftTensor.loaded

    def wrong(self, stored):
        if len(self.spec.shape) == 3 and "lora_B" in self.name:
            return torch.stack(stored.chunk(self.spec.shape[0], dim=1))
        return right(self, stored)

    return mock.patch.object(PeftTensor, "loaded", wrong)


def summed_over_all_replicas():
    """Remove Megatron's mark of the experts, so that their gradients are summed over all
    replicas."""
    right = ExpertAdapters.__init__

    def wrong(self, *args):
        right(self, *args)
        for param in self.parameters():
            param.allreduce = True

    return mock.patch.object(ExpertAdapters, "__init__", wrong)


def cut_as_one_block():
    """Cut B over TP as if the rows of in_proj_qkv were one block: rank 0 gets those of q and k, and
    rank 1 those of v."""
    right = targets._layouts

    def wrong(linear, slot):
        return right(linear, replace(slot, parts=()))

    return mock.patch.object(targets, "_layouts", wrong)


MUTANTS = {
    # name: (mutant, case)
    "of the next expert": (lambda: patched_adapters(of_the_next_expert), "in-experts-ep2"),
    "unscaled": (lambda: patched_adapters(unscaled), "in-experts-ep2"),
    "B by expert": (b_by_expert, "in-experts-ep2"),
    "summed over all replicas": (summed_over_all_replicas, "in-experts-ep2"),
    "B cut as one block": (cut_as_one_block, "delta-net-qkv-tp2"),
}


def broken(path, case, rows, name):
    with MUTANTS[name][0]():
        return loss_and_grads(path, case, rows)


FULL_MUTANTS = tuple(name for name in MUTANTS if name != "unscaled")


@pytest.mark.parametrize("name", marked(MUTANTS, ("unscaled",), FULL_MUTANTS))
def test_parity_notices(name, pool, tiny, adapters, record_property):
    case, adapter, sizes, batch = CASES[MUTANTS[name][1]]
    folder, reference, _ = adapters
    key = tuple(sorted(sizes.items()))
    case = replace(case, lora=dict(adapter.ours, path=folder(adapter, key)))
    outcomes = pool.run(broken, 2, tiny(**sizes), case, make_rows(BATCHES[batch]), name)
    worst = max(compared(outcomes, reference(adapter, key, batch), case).values())
    record_property("worst", worst)
    assert worst > 100 * TOLERANCE
