# .venv/bin/python -m pytest tests/serve/test_losses.py
"""Losses of the service, and the requests that it refuses.

Log-probs, sums and all gradients equal those of the official formulas, which are written in plain
PyTorch on Hugging Face's model.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import local_group
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.protocol.requests import read_forward_backward
from megatron_vlm.serve.requests_as_rows import FORMS, RowReader, metrics_of, options_of, read_batch
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import Ids, token_ids
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_logits
from tests.support.runs import call, collect_grads
from tests.support.serve_requests import (
    Chunks,
    around,
    ids_in,
    picture,
    request,
    row_of,
    targeted_log_probs,
)

VOCAB = 509  # at TP2 one row of the vocabulary is padding
# Log-probs are compared absolutely, sums and gradients relatively, in fp32 on the CPU. Measured
# worst: 4.8e-7, 5.1e-6 (a sum that nearly cancels) and 1.6e-6.
TOLERANCE = 1e-5

Inputs = Mapping[str, Tensor]
Formula = Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]


def cross_entropy(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    return -(p * given.get("weights", torch.ones_like(p))).sum()


def ratio(p: Tensor, given: Inputs) -> Tensor:
    return (p - given["logprobs"]).exp()


def importance_sampling(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    return -(ratio(p, given) * given["advantages"]).sum()


def bounds(options: Mapping[str, float], low: float, high: float) -> tuple[float, float]:
    high = options.get("clip_high_threshold", high)
    return options.get("clip_low_threshold", low), math.inf if high == NO_CLIP else high


def pessimistic(r: Tensor, given: Inputs, low: float, high: float) -> Tensor:
    gain = given["advantages"]
    return -torch.minimum(r * gain, r.clamp(low, high) * gain).sum()


def ppo(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    return pessimistic(ratio(p, given), given, *bounds(options, 0.8, 1.2))


def cispo(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    weight = ratio(p, given).clamp(*bounds(options, 0.0, 4.0)).detach()
    return -(weight * p * given["advantages"]).sum()


def dro(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    moved = p - given["logprobs"]
    return -(p * given["advantages"] - options.get("beta", 0.05) / 2 * moved**2).sum()


def gspo(p: Tensor, given: Inputs, options: Mapping[str, float]) -> Tensor:
    mask = given["sequence_ratio_mask"] != 0
    whole = (p - given["logprobs"])[mask].mean().exp() if mask.any() else torch.ones(())
    of_token = whole.detach() * (p - p.detach()).exp()
    return pessimistic(of_token, given, *bounds(options, 0.8, 1.2))


FORMULAS: dict[str, Formula] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
NO_CLIP = sys.float_info.max  # the value in many scripts
CASES: dict[str, tuple[str, dict[str, float], bool]] = {
    "cross_entropy": ("cross_entropy", {}, False),
    "cross_entropy-several": ("cross_entropy", {}, True),
    "importance_sampling": ("importance_sampling", {}, False),
    "ppo": ("ppo", {}, False),
    "ppo-clips": ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, False),
    "cispo": ("cispo", {}, False),
    "cispo-clips": ("cispo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1}, False),
    "dro": ("dro", {}, False),
    "dro-beta": ("dro", {"beta": 0.7}, False),
    "gspo": ("gspo", {"clip_low_threshold": 0.97, "clip_high_threshold": 1.03}, False),
    "ppo-open": ("ppo", {"clip_low_threshold": 0.97, "clip_high_threshold": NO_CLIP}, False),
    "cispo-open": ("cispo", {"clip_low_threshold": 0.97, "clip_high_threshold": NO_CLIP}, False),
    "gspo-open": ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": NO_CLIP}, False),
}
LAYOUTS = {
    "1x1": (layout(), {}),
    "tp2": (layout(tp=2), {"tied": True}),
    "pp2": (layout(pp=2), {}),
    "dp2": (layout(dp=2), {}),
    "experts": (layout(dp=2, ep=2), EXPERTS),
    "gemma4-tp2": (layout(tp=2), dict(family="gemma4", sliding_window=8, from_scratch=True)),
}


@cache
def prompts(ids: Ids) -> list[Chunks]:
    """Return text, pictures of odd sizes, and two pictures at once, not sorted by length."""
    one, two = picture(70, 45, 1), picture(130, 60, 2, "jpeg")
    return [
        [[1, 2, 3, 4, 5]],
        [[7], *around(one, ids), [8, 9, 10]],
        [[3, 3, 3]],
        [*around(two, ids), [11], *around(one, ids), [12, 13]],
        [[20, 21], [22, 23, 24, 25, 26]],
    ]


def data_for(path: str, several: bool) -> list[tuple[Chunks, dict[str, Any]]]:
    """Return data with old log-probs near the model's, so that clipping changes some tokens."""
    model, random = load_reference(path), np.random.default_rng(5)
    data: list[tuple[Chunks, dict[str, Any]]] = []
    for place, chunks in enumerate(prompts(ids_in(path))):
        row = row_of(chunks, path)
        shape = (len(row.ids_S), 1 + place % 3) if several else (len(row.ids_S),)
        targets = random.integers(0, VOCAB, shape)
        with torch.no_grad():
            now = targeted_log_probs(row_logits(model, row), targets).numpy()
        data.append(
            (
                chunks,
                {
                    "target_tokens": targets,
                    "weights": random.normal(size=shape) * (random.random(shape) > 0.3),
                    "advantages": random.normal(size=shape),
                    "logprobs": now + 0.2 * random.normal(size=shape),
                    "sequence_ratio_mask": (random.random(shape) > 0.4) * (place != 2) * 1.0,
                },
            )
        )
    return data


