# .venv/bin/python -m pytest tests/training/test_muon.py
"""Muon: with the same gradients, the matrices of a checkpoint become those of torch.optim.Muon bit
for bit at each layout, and everything else becomes what AdamW makes of it."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_vlm.config.schema import MuonSettings
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.gather_weights import gather_tensors
from megatron_vlm.hf.matrices import Matrix
from megatron_vlm.training.muon import Muon, adjust_lr, choose_owners, orthogonalize
from megatron_vlm.training.optimizer_step import AdamStep, inner_optimizers
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_gemma4 import CONSTANTS
from tests.model.test_parity import layout, part_of
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, of_interest, train
from tests.support.suites import quick

STEPS = 3
OPTIM = dict(name="muon", lr=1e-2, weight_decay=0.1, beta2=0.99, clip_grad=0.0)
EXPERTS = SHALLOW | dict(experts=4)
QWEN3_5 = dict(family="qwen3_5", head_dim=64)
GEMMA4 = dict(family="gemma4", layers=2, vision_depth=1)
EVERY = ("attention", "mlp", "merger", "vision_attention", "vision_mlp", "head")
CASES: dict[str, tuple[Case, dict[str, object]]] = {
    # name: (layout, sizes of the tiny model)
    "1": (layout(), SHALLOW),
    "tp2": (layout(tp=2), SHALLOW),
    "dp2": (layout(dp=2), SHALLOW),
    "dp2-plain-optimizer": (layout(dp=2, distributed_optimizer=False), SHALLOW),
    "tp2-pp2-tied": (layout(tp=2, pp=2), SHALLOW | {"tied": True}),
    "tp2-dp2-overlap": (
        layout(tp=2, dp=2, overlap_grad_reduce=True, overlap_param_gather=True),
        SHALLOW,
    ),
    "pp2x2": (layout(pp=2, virtual_stages=2), {}),
    "ep2": (layout(dp=2, ep=2), EXPERTS),
    "ep2-dp2": (layout(dp=4, ep=2), EXPERTS),
    "ep1-dp2": (layout(dp=2), EXPERTS),
    "qwen3_5-tp2": (layout(tp=2), QWEN3_5),
    "gemma4-tp2": (layout(tp=2), GEMMA4),
    "gemma4-ep2-pp2": (layout(pp=2, dp=2, ep=2), GEMMA4 | dict(experts=4)),
    "gemma4-lora-tp2": (replace(layout(tp=2), lora=dict(rank=4, targets=EVERY)), GEMMA4),
    "vision-frozen-pp2": (layout(pp=2, freeze_vision=True), SHALLOW),
    "lora-tp2-dp2": (replace(layout(tp=2, dp=2), lora=dict(rank=4, targets=EVERY)), SHALLOW),
    "lora-ep2": (replace(layout(dp=2, ep=2), lora=dict(rank=4)), EXPERTS),
}
VARIANTS: dict[str, dict[str, object]] = {
    "tp2": dict(muon=MuonSettings(adjust_lr_fn="original", nesterov=False, momentum=0.8)),
    "dp2": dict(muon=MuonSettings(ns_steps=3), vision_lr=1e-3),
}


def gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """Return the gradient of a tensor in a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def set_gradients(worker: MegatronWorker, step: int) -> None:
    """Set the gradients as after a backward."""
    assert worker.gradients is not None
    worker.gradients.clear()
    for entry, param in worker.held.items():
        if not param.requires_grad:
            continue
        read = partial(
            read_slice, {x.name: gradient(x.name, x.shape, step) for x in entry.hf_tensors}
        )
        along = worker.grid.along(entry.layout.shard_group)
        param.main_grad.copy_(entry.layout.load(read, entry.names, *along).view_as(param))
    worker.gradients.some = True


def read_slice(
    whole: Mapping[str, Tensor], name: str, slices: Sequence[tuple[int, int] | None]
) -> Tensor:
    return whole[name][tuple(slice(*each) if each else slice(None) for each in slices)]


def weights_of(worker: MegatronWorker) -> dict[str, Tensor]:
    named = gather_tensors(worker.held, worker.table, worker.grid, of=of_interest(worker))
    return {name: value.clone() for name, value in named if value is not None}


