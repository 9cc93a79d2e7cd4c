# .venv/bin/python -m pytest tests/training/test_moments.py
"""AdamW with moments in bf16 or 8 bits: the formulas are those of torch's AdamW, rounding has no
bias, and copies of a weight stay equal however replicas divide them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_vlm.config.optimizer_spec import STATE_NAMES, OptimizerSpec
from megatron_vlm.training.adamw import (
    RangedAdamW,
    dynamic_map,
    make_moment,
    noise_of,
    round_to_bf16,
)
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.runs import Case, my_rows
from tests.support.suites import FULL, SLOW, quick
from tests.support.trl_environment import run_on_tensors

CPU = torch.device("cpu")
WEIGHTS = 10_000  # the last block is not full
STATES = ("fp32", "bf16", "int8")


def spec(states: str) -> OptimizerSpec:
    return OptimizerSpec("AdamW", STATE_NAMES, states)


def some_values(name: str) -> Tensor:
    """Return values over many orders of magnitude, with a block of zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(WEIGHTS, generator=generator)
    values *= 10 ** (-6 * torch.rand(WEIGHTS, generator=generator))
    values[512:768] = 0
    return values.square() if name == "exp_avg_sq" else values


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("name", STATE_NAMES)
def test_values_that_were_read_are_written_unchanged(name, states, record_property):
    """So a checkpoint may have the values in place of the codes."""
    moment = make_moment(name, WEIGHTS, states, CPU)
    values = some_values(name)
    moment.write(0, values, noise_of(0, WEIGHTS, 1, CPU))
    stored, read = [each.clone() for each in moment.tensors], moment.read(0, WEIGHTS)
    for step in range(10):
        noise = noise_of(0, WEIGHTS, step, CPU) if step else None
        moment.write(0, moment.read(0, WEIGHTS), noise)
        assert all(map(torch.equal, stored, moment.tensors))
    assert torch.equal(moment.read(512, 768), torch.zeros(256))
    if name == "exp_avg_sq":  # nothing is divided by zero
        assert bool(((read > 0) == (values > 0)).all())
    error = float(((read - values).abs() / values.abs().clamp(min=1e-30)).nanmedian())
    record_property("error", error)
    assert error <= {"fp32": 0, "bf16": 0.005, "int8": 0.1}[states]
    size = sum(each.nbytes for each in moment.tensors)
    assert size == pytest.approx(spec(states).bytes_of_state * WEIGHTS, rel=1e-3)


def test_rounding_has_no_bias():
    """The mean over many steps is the value, of which neither neighbour is."""
    count, steps = 2048, 400
    values = torch.linspace(0.11, 0.9, count)
    for states in ("bf16", "int8"):
        for name in STATE_NAMES:
            moment = make_moment(name, 4096, states, CPU)
            total = torch.zeros(count, dtype=torch.float64)
            padded = torch.cat([values, torch.ones(4096 - count)])
            stored = padded.square() if name == "exp_avg_sq" else padded
            for step in range(steps):
                moment.write(0, stored, noise_of(0, 4096, step, CPU))
                read = moment.read(0, count)
                total += read.sqrt() if name == "exp_avg_sq" else read
            bias = float((total / steps / values - 1).mean().abs())
            assert bias < 3e-5, (states, name, bias)  # to the nearest: up to 1e-3 and more
    nearest = torch.full((1000,), 1.001)
    rounded = round_to_bf16(nearest, noise_of(0, 1000, 1, CPU)).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125} and bool((nearest.bfloat16() == 1).all())


def test_noise_depends_on_the_place_in_the_whole_tensor():
    whole = noise_of(0, 1000, 7, CPU)
    assert torch.equal(whole[300:500], noise_of(300, 200, 7, CPU))
    others = [noise_of(0, 1000, 8, CPU), noise_of(1000, 1000, 7, CPU)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([whole, other]))[0, 1])) < 0.1
    assert float(whole.min()) > 0 and float(whole.max()) < 1


