# .venv/bin/python -m pytest tests/model/test_top_log_probs.py
"""The likeliest tokens at each place are those of Hugging Face's model; log-probs of samples at
their own temperature; seeds of single prompts."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.model import log_probs as head
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.reference import load_reference, row_logits
from tests.support.runs import call
from tests.support.suites import full, slow

VOCAB = 509  # at TP2 one row of the vocabulary is padding
TOLERANCE = 5e-6  # absolute, fp32 on the CPU; measured worst: 9.6e-7
COUNT = 7

LAYOUTS = {
    "1x1": (layout(), {}),
    "tp2": (layout(tp=2), {"tied": True}),
    "pp2": (layout(pp=2), {}),
    "dp2": (layout(dp=2), {}),
    "experts": (layout(dp=2, ep=2), EXPERTS),
}


def asked_rows() -> list[Row]:
    """Rows that ask at some of their places, an odd number of them."""
    found = []
    for place, row in enumerate(make_rows(MIXED, VOCAB)[:5]):
        targets = torch.zeros_like(row.ids_S)
        targets[place::3] = IGNORE
        none_S = torch.full_like(row.labels_S, IGNORE)
        found.append(replace(row, labels_S=none_S, targets=targets, values_S={}))
    return found


def likeliest(worker: MegatronWorker, rows: list[Row], temperature: float, logits: int) -> Any:
    with mock.patch.object(head, "LOGITS_AT_ONCE", logits):
        return local_group(worker).likeliest(rows, COUNT, temperature).result()


@pytest.mark.parametrize("name", [name if name == "tp2" else slow(name) for name in LAYOUTS])
@pytest.mark.parametrize(("temperature", "logits"), [full(1.0, 2**26), (0.7, 1000)])
def test_the_likeliest_are_those_of_hugging_face(
    name, temperature, logits, pool, tiny, record_property
):
    case, sizes = LAYOUTS[name]
    path, rows = tiny(vocab=VOCAB, **sizes), asked_rows()
    ask = partial(likeliest, rows=rows, temperature=temperature, logits=logits)
    found = pool.run(call, case.world, path, case, ask)[0]
    model, worst = load_reference(path), 0.0
    assert len(found) == len(rows)
    for row, ours in zip(rows, found, strict=True):
        assert row.targets is not None
        asked = row.targets != IGNORE
        with torch.no_grad():
            log_probs = (row_logits(model, row).float() / temperature).log_softmax(-1)
        want = log_probs.topk(COUNT)
        assert not ours[~asked].any()
        ids, values = ours[asked].unbind(-1)
        # Of two that are as likely, either may come first: what counts is how likely they are.
        picked = log_probs[asked].gather(1, ids.long())
        worst = max(worst, float((values - want.values[asked]).abs().max()))
        worst = max(worst, float((values - picked).abs().max()))
        assert (ids[:, 0] == want.indices[asked][:, 0]).float().mean() > 0.95
        assert all(len(set(row)) == COUNT for row in ids.tolist())
    record_property("worst", worst)
    assert worst <= TOLERANCE


def scored(worker: MegatronWorker, rows: list[Row], temperature: float) -> Any:
    with mock.patch.object(head, "LOGITS_AT_ONCE", 1000):
        return local_group(worker).forward(rows, temperature).result()


@pytest.mark.parametrize("name", [name if name == "tp2" else slow(name) for name in LAYOUTS])
@pytest.mark.parametrize("temperature", [full(0.3), 1.7])
def test_scores_at_a_temperature_are_those_of_hugging_face(name, temperature, pool, tiny):
    """Of the rows' own next tokens. Measured: 9.5e-7."""
    case, sizes = LAYOUTS[name]
    path = tiny(vocab=VOCAB, **sizes)
    rows = [row for row in make_rows(MIXED, VOCAB)[:5] if (row.labels_S != IGNORE).any()]
    ask = partial(scored, rows=rows, temperature=temperature)
    found = pool.run(call, case.world, path, case, ask)[0]
    model, worst = load_reference(path), 0.0
    assert len(found) == len(rows) > 2
    for row, ours in zip(rows, found, strict=True):
        with torch.no_grad():
            log_probs = (row_logits(model, row).float() / temperature).log_softmax(-1)
        want = torch.zeros(len(row.ids_S))
        want[1:] = log_probs[:-1].gather(1, row.ids_S[1:, None])[:, 0]
        want[row.labels_S == IGNORE] = 0
        worst = max(worst, float((ours - want).abs().max()))
    assert worst <= TOLERANCE


REFUSED: dict[str, tuple[Any, ...]] = {
    "forward: temperature=0.0; give more than 0": ("forward", 0.0),
    "forward: temperature=-1.0; give more than 0": ("forward", -1.0),
    "forward: temperature=inf; give more than 0": ("forward", float("inf")),
    "likeliest: temperature=0.0; give more than 0": ("likeliest", 1, 0.0),
    f"likeliest: count=0; give from 1 to {VOCAB}": ("likeliest", 0),
    f"likeliest: count={VOCAB + 1}; give from 1 to {VOCAB}": ("likeliest", VOCAB + 1),
}


def refused(worker: MegatronWorker) -> list[str]:
    said = []
    for name, *arguments in REFUSED.values():
        with pytest.raises(ConfigError) as error:
            getattr(worker, name)(asked_rows(), *arguments)
        said.append(str(error.value))
    return said


def test_what_cannot_be_is_refused(pool, tiny):
    assert pool.run(call, 1, tiny(vocab=VOCAB), layout(), refused) == [list(REFUSED)]


def tempered(worker: MegatronWorker, rows: list[Row]) -> Any:
    group = local_group(worker)
    settings = SamplingSettings(5, temperature=0.6, top_k=50, tempered=True)
    seeds = [10, 2**61, 7]
    found = group.sample(rows, settings, n=2, seed=seeds).result()
    alone = [
        group.sample([rows[place]], settings, n=1, seed=[seeds[place] + k]).result()[0][0]
        for place in range(3)
        for k in range(2)
    ]
    greedy = replace(settings, temperature=0.0)
    plain = replace(greedy, tempered=False)
    same = group.sample(rows, greedy, seed=seeds).result() == group.sample(rows, plain).result()
    return [[(one.ids, one.log_probs) for one in each] for each in found], alone, same


@pytest.mark.parametrize("name", [slow("1x1"), full("tp2"), slow("dp2")])
def test_samples_at_their_own_temperature(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    path, rows = tiny(vocab=VOCAB, **sizes), make_rows(MIXED, VOCAB)[:3]
    found, alone, greedy_is_plain = pool.run(
        call, case.world, path, case, partial(tempered, rows=rows)
    )[0]
    model = load_reference(path)
    for row, answers in zip(rows, found, strict=True):
        assert answers[0] != answers[1]
        for ids, log_probs in answers:
            whole = replace(row, ids_S=torch.cat([row.ids_S, torch.tensor(ids)]))
            with torch.no_grad():
                logits = row_logits(model, whole)[len(row.ids_S) - 1 : -1].float()
            want = (logits / 0.6).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert float((want - torch.tensor(log_probs)).abs().max()) <= TOLERANCE
    assert [one.ids for one in alone] == [ids for answers in found for ids, _ in answers]
    assert greedy_is_plain