def needed(loss: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("target_tokens", *FORMS[loss].inputs)}


def of_request(worker: MegatronWorker, bodies: list[bytes]) -> list[Any]:
    """Return each request's sum, log-probs in the caller's order, gradients and metrics."""
    reader = RowReader(worker.cfg, str(worker.source.path), worker.source.sizes)
    group, results = local_group(worker), []
    for body in bodies:
        batch = read_batch(read_forward_backward(body), reader, worker.dims.dp)
        settings = dict(loss=batch.loss, divisor=1.0, return_per_token_outputs=True)
        done = group.forward_backward(batch.rows, **settings, **batch.options).result()
        alone = metrics_of(batch, group.forward(batch.rows).result())
        ordered = batch.in_datum_order(done.log_probs)
        results.append((done.loss, ordered, collect_grads(worker), alone, done.means))
    return results


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.full if name in ("pp2", "gemma4-tp2") else pytest.mark.slow
        )
        for name in LAYOUTS
    ],
)
def test_losses_are_the_official_ones(name, pool, tiny, record_property):
    case, sizes = LAYOUTS[name]
    path = tiny(vocab=VOCAB, **sizes)
    data = {several: data_for(path, several) for several in (False, True)}
    bodies = [
        request("m", 1, [(c, needed(loss, i)) for c, i in data[several]], loss, options)
        for loss, options, several in CASES.values()
    ]
    answers = pool.run(call, case.world, path, case, partial(of_request, bodies=bodies))[0]
    model, worst = load_reference(path), {}
    log_probs = {
        several: [
            targeted_log_probs(row_logits(model, row_of(chunks, path)), inputs["target_tokens"])
            for chunks, inputs in data[several]
        ]
        for several in data
    }
    for which, (loss, options, several), answer in zip(CASES, CASES.values(), answers, strict=True):
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for p, (_, inputs) in zip(log_probs[several], data[several], strict=True):
            values = {n: torch.tensor(v).float() for n, v in inputs.items() if n[0] != "t"}
            total = total + FORMULAS[loss](p, values, options).double()
        total.backward(retain_graph=True)
        total = float(total.detach())
        actual_sum, actual, grads, alone, means = answer
        expected = [p.detach().numpy() for p in log_probs[several]]
        assert [each.shape for each in actual] == [each.shape for each in expected]
        apart = max(float(abs(a - b).max()) for a, b in zip(actual, expected, strict=True))
        expected_grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        errors = [
            float((grads[n] - g).norm() / g.norm()) for n, g in expected_grads.items() if g.any()
        ]
        assert len(errors) > 20
        scale = max(abs(total), 1.0)
        worst[which] = (apart, abs(actual_sum - total) / scale, max(errors))
        assert abs(alone["loss:sum"] - total) / scale <= TOLERANCE
        assert alone.keys() - {"loss:sum"} <= {f"{each}:mean" for each in means}
        if "clip_fraction" in means and options:
            assert 0.05 < means["clip_fraction"] < 0.95  # clipping changes only some tokens
    record_property("worst", worst)
    assert max(max(each) for each in worst.values()) <= TOLERANCE, worst


