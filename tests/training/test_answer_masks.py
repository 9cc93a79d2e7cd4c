# .venv/bin/python -m pytest tests/training/test_answer_masks.py
"""Answers that are held to a grammar: they are valid at each layout, with log-probs of `forward`;
no other answer changes, and a mask depends on its own answer alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import jsonschema
import pytest

from megatron_vlm.controller.rank_worker import RankWorker
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row, continue_row
from megatron_vlm.errors import DataError
from megatron_vlm.training.generate import Decoder
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.runs import Case, call
from tests.support.suites import quick

# Log-probs around -6 in fp32 on the CPU. Measured worst case: 1.4e-6.
TOLERANCE = 1e-5
SCHEMAS = 200
LAYOUTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "1x1": (layout(), SHALLOW),
    "tp2": (layout(tp=2), SHALLOW | {"vocab": 509}),
    "pp2": (layout(pp=2), SHALLOW),
    "pp2x2": (layout(pp=2, virtual_stages=2), {}),
}


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose texts, lists and numbers are short."""
    leaves = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const"]
    kind = rng.choice(leaves if depth > 2 else [*leaves, *["object", "array", "anyOf"] * 3])
    inner = partial(random_schema, rng, depth + 1)
    names = [rng.choice("abcdefgh") + str(n) for n in range(rng.randint(1, 3))]
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "string": lambda: {"type": "string", "maxLength": rng.randint(0, 6)},
        "pattern": lambda: {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{2,4}$", "^[0-9]{1,3}-?x$", "^(é|ß)$"]),
        },
        "integer": lambda: {
            "type": "integer",
            "minimum": rng.randint(-9, 0),
            "maximum": rng.randint(1, 99),
        },
        "number": lambda: {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
        "enum": lambda: {"enum": rng.sample([1, "two", None, [3], {"f": 4}, "</x>", 'a"b'], 3)},
        "const": lambda: {"const": rng.choice(["left", 7, False, "ü\n"])},
        "object": lambda: {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        },
        "array": lambda: {
            "type": "array",
            "items": inner(),
            "minItems": rng.randint(0, 1),
            "maxItems": rng.randint(1, 3),
        },
        "anyOf": lambda: {"anyOf": [inner(), inner()]},
    }
    return made[kind]()


def drawn(
    worker: MegatronWorker, asks: list[tuple[int, Row, SamplingSettings]]
) -> dict[int, Completion | str]:
    """Return the answer to each prompt, or why there is none. Its number is its seed."""
    decoder = Decoder(worker.stage, 16, RankWorker(worker).texts)
    decoder.join([decoder.prompt(number, row, each, 1, number) for number, row, each in asks])
    answers: dict[int, Completion | str] = {}
    while decoder.prompts:
        for prompt in decoder.advance(3):
            try:
                answers[prompt.number] = prompt.draws[0].completion
            except DataError as error:
                answers[prompt.number] = str(error)
    return answers


# The ranks may get what has passed the service's check: a grammar without an answer, or with too
# many of them, and one that the tokens of the stop are a part of.
BAD = [
    ("json", '{"type": "colour"}'),
    ("choice", json.dumps([f"{number:04}" for number in range(3000)])),
    ("grammar", 'start: "a" <[9999999]>'),
]


def held_to_schemas(numbers: range, worker: MegatronWorker) -> tuple[list[str], float, bool]:
    """Return the texts of answers that are held to schemas, the largest difference between their
    log-probs and those of `forward`, and whether answers are the same with others beside them."""
    texts, rows = RankWorker(worker).texts, make_rows(MIXED, worker.stage.sizes.text.vocab)
    end = texts.masks.tokenizer.convert_tokens_to_ids("<|im_end|>")
    free = SamplingSettings(40, stop_ids=(end,))
    asks = []
    for number in numbers:
        grammar = "json", json.dumps(random_schema(Random(number)))
        settings = SamplingSettings(600, 1.0, number % 2 * 50, stop_ids=(end,), grammar=grammar)
        asks.append((number, rows[number % len(rows)], settings))
    others = [(1000 + place, row, free) for place, row in enumerate(rows)]
    bad = [(2000 + place, rows[0], replace(free, grammar=each)) for place, each in enumerate(BAD)]
    together = drawn(worker, [*others, *bad, *asks])
    alone = drawn(worker, others) | drawn(worker, asks[:1])
    assert all("needs too much work" in str(together[number]) for number, _, _ in bad)
    answers = [(row, together[number]) for number, row, _ in asks]
    assert all(each.ended == "stop" for _, each in answers), "a longer answer is needed"
    scored = worker.forward([continue_row(row, each.ids) for row, each in answers])
    worst = max(
        float((log_probs_S[-len(each.ids) :] - log_probs_S.new_tensor(each.log_probs)).abs().max())
        for (_, each), log_probs_S in zip(answers, scored, strict=True)
    )
    said = [texts.shown(each.ids[:-1]) for _, each in answers]
    is_same = all(together[number].ids == each.ids for number, each in alone.items())
    return said, worst, is_same


@pytest.mark.parametrize("name", quick(["1x1", "tp2", "pp2"], LAYOUTS))
def test_answers_are_valid_and_change_no_other(name, pool, tiny, record_property):
    case, sizes = LAYOUTS[name]
    place = list(LAYOUTS).index(name) % 3
    numbers = range(place * SCHEMAS // 3, (place + 1) * SCHEMAS // 3)
    work = partial(held_to_schemas, numbers)
    for said, worst, is_same in pool.run(call, case.world, tiny(**sizes), case, work):
        for number, text in zip(numbers, said, strict=True):
            jsonschema.validate(json.loads(text), random_schema(Random(number)))
        assert len(set(said)) > len(said) / 2
        record_property("log_probs", worst)
        assert worst <= TOLERANCE and is_same
