# .venv/bin/python -m pytest tests/package/test_errors.py
"""Errors hold their facts in fields, and one function makes the sentence."""

import pickle

import pytest

from megatron_vlm.errors import ConfigError, DataError, render
from tests.support.error_messages import (
    GOLDEN,
    all_messages,
    calls,
    error_classes,
    is_without_fields,
    trees,
)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"problem": "exceeds train.steps=5", "key": "optim.warmup_steps", "found": 9},
            "optim.warmup_steps=9 exceeds train.steps=5",
        ),
        (
            {"problem": ": the model has no experts", "key": "parallel.ep", "found": 2},
            "parallel.ep=2: the model has no experts",
        ),
        (
            {"key": "weight", "place": "a.jsonl line 3", "found": -1, "allowed": range(0, 3)},
            "a.jsonl line 3: weight=-1; give from 0 to 2",
        ),
        ({"problem": "is empty", "place": "a.jsonl"}, "a.jsonl: is empty"),
        ({"key": "x", "found": True, "allowed": ("a", "b", "c")}, "x=true; give a, b or c"),
        ({"key": "x", "found": None, "allowed": {2, 1}}, "x=null; give 1 or 2"),
        ({"key": "x", "found": "two words"}, "x='two words'"),
        ({"key": "x", "found": ["a", 1, False]}, "x=[a,1,false]"),
        ({"key": "x", "found": "\x1b[2J"}, r"x='\x1b[2J'"),
    ],
)
def test_fields_become_a_sentence(fields, sentence):
    assert render(**fields) == sentence
    assert str(DataError(**fields)) == sentence


def test_an_error_is_the_same_in_another_process():
    error = ConfigError("is large", key="train.steps", found=7, allowed=range(1, 5))
    for original in (error, ConfigError("is not set", key="run")):
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is ConfigError and copy.fields() == original.fields()
        assert str(copy) == str(original)


def test_a_wider_place_stands_before_the_narrow_one():
    error = DataError("is empty", place="line 3", key="text").within("rank 1")
    assert error.key == "text" and str(error) == "rank 1: line 3: text is empty"


def test_messages_are_those_that_were_read():
    """After an intended change of a message, run
    `.venv/bin/python -m tests.support.error_messages` and read the difference."""
    assert all_messages() == GOLDEN.read_text()


def test_every_message_names_its_place():
    """Callers can read the key or the place of every error. Errors about records get their place
    where the record is opened, which tests/package/test_hostile.py checks of each."""
    modules = trees()
    classes = error_classes(modules)
    bare = {
        f"{name}:{call.lineno}"
        for name, tree in modules.items()
        for _, _, call in calls(tree, classes)
        if is_without_fields(call) and not name.startswith("data/records/")
    }
    assert not bare, sorted(bare)