def test_weights_are_1_where_none_are_given(pool, tiny):
    path = tiny(vocab=VOCAB)
    data = [(c, {"target_tokens": i["target_tokens"]}) for c, i in data_for(path, False)]
    bodies = [request("m", 1, data, "cross_entropy")]
    ((total, log_probs, _, alone, _),) = pool.run(
        call, 1, path, layout(), partial(of_request, bodies=bodies)
    )[0]
    assert abs(total + sum(float(each.sum()) for each in log_probs)) <= TOLERANCE * abs(total)
    assert abs(alone["loss:sum"] - total) <= TOLERANCE * abs(total)


@pytest.mark.parametrize(
    ("loss", "options", "fields"),
    [
        ("ppo", {"clip_low": 0.2}, {"allowed": ("clip_low_threshold", "clip_high_threshold")}),
        ("cross_entropy", {"beta": 1.0}, {"problem_has": "cross_entropy"}),
        ("ppo", {"clip_low_threshold": 1.0}, {"found": 1.0, "problem_has": "1.0 to 1.2"}),
        ("ppo", {"clip_high_threshold": "1.3"}, {"found": "1.3"}),
        ("ppo", {"clip_low_threshold": -math.inf}, {"found": -math.inf}),
        ("ppo", {"clip_high_threshold": -math.inf}, {"found": -math.inf}),
        ("dro", {"beta": math.inf}, {"found": math.inf}),
    ],
)
def test_unknown_options_are_refused(loss, options, fields):
    (name,) = options
    with raises(RequestError, key=f'loss_fn_config["{name}"]', **fields):
        options_of(loss, options)


def test_an_unknown_loss_is_refused():
    with raises(RequestError, key="loss_fn", found="stable_reinforce", allowed=tuple(FORMS)):
        options_of("stable_reinforce", {})


@pytest.mark.parametrize("bound", [math.inf, 1.7976931348623157e308, 1e39])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_bound_out_of_reach_clips_nothing(loss, bound):
    options = options_of(loss, {"clip_high_threshold": bound})
    objective = Objective.create(FORMS[loss].loss, options)
    ratios = torch.tensor([0.9, 1e3, 1e30])
    values = {name: torch.zeros(3) for name in objective.value_names}
    values |= {"advantages": torch.ones(3), "sequence_mask": torch.ones(3)}
    values["sequences"] = torch.arange(3.0)
    log_probs = ratios.log()
    loss_N, report = objective.of_tokens(log_probs, None, values)
    expected = ratios * (log_probs if loss == "cispo" else 1.0)
    assert not report["clip_fraction"].any()
    torch.testing.assert_close(-loss_N, expected, rtol=1e-5, atol=0)


def refusals(worker: MegatronWorker, bodies: list[bytes]) -> list[str]:
    reader = RowReader(worker.cfg, str(worker.source.path), worker.source.sizes)
    messages = []
    for body in bodies:
        try:
            read_batch(read_forward_backward(body), reader, 1)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_wrong_datums_are_refused_by_name(pool, tiny):
    path, good = tiny(vocab=VOCAB), [[1, 2, 3]]
    shown = picture(70, 45, 1)
    ids = {"target_tokens": [1, 2, 3]}
    sampled = {**ids, "advantages": [1.0] * 3}
    wrong = {
        "data[1].model_input.chunks[0]: tokens[1]=509": ([[1, VOCAB, 2]], ids, "cross_entropy"),
        "data[1]: targets[2,0]=600": (good, {"target_tokens": [1, 2, 600]}, "cross_entropy"),
        '"target_tokens"] has 3 entries, and model_input has 4 tokens': (
            [[1, 2, 3, 4]],
            ids,
            "cross_entropy",
        ),
        'data[1].loss_fn_inputs["logprobs"]': (good, sampled, "ppo"),
        'data[1].loss_fn_inputs["advantages"]': (good, sampled, "cross_entropy"),
        "cannot be decoded": (
            [*around(replace(shown, data=shown.data[:200]))],
            {"target_tokens": [0] * 8},
            "cross_entropy",
        ),
        "data[1]: ": ([[1, token_ids().image, 2]], ids, "cross_entropy"),  # no picture
    }
    first = (good, {"target_tokens": [1, 2, 3]})
    bodies = []
    for chunks, inputs, loss in wrong.values():
        extra = {n: [0.0] * 3 for n in FORMS[loss].inputs if loss != "cross_entropy"}
        bodies.append(request("m", 1, [(first[0], {**first[1], **extra}), (chunks, inputs)], loss))
    messages = pool.run(call, 1, path, layout(), partial(refusals, bodies=bodies))[0]
    assert len(messages) == len(wrong)
    for expected, error in zip(wrong, messages, strict=True):
        assert expected in error and error.split(":")[0] in ("RequestError", "DataError"), (
            expected,
            error,
        )
