# .venv/bin/python -m pytest tests/training/test_sampling.py
"""Sampling draws from softmax(logits / temperature), the same ids at every layout."""

import pytest
import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.training.generate import generate
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.reference import load_reference, row_logits
from tests.support.runs import Case, call

DRAWS = 4000
VOCAB = 509  # at TP2 one row of the vocabulary is padding
ROWS = make_rows(MIXED, VOCAB)
FULL = pytest.mark.full


def draw(path: str, case: Case, prompts: list[Row], options: dict) -> list[list[int]]:
    return generate(MegatronWorker(case.config(path)).stage, prompts, 1, (), **options)


def placeholders(model: torch.nn.Module) -> list[int]:
    return [model.config.image_token_id, model.config.video_token_id]


@pytest.fixture(scope="module")
def sharp(tiny, tmp_path_factory) -> str:
    """Return a checkpoint with a head times 8: its next token is neither certain nor uniform.

    After ROWS[2], image and video placeholders are as likely as the most likely token.
    """
    path = tmp_path_factory.mktemp("sharp") / "model"
    from tests.training.test_decode import edited

    def sharpen(model: torch.nn.Module) -> None:
        model.lm_head.weight *= 8
        best = row_logits(model, ROWS[2])[-1].argmax()
        model.lm_head.weight[placeholders(model)] = model.lm_head.weight[best].clone()

    return edited(tiny(vocab=VOCAB, **SHALLOW), path, sharpen)


@pytest.mark.parametrize(("temperature", "tp"), [pytest.param(1.0, 2, marks=FULL), (0.5, 1)])
def test_frequencies_are_the_probabilities(temperature, tp, pool, sharp, record_property):
    prompt = ROWS[2]
    reference = load_reference(sharp)
    with torch.no_grad():
        logits_V = row_logits(reference, prompt)[-1]
    never = placeholders(reference)
    assert logits_V.softmax(-1)[never].min() > 0.02
    logits_V[never] = -torch.inf
    expected_V = DRAWS * (logits_V.double() / temperature).softmax(-1)
    options = dict(batch_rows=500, temperature=temperature, seeds=range(DRAWS))
    answers = pool.run(draw, tp, sharp, layout(tp=tp), [prompt] * DRAWS, options)
    assert answers == [answers[0]] * tp
    found_V = torch.bincount(torch.tensor(answers[0]).flatten(), minlength=VOCAB).double()
    error = chi_square_excess(found_V, expected_V)
    record_property("standard_deviations", error)
    assert abs(error) < 4 and not found_V[never].any()


def chi_square_excess(found_V: Tensor, expected_V: Tensor) -> float:
    """Return the deviation of Pearson's sum, in standard deviations; rare ids count as one."""
    common_V = expected_V >= 5
    assert int(common_V.sum()) >= 10
    pairs = [
        torch.cat([counts_V[common_V], counts_V[~common_V].sum()[None]])
        for counts_V in (found_V, expected_V)
    ]
    degrees = len(pairs[0]) - 1
    value = float(((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum())
    return (value - degrees) / (2 * degrees) ** 0.5


def draws(path: str, case: Case) -> list[list[list[int]]]:
    """Return the samples of the same prompts and seeds, drawn in several ways."""
    worker = MegatronWorker(case.config(path))

    def ask(prompts: list[Row], seeds: list[int], **more) -> list[list[int]]:
        options = {"temperature": 1.0, "seeds": seeds, **more}
        return generate(worker.stage, prompts, 6, (), **options)

    seeds = [3, 1, 4, 1, 5, 9, 2, 6]
    return [
        ask(ROWS, seeds),
        ask(ROWS, seeds, batch_rows=3),
        ask(ROWS[::-1], seeds[::-1])[::-1],
        ask([ROWS[2]] * 3, [7, 7, 8]),
        ask(ROWS, seeds, temperature=1e-6),
        ask(ROWS, seeds, temperature=1e6),
        generate(worker.stage, ROWS, 6, ()),
    ]


@FULL
def test_a_sample_depends_on_prompt_and_seed_alone(pool, sharp):
    samples = pool.run(draws, 1, sharp, layout())[0]
    whole, in_batches, turned, same_prompt, cold, hot, greedy = samples
    assert whole == in_batches == turned
    assert same_prompt[0] == same_prompt[1] != same_prompt[2]
    assert cold == greedy != whole
    assert all(len(set(ids)) > 3 for ids in hot)  # ids are equally likely, and each turn draws anew
    assert pool.run(draws, 4, sharp, layout(tp=2, pp=2)) == [samples] * 4


def _refused(worker: MegatronWorker) -> list[ConfigError]:
    messages = []
    for options in (
        {"temperature": -1.0},
        {"temperature": 1e-39},  # logits divided by it are infinite
        {"temperature": 1.0},
        {"temperature": 1.0, "seeds": [1]},
    ):
        with pytest.raises(ConfigError) as error:
            generate(worker.stage, ROWS[2:4], 1, (), **options)
        messages.append(error.value)
    return messages


def test_what_is_refused(pool, sharp):
    refusals = pool.run(call, 1, sharp, layout(), _refused)[0]
    assert {(error.place, error.key) for error in refusals} == {("sampling", "temperature")}
    assert [error.found for error in refusals] == [-1.0, 1e-39, 1.0, 1.0]
    negative, cold, without, few = refusals
    assert "1e-06" in negative.allowed and cold.allowed == negative.allowed
    assert "2 prompts" in without.problem and "2 prompts" in few.problem
    assert " 1 seeds" in few.problem and " no seeds" in without.problem