SETTINGS = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def problem(decades: float, steps: int = 100) -> tuple[Tensor, list[Tensor]]:
    """Return a weight, and gradients of neighbouring values that differ by so many decades."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 128, generator=generator)
    scale = 10 ** (-decades * torch.rand(64, 128, generator=generator))
    return weight, [torch.randn(64, 128, generator=generator) * scale for _ in range(steps)]


def steps(states: str | None, decades: float = 0) -> Tensor:
    """Return the weight after all steps; None: of torch's AdamW."""
    start, grads = problem(decades)
    weight = torch.nn.Parameter(start)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW([weight], fused=True, **SETTINGS)
        if states is None
        else RangedAdamW([dict(params=[weight], **SETTINGS)], spec(states), {weight: 0})
    )
    for weight.grad in grads:
        optimizer.step()
    return weight.detach()


def distance(weight: Tensor, expected: Tensor) -> float:
    return float((weight - expected).norm() / expected.norm())


def test_the_formulas_are_those_of_torch(record_property):
    expected = steps(None)
    assert torch.equal(steps("fp32"), expected)
    for states, limit in (("bf16", 3e-3), ("int8", 0.03)):
        apart = distance(steps(states), expected)
        record_property(states, apart)
        assert 0 < apart < limit


@SLOW  # bitsandbytes is imported
@pytest.mark.engine("trl")
@pytest.mark.parametrize(("decades", "share"), [(0, 1.5), (3, 0.7), (6, 0.9)])
def test_8_bits_lose_no_more_than_those_of_bitsandbytes(decades, share, tmp_path, record_property):
    weight, grads = problem(decades)
    case = {"weight": weight, "grads": grads, "settings": SETTINGS}
    theirs = run_on_tensors("bitsandbytes_steps.py", case, tmp_path)
    expected = steps(None, decades)
    ratio = distance(steps("int8", decades), expected) / distance(theirs["weight"], expected)
    record_property("ratio", ratio)
    assert ratio < share
    assert torch.allclose(theirs["maps"][False], dynamic_map(False), rtol=1e-6, atol=0)
    positive = [each[each > 0][:126] for each in (theirs["maps"][True], dynamic_map(True))]
    assert torch.allclose(*positive, rtol=1e-6, atol=0)


def ends(path: str, case: Case, family: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the embedding and the head after three steps, where this stage has them."""
    case = replace(case, optim={"lr": 1e-3, "clip_grad": 0.0, **case.optim})
    worker = MegatronWorker(case.config(path))
    for seed in range(3):
        worker.forward_backward(my_rows(make_rows(MIXED, seed=seed, family=family)))
        worker.optim_step()
    worker.gather.finish()
    first, last = worker.chunks[0], worker.chunks[-1]
    embedding = (
        first.embedding.word_embeddings.weight.detach().clone() if first.pre_process else None
    )
    return embedding, last.head_weight.detach().clone() if last.post_process else None


FAMILIES = {
    "qwen3_vl": dict(tied=True, **SHALLOW),
    "gemma4": dict(family="gemma4", layers=2, vision_depth=1),
}


@pytest.mark.parametrize("states", quick(["int8"], ["bf16", "int8"]))
@pytest.mark.parametrize("family", quick(["qwen3_vl"], FAMILIES))
def test_copies_of_a_weight_stay_equal(family, states, pool, tiny):
    """The first and the last stage have the tied weight, and their replicas divide it."""
    case = replace(layout(pp=2, dp=2), optim={"states": states})
    found = pool.run(ends, case.world, tiny(**FAMILIES[family]), case, family)
    embeddings = [embedding for embedding, _ in found if embedding is not None]
    heads = [head for _, head in found if head is not None]
    assert len(embeddings) == len(heads) == 2
    assert all(torch.equal(each, embeddings[0]) for each in (*embeddings, *heads))


@FULL
@pytest.mark.parametrize("family", FAMILIES)
def test_replicas_round_as_one_does(family, pool, tiny):
    """Random numbers belong to places in the whole weight, not in a replica's part of it."""
    cases = [layout(dp=2), layout(dp=2, distributed_optimizer=False)]
    found = [
        pool.run(
            ends, 2, tiny(**FAMILIES[family]), replace(case, optim={"states": "bf16"}), family
        )[0]
        for case in cases
    ]
    assert all(map(torch.equal, *found))