def steps(path: str, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Return the weights before and after three steps in bf16, as torch.optim.Muon has them on each
    device, and the number of matrices that each rank of the group orthogonalises."""
    worker = MegatronWorker(case.config(path))
    before = weights_of(worker)
    muons = [each for each in inner_optimizers(worker.optimizer) if isinstance(each, Muon)]
    for muon in muons:
        muon.like = muon.like.bfloat16()
    with raises(ConfigError, place="optim_step", key="adam"):
        worker.optim_step(adam=AdamStep.from_config(worker.cfg.optim))
    for step in range(STEPS):
        set_gradients(worker, step)
        worker.optim_step()
    owned = [len(bucket.exchange.owned) for muon in muons for bucket in muon.buckets]
    return before, weights_of(worker), owned


def is_matrix(name: str, weight: Tensor) -> bool:
    rest = ("embed_tokens", "pos_embed", "position_embedding", "patch_embed.", "lm_head", "conv1d")
    rest += ("shared_expert_gate",)
    return weight.dim() > 1 and not any(each in name for each in rest)


def as_matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a tensor, as views."""
    if ".experts." not in name:
        return [tensor]
    halves = 2 if name.endswith("gate_up_proj") else 1
    return [half for expert in tensor for half in expert.chunk(halves)]


def expected_weights(
    before: Mapping[str, Tensor], optim: Mapping[str, object]
) -> dict[str, Tensor]:
    """The same with torch alone."""
    after = {name: weight.clone() for name, weight in before.items()}
    for name, tensor in after.items():
        part = part_of(name)
        settings = dict(lr=optim.get(f"{part}_lr", optim["lr"]), weight_decay=optim["weight_decay"])
        if is_matrix(name, tensor):
            views = as_matrices(name, tensor)
            params = [torch.nn.Parameter(view) for view in views]
            chosen: torch.optim.Optimizer = torch.optim.Muon(
                params, **settings, **asdict(optim.get("muon", MuonSettings()))
            )
        else:
            params = [torch.nn.Parameter(tensor)]
            settings["weight_decay"] *= tensor.dim() > 1
            chosen = torch.optim.AdamW(params, **settings, betas=(0.9, 0.99))
        for step in range(STEPS):
            whole = gradient(name, tensor.shape, step)
            grads = as_matrices(name, whole) if len(params) > 1 else [whole]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            chosen.step()
    return after


def trained_reference(path: str, batches: list) -> tuple[list[float], dict[str, Tensor]]:
    """Return the norms of the gradients and the weights after training with torch alone, but for
    the orthogonalisation in fp32, whose operations are those of torch in bf16."""
    model, lr = load_reference(path), 1e-2
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if is_matrix(name, param)]
    rest = [param for name, param in named.items() if not is_matrix(name, param)]
    momenta = [torch.zeros_like(param) for param in matrices]
    adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0)
    norms = []
    for rows in batches:
        model.zero_grad()
        count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)
        for row in rows:
            (-row_log_probs(model, row).sum() / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), 0.5)))
        adamw.step()
        with torch.no_grad():
            for param, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(param.grad, 1 - 0.95)
                update = orthogonalize(param.grad.lerp(momentum, 0.95), 5)
                param -= adjust_lr(lr, "match_rms_adamw", *param.shape) * update
    return norms, {name: param.detach() for name, param in named.items()}


# Differences over the distance that a tensor has moved; measured 1.7e-5. Newton-Schulz makes the
# smallest singular values of an update hundreds of times larger, and their rounding with them.
TRAINED_TOLERANCE = 1e-4


def test_training_equals_hugging_face(pool, tiny, record_property):
    """With gradients of a model, clipped."""
    path, batches = tiny(**SHALLOW), [make_rows(MIXED, seed=seed) for seed in range(STEPS)]
    optim = dict(name="muon", lr=1e-3, muon_lr=1e-2, clip_grad=0.5)
    case = replace(layout(tp=2, pp=2), optim=optim)
    before = {name: param.detach() for name, param in load_reference(path).named_parameters()}
    expected_norms, expected = trained_reference(path, batches)
    _, norms, actual = pool.run(train, case.world, path, case, batches)[0]
    moved, expected_moved = (
        {name: weights[name] - before[name] for name in actual} for weights in (actual, expected)
    )
    record_property("norm", max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)))
    check_worst(relative_errors(moved, expected_moved), TRAINED_TOLERANCE, record_property)
    assert norms == pytest.approx(expected_norms, rel=2e-6)  # measured 2.2e-7


@pytest.mark.parametrize("name", quick(("dp2", "tp2-pp2-tied", "ep2"), CASES))
def test_equals_torch_at_each_layout(name, pool, tiny, record_property):
    case, sizes = CASES[name]
    optim = OPTIM | VARIANTS.get(name, {})
    case = replace(case, optim=optim)
    outcomes = pool.run(steps, case.world, tiny(**sizes), case)
    before, actual, _ = outcomes[0]
    frozen = {name for name in before if part_of(name) == "vision"}
    learning = before.keys() - (frozen if case.model.get("freeze_vision") else set())
    learning -= {name for name in before if name.endswith(CONSTANTS)}
    assert all(torch.equal(actual[name], before[name]) for name in before.keys() - learning)
    expected = expected_weights({name: before[name] for name in learning}, optim)
    worst = {"matrices": 0.0, "rest": 0.0}
    for name, weight in expected.items():
        kind = "matrices" if is_matrix(name, weight) else "rest"
        error = float((actual[name] - weight).abs().max()) / OPTIM["lr"]
        worst[kind] = max(worst[kind], error)
        assert not torch.equal(weight, before[name])
    for kind, error in worst.items():
        record_property(kind, error)
    # In units of lr, the worst of the rest was 1.2e-5.
    assert worst["matrices"] == 0 and worst["rest"] < 1e-4, worst
    counts = [sum(owned) for _, _, owned in outcomes]
    assert min(counts) > 0  # no rank is left out


def test_ranks_have_equal_work():
    matrices = [Matrix(f"m{number}", 8, 8 + number % 3) for number in range(64)]
    owner = choose_owners(matrices, 4, lambda each: each.columns)
    loads = [sum(each.columns for each in matrices if owner[each.name] == r) for r in range(4)]
    assert max(loads) - min(loads) <= 10


def test_fp32_is_near_torch(record_property):
    """On a CPU the orthogonalisation is in fp32, and torch's is in bf16 everywhere."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((64, 64), (32, 160), (160, 32)):
        start, grad = (torch.randn(rows, columns, generator=generator) for _ in range(2))
        weight = torch.nn.Parameter(start.clone())
        weight.grad = grad.clone()
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, nesterov=False, momentum=0).step()
        theirs = (start - weight.detach()) / adjust_lr(1.0, "original", rows, columns)
        ours = orthogonalize(grad.clone(), 5)
        error = float((ours - theirs).norm() / theirs.norm())
        record_property(f"{rows}x{columns}", error)
        assert 0 < error < 0.03
        singular = torch.linalg.svdvals(ours)
        assert float(singular.min()) > 0.5 and float(singular.max()) < 1.3
