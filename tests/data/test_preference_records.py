# .venv/bin/python -m pytest tests/data/test_preference_records.py
"""Records with preferences in the formats of TRL, LLaMA-Factory, ms-swift and OpenRLHF, as rows."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.dataset import open_data
from megatron_vlm.data.records.keys import UnknownKeysError
from megatron_vlm.data.tokens.reader import Reader, make_encoder, make_reader
from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from tests.support.chats import TOOLS, call, data_uri, image, say, text
from tests.support.error_fields import raises

PICTURE = data_uri(64, 96)
ASK = [say("user", "What is it?")]
SEEN = [say("user", image(64, 96), text("What is it?"))]
TAGS = [{"from": "human", "value": "<image>What is it?"}]


@pytest.fixture(scope="module")
def readers(tiny):
    cfg = DataConfig(cache_dir=None, unknown_keys="refuse")
    sizes, encoder = read_sizes(tiny()), make_encoder(tiny(), cfg)
    return lambda kind: make_reader(encoder, cfg, sizes, None, kind)


def trained_text(reader: Reader, sample: Sample) -> str:
    return str(reader.encoder.renderer.tokenizer.decode(sample.ids_S[sample.trained_S].tolist()))


def prompt_of(sample: Sample) -> list[int]:
    return sample.ids_S[: int(np.flatnonzero(sample.trained_S)[0])].tolist()


def said(*texts: str) -> list[dict[str, Any]]:
    return [say("assistant", each) for each in texts]


# name: the record, the messages of its prompt, and the text of both answers
PAIRS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str, str]] = {
    "text": (
        {"prompt": "What is it?", "chosen": "a dog", "rejected": "a cat"},
        *(ASK, "a dog", "a cat"),
    ),
    "conversational": (
        {"prompt": ASK, "chosen": said("a dog"), "rejected": said("a cat")},
        *(ASK, "a dog", "a cat"),
    ),
    "text after a conversation": (
        {"prompt": ASK, "chosen": "a dog", "rejected": "a cat"},
        *(ASK, "a dog", "a cat"),
    ),
    "implicit": (
        {"chosen": ASK + said("a dog"), "rejected": ASK + said("a cat")},
        *(ASK, "a dog", "a cat"),
    ),
    "implicit, and the prompt as text": (
        {"prompt": "What is it?", "chosen": ASK + said("a dog"), "rejected": ASK + said("a cat")},
        *(ASK, "a dog", "a cat"),
    ),
    "implicit, and the prompt as messages": (
        {"prompt": ASK, "chosen": ASK + said("a dog"), "rejected": ASK + said("a cat")},
        *(ASK, "a dog", "a cat"),
    ),
    "a column of pictures": (
        {
            "prompt": [say("user", {"type": "image"}, text("What is it?"))],
            **{"chosen": said("a dog"), "rejected": said("a cat"), "images": [PICTURE]},
        },
        *(SEEN, "a dog", "a cat"),
    ),
    "implicit, and the prompt with the mark of a picture": (
        {
            "prompt": "<image>What is it?",
            "chosen": [say("user", "<image>What is it?"), *said("a dog")],
            "rejected": [say("user", "<image>\nWhat is it?"), *said("a cat")],
            "images": [PICTURE],
        },
        *(SEEN, "a dog", "a cat"),
    ),
    "implicit, and the prompt in parts": (
        {"prompt": SEEN, "chosen": SEEN + said("a dog"), "rejected": SEEN + said("a cat")},
        *(SEEN, "a dog", "a cat"),
    ),
    "implicit, a picture in the prompt": (
        {"chosen": SEEN + said("a dog"), "rejected": SEEN + said("a cat")},
        *(SEEN, "a dog", "a cat"),
    ),
    "several turns in an answer": (
        {
            "prompt": ASK,
            "chosen": [*said("Show me."), say("user", "Here."), *said("a dog")],
            "rejected": said("a cat"),
        },
        *(ASK, "Show me.<|im_end|>a dog", "a cat"),
    ),
    "turns that both answers begin with": (
        {
            "prompt": ASK,
            "chosen": [*said("Show me."), say("user", "Here."), *said("a dog")],
            "rejected": [*said("Show me."), say("user", "Here."), *said("a cat")],
        },
        *(ASK, "Show me.<|im_end|>a dog", "Show me.<|im_end|>a cat"),
    ),
    "implicit turns that both begin with are the prompt": (
        {
            "chosen": [*ASK, *said("Show me."), say("user", "Here."), *said("a dog")],
            "rejected": [*ASK, *said("Show me."), say("user", "Here."), *said("a cat")],
        },
        *([*ASK, *said("Show me."), say("user", "Here.")], "a dog", "a cat"),
    ),
    "LLaMA-Factory, sharegpt": (
        {
            "conversations": TAGS,
            "chosen": {"from": "gpt", "value": "a dog"},
            "rejected": {"from": "gpt", "value": "a cat"},
            "images": [PICTURE],
        },
        *(SEEN, "a dog", "a cat"),
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "What is it?", "input": "", "chosen": "a dog", "rejected": "a cat"},
        *(ASK, "a dog", "a cat"),
    ),
    "ms-swift, rejected_response": (
        {
            "messages": [say("user", "<image>What is it?"), *said("a dog")],
            **{"images": [PICTURE], "rejected_response": "a cat"},
        },
        *(SEEN, "a dog", "a cat"),
    ),
    "ms-swift, rejected_messages": (
        {"messages": ASK + said("a dog"), "rejected_messages": ASK + said("a cat")},
        *(ASK, "a dog", "a cat"),
    ),
    "ms-swift, query and response": (
        {"query": "What is it?", "response": "a dog", "rejected_response": "a cat"},
        *(ASK, "a dog", "a cat"),
    ),
    "messages as JSON in a cell": (
        {
            "prompt": "What is it?",
            "chosen": '[{"role": "assistant", "content": "a dog"}]',
            "rejected": '[{"role": "assistant", "content": "a cat"}]',
        },
        *(ASK, "a dog", "a cat"),
    ),
    "an answer that is JSON": (
        {"prompt": "What is it?", "chosen": '[{"bbox": [1]}]', "rejected": "[]"},
        *(ASK, '[{"bbox": [1]}]', "[]"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_two_rows(name, readers):
    """Both rows have the tokens of the whole chats, and only the answers are trained."""
    raw, prompt, chosen, rejected = PAIRS[name]
    reader, chats = readers("pair"), readers("chat")
    good, bad = reader.encode_example(raw, "x:1")
    assert (good.is_rejected, bad.is_rejected) == (False, True)
    assert trained_text(reader, good) == f"{chosen}<|im_end|>"
    assert trained_text(reader, bad) == f"{rejected}<|im_end|>"
    want = chats.encode({"messages": prompt}, "x:1", prompt=True)
    for row in (good, bad):
        assert prompt_of(row) == want.ids_S.tolist()
        assert row.image_grids == want.image_grids
    assert len(reader.rows(raw, "x:1", (good, bad))) == 2


def test_tools_and_the_system_message_are_in_both_rows(readers):
    raw = {
        "prompt": [say("system", "Be brief."), *ASK],
        "chosen": [say("assistant", "", tool_calls=[call("zoom", box=[1])])],
        "rejected": said("no"),
        "tools": TOOLS,
    }
    reader = readers("pair")
    good, bad = reader.encode_example(raw, "x:1")
    assert prompt_of(good) == prompt_of(bad)
    shown = reader.encoder.renderer.tokenizer.decode(prompt_of(good))
    assert "Be brief." in shown and "zoom" in shown
    assert "<tool_call>" in trained_text(reader, good)


def test_pictures_in_either_answer_belong_to_that_row(readers):
    raw = {
        "prompt": SEEN,
        "chosen": [*said("Another?"), say("user", image(64, 64, 1)), *said("a dog")],
        "rejected": said("no"),
    }
    good, bad = readers("pair").encode_example(raw, "x:1")
    assert (len(good.image_grids), len(bad.image_grids)) == (2, 1)


# name: the record, the text of the answer, and whether it is bad
LABELS: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "TRL": ({"prompt": ASK, "completion": said("a dog"), "label": True}, [("a dog", False)]),
    "TRL, text": ({"prompt": "What is it?", "completion": "a", "label": False}, [("a", True)]),
    "LLaMA-Factory": (
        {
            "conversations": [*TAGS, {"from": "gpt", "value": "a dog"}],
            **{"images": [PICTURE], "kto_tag": False},
        },
        [("a dog", True)],
    ),
    "ms-swift": (
        {"messages": ASK + said("x") + ASK + said("a dog"), "label": True},
        [("a dog", False)],
    ),
    "a pair": (
        {"prompt": ASK, "chosen": said("a dog"), "rejected": said("a cat")},
        [("a dog", False), ("a cat", True)],
    ),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_label_is_that_of_the_last_answer(name, readers):
    raw, want = LABELS[name]
    reader = readers("label")
    rows = reader.encode_example(raw, "x:1")
    found = [(trained_text(reader, row), row.is_rejected) for row in rows]
    assert found == [(f"{answer}<|im_end|>", is_bad) for answer, is_bad in want]


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "no rejected answer": ("pair", {"prompt": "a", "chosen": "b"}, {"key": "rejected"}),
    "no chosen answer": ("pair", {"messages": ASK, "rejected": "c"}, {"key": "chosen"}),
    "no question": ("pair", {"chosen": "b", "rejected": "c"}, {"key": "prompt"}),
    "the same answers": ("pair", {**GOOD, "rejected": "b"}, {"key": "rejected"}),
    "the same chats": (
        "pair",
        {"chosen": ASK + said("b"), "rejected": ASK + said("b")},
        {"key": "rejected"},
    ),
    "an empty answer": ("pair", {**GOOD, "chosen": " "}, {"key": "chosen"}),
    "an empty list": ("pair", {**GOOD, "rejected": []}, {"key": "rejected"}),
    "two chosen answers": ("pair", {**GOOD, "chosen_response": "b"}, {"key": "chosen"}),
    "a chat and an answer": ("pair", {**GOOD, "chosen": ASK + said("b")}, {"key": "chosen"}),
    "chats about something else": (
        "pair",
        {"chosen": ASK + said("b"), "rejected": [say("user", "x"), *said("c")]},
        {"key": "chosen"},
    ),
    "a prompt of another chat": (
        "pair",
        {"prompt": "x", "chosen": ASK + said("b"), "rejected": ASK + said("c")},
        {"key": "prompt"},
    ),
    **{
        f"a prompt with {name}": (
            "pair",
            {"prompt": [prompt], "chosen": SEEN + said("b"), "rejected": SEEN + said("c")},
            {"key": "prompt"},
        )
        for name, prompt in {
            "another part": say("user", text("x")),
            "another picture": say("user", {"type": "image", "image": "x.png"}),
            "a video": say("user", {"type": "video"}),
            "another call": say("assistant", "", tool_calls=[{"name": "f", "arguments": {}}]),
        }.items()
    },
    "no object": ("pair", [1], {}),
    "a number": ("pair", {**GOOD, "chosen": 3}, {"key": "chosen"}),
    "an unknown key": ("pair", {**GOOD, "imagse": ["x.png"]}, {}),
    "no label": ("label", {"prompt": "a", "completion": "b"}, {"key": "label"}),
    "a label as text": (
        "label",
        {"prompt": "a", "completion": "b", "label": "true"},
        {"key": "label", "found": "true"},
    ),
    "two labels": (
        "label",
        {"prompt": "a", "completion": "b", "label": True, "kto_tag": False},
        {"key": "label"},
    ),
    "a label of a question": ("label", {"messages": ASK, "label": True}, {}),
    "tokens": (
        "label",
        {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}], "label": True},
        {"key": "chunks"},
    ),
    "a weight": (
        "pair",
        {**GOOD, "prompt": ASK, "chosen": [say("assistant", "b", weight=0.5)]},
        {"key": "weight"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_ambiguous_is_refused_by_name(name, readers):
    kind, raw, fields = WRONG[name]
    with raises(UnknownKeysError if name == "an unknown key" else DataError, **fields) as caught:
        readers(kind).encode_example(raw, "x:1")
    assert str(caught.value).startswith("x:1")


def test_supervised_training_refuses_preferences_and_names_the_objective(readers):
    with pytest.raises(DataError, match=r"train\.objective=dpo"):
        readers("chat").encode_example(GOOD, "x:1")


def test_ignored_keys_are_absent(readers, tiny):
    reader = readers("pair")
    cfg = replace(reader.encoder.cfg, ignore_keys=("score",))
    reader = replace(reader, encoder=replace(reader.encoder, cfg=cfg))
    good, _ = reader.encode_example({**GOOD, "score": 3}, "x:1")
    assert trained_text(reader, good) == "b<|im_end|>"


@pytest.mark.parametrize(("labels", "word"), [((True, True), "good"), ((False, False), "bad")])
def test_labels_all_of_one_kind_are_refused(labels, word, tiny, tmp_path):
    records = [{"prompt": "a", "completion": f"b{n}", "label": x} for n, x in enumerate(labels)]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    cfg, sources = DataConfig(cache_dir=None), parse_sources(str(path), "data.train")
    arguments = (sources, "data.train", cfg, tiny(), read_sizes(tiny()))
    with pytest.raises(DataError, match=f"all 2 answers are labelled as {word}"):
        open_data(*arguments, kind="label")
    assert open_data(*arguments, kind="label", train=False).length == 2
