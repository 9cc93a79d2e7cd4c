# .venv/bin/python -m pytest tests/data/test_qwen3_5_templates.py
"""Tests of the chat templates of Qwen3.5, 3.6 and 3.8: tokens equal transformers', what a prompt
already has of an answer is not trained, and what a template refuses is an error of the record."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.turn_tokens import TurnEncoder
from megatron_vlm.run.evaluation.held_out_sets import question_of
from tests.data.test_chat_template import trained_text
from tests.support.chats import (
    FAMILY_CHATS,
    check_continued,
    hf_encode,
    hf_processor,
    image,
    say,
    think,
)
from tests.support.error_fields import raises
from tests.support.sets import open_set

TEMPLATES = Path(__file__).parents[1] / "support" / "templates"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Return `make`: make("qwen3_6") is a tiny checkpoint with that template."""
    root = tmp_path_factory.mktemp("templates")

    def make(name):
        path = root / name
        if not path.exists():
            shutil.copytree(tiny(), path)
            shutil.copyfile(TEMPLATES / f"{name}.jinja", path / "chat_template.jinja")
            join_newlines(path / "tokenizer.json")
        return str(path)

    return make


def join_newlines(path):
    """Make two newlines one token, as in the released tokenizers, instead of the last merge."""
    tokenizer = json.loads(path.read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    newline = "\u010a"  # a newline in such a vocabulary
    vocab[2 * newline] = vocab.pop("".join(merges.pop()))
    merges.insert(0, [newline, newline])
    path.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def reader(folder):
    def make(name, **options):
        cfg = DataConfig(**options)
        path = folder(name)
        encoder = make_encoder(path, cfg)
        return make_reader(encoder, cfg, read_sizes(path), "")

    return make


VARIANTS = [
    ("qwen3_5", {}),
    ("qwen3_5", {"enable_thinking": True}),
    ("qwen3_5", {"enable_thinking": False}),
    ("qwen3_5_small", {}),
    ("qwen3_5_small", {"enable_thinking": True}),
    ("qwen3_6", {}),
    ("qwen3_6", {"preserve_thinking": True}),
    ("qwen3_6", {"enable_thinking": False, "preserve_thinking": True}),
    ("qwen3_8", {}),
    ("qwen3_8", {"reasoning_effort": "low", "preserve_thinking": False}),
    ("qwen3_8", {"reasoning_effort": "medium"}),
    ("qwen3_8", {"enable_thinking": False}),
]


@pytest.mark.full
@pytest.mark.rotate(4)
@pytest.mark.parametrize(("name", "variables"), VARIANTS)
def test_ids_equal_transformers(name, variables, folder, reader):
    ours = reader(name, template_kwargs=variables)
    processor = hf_processor(folder(name))
    assert len(FAMILY_CHATS) >= 40
    for title, chat in FAMILY_CHATS.items():
        for prompt in (False, True):
            expected = hf_encode(processor, chat, add_generation_prompt=prompt, **variables)
            sample = ours.encode(chat, "x:1", prompt=prompt)
            assert sample.ids_S.tolist() == expected["input_ids"][0].tolist(), title
            grids = expected.get("image_grid_thw", torch.zeros(0, 3))
            assert [list(grid) for grid in sample.image_grids] == grids.tolist(), title
            assert sample.trained_S.any() != prompt
        check_continued(ours, chat, partial(hf_encode, processor, chat, **variables))


ASK, PLAIN = [say("user", "a")], {"messages": [say("user", "a"), say("assistant", "b")]}
THINKS = {"messages": [*ASK, think("r", "b")]}
END = "<|im_end|>"
THINKING, QUIET = {"enable_thinking": True}, {"enable_thinking": False}
TRAINED = [
    # The prompt ends in <think> and a newline, and the answer goes on.
    ("qwen3_5", {}, THINKS, [f"r\n</think>\n\nb{END}"]),
    ("qwen3_6", {}, THINKS, [f"r\n</think>\n\nb{END}"]),
    ("qwen3_8", {}, THINKS, [f"r\n</think>\n\nb{END}"]),
    ("qwen3_5_small", THINKING, THINKS, [f"r\n</think>\n\nb{END}"]),
    # An empty block has one token for its two newlines, which no prompt has.
    ("qwen3_5", {}, PLAIN, [f"\n\n</think>\n\nb{END}"]),
    ("qwen3_8", {}, PLAIN, [f"\n\n</think>\n\nb{END}"]),
    # The prompt has all of the block.
    ("qwen3_5", QUIET, PLAIN, [f"b{END}"]),
    ("qwen3_6", QUIET, PLAIN, [f"b{END}"]),
    ("qwen3_8", QUIET, PLAIN, [f"b{END}"]),
    ("qwen3_5_small", {}, PLAIN, [f"b{END}"]),
    ("qwen3_5_small", {}, THINKS, [f"\nr\n</think>\n\nb{END}"]),
]


@pytest.mark.parametrize(("name", "variables", "chat", "expected"), TRAINED)
def test_what_the_prompt_has_is_not_trained(name, variables, chat, expected, reader):
    """Where the answer goes on as its prompt asks, its first trained token follows the prompt."""
    ours = reader(name, template_kwargs=variables)
    sample = ours.encode(chat, "x:1")
    assert trained_text(ours, sample) == expected
    prompt = ours.encode({"messages": ASK}, "x:1", prompt=True).ids_S.tolist()
    first = int(sample.trained_S.nonzero()[0][0])
    whole = sample.ids_S.tolist()
    assert whole[:first] == prompt[:first] and whole[first:] != prompt[first:]
    assert (first == len(prompt)) == (not expected[0].startswith("\n"))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_6", "qwen3_8"])
def test_what_a_template_refuses_is_a_wrong_record(name, reader):
    ours = reader(name)
    answer = say("assistant", "b")
    for messages, problem, remedy in (
        ([say("system", image(64, 64)), *ASK, answer], "cannot contain images", "user"),
        ([say("system", "a"), answer], "No user query found", "a message of the user"),
        ([say("user", "<tool_response>\n3\n</tool_response>"), answer], "No user", "of a tool"),
    ):
        with raises(DataError, place="x:1", problem_has=problem, remedy_has=remedy):
            ours.encode({"messages": messages}, "x:1")
    with raises(DataError, place="x:1: message 1", key="role", found="system"):
        ours.encode({"messages": [*ASK, say("system", "a"), answer]}, "x:1")


def test_a_blank_system_message_may_be_left_out(reader):
    blank = {"messages": [say("system", " "), *PLAIN["messages"]]}
    ours = reader("qwen3_8", template_kwargs=QUIET)
    assert ours.encode(blank, "x:1").ids_S.tolist() == ours.encode(PLAIN, "x:1").ids_S.tolist()


@pytest.mark.parametrize(
    ("name", "variables", "said"),
    [
        ("qwen3_8", {"reasoning_effort": "high"}, "Supported types are xhigh"),
        ("qwen3_8", {"reasoning_effort": 3}, "Supported types are xhigh"),
        ("qwen3_6", {"reasoning_effort": "low"}, "does not read it"),
        ("qwen3_5", {"preserve_thinking": True}, "does not read it"),
        ("qwen3_5", {"enable_thinking": "no"}, ""),
        ("qwen3_6", {"preserve_thinking": None}, ""),
    ],
)
def test_wrong_variables_are_errors_of_the_configuration(name, variables, said, reader):
    ((key, found),) = variables.items()
    key = f"data.template_kwargs.{key}"
    with raises(ConfigError, key=key, found=found, problem_has=said):
        reader(name, template_kwargs=THINKING | variables)


def test_thoughts_in_the_text_are_thoughts(reader):
    """The template of Qwen3.8 does not take them out of the text."""
    text = "<think>\nr\n</think>\n\nb"
    for name in ("qwen3_5", "qwen3_6", "qwen3_8"):
        ours = reader(name)
        for answer in (say("assistant", text), say("assistant", {"type": "text", "text": text})):
            sample = ours.encode({"messages": [*ASK, answer]}, "x:1")
            assert sample.ids_S.tolist() == ours.encode(THINKS, "x:1").ids_S.tolist()


MIXED = [PLAIN, THINKS, {"messages": [*ASK, say("assistant", "c")]}]


@pytest.mark.parametrize(
    ("name", "variables", "count", "remedy"),
    [
        ("qwen3_5", {}, 2, "{enable_thinking: false}"),
        ("qwen3_6", {"preserve_thinking": True}, 2, "{enable_thinking: false}"),
        ("qwen3_8", {"reasoning_effort": "low"}, 2, "{enable_thinking: false}"),
        ("qwen3_5_small", {}, 1, "{enable_thinking: true}"),
        ("qwen3_5", THINKING, 0, ""),
        ("qwen3_5", QUIET, 0, ""),
        ("qwen3_5_small", QUIET, 0, ""),
    ],
)
def test_answers_that_no_prompt_asks_for_are_said(name, variables, count, remedy, folder, tmp_path):
    """The remark is the same when the cache has the text."""
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, MIXED)))
    for _ in range(2):
        data = open_set(str(path), folder(name), tmp_path / "cache", template_kwargs=variables)
        lines = Remarks.from_data(data, "data.train", DataConfig()).lines
        assert len(lines) == bool(count)
        for line in lines:
            assert f"data.train: {count} of 3 records have" in line
            assert f"data.template_kwargs={remedy}" in line


def test_a_record_with_reasoning_has_no_remark(reader):
    """A block in a question, or one that is not trained, is nobody's answer."""
    ours = reader("qwen3_5")
    block = "<think>\n\n</think>\n\n"
    quoted = {"messages": [say("user", block), think("r", "b")]}
    muted = {"messages": [*ASK, say("assistant", "b", weight=0), *ASK, think("r", "b")]}
    for chat, contrary in ((quoted, False), (muted, False), (THINKS, False), (PLAIN, True)):
        sample = ours.encode(chat, "x:1")
        renderer = ours.encoder.renderer
        assert renderer.is_contrary(sample.ids_S, sample.trained_S) == contrary


DRAWN = ("r\n</think>\n\nb", "late\n</think>\n\nd")  # what a model says after an open block
TURNS = [
    ("qwen3_5", {}, say("tool", "3")),
    ("qwen3_6", {"preserve_thinking": True}, say("user", "and?")),
    ("qwen3_8", {}, say("user", image(64, 64))),
    ("qwen3_8", {"reasoning_effort": "medium"}, say("tool", "3")),
]


@pytest.mark.parametrize(("name", "variables", "reply"), TURNS)
def test_turns_of_an_episode_are_the_chat_of_transformers(name, variables, reply, folder, reader):
    """Prompt, drawn tokens and reply together are what the template shows of the chat."""
    ours = reader(name, template_kwargs=variables)
    encoder, tokenizer = TurnEncoder(ours), ours.encoder.renderer.tokenizer
    ids = encoder.opening(ASK, "x:1").ids_S.tolist()
    ids += tokenizer(f"{DRAWN[0]}{END}")["input_ids"]
    row, is_continued = encoder.reply([reply], "x:1")
    ids += row.ids_S.tolist()
    assert is_continued
    processor = hf_processor(folder(name))
    processor.tokenizer = tokenizer
    chat = {"messages": [*ASK, think("r", "b"), reply]}
    expected = hf_encode(processor, chat, add_generation_prompt=True, **variables)
    assert ids == expected["input_ids"][0].tolist()
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("key", ["enable_thinking", "chat_template_kwargs"])
def test_a_record_says_whether_the_model_thinks(key, reader):
    """Its rows, prompts and turns are those of data.template_kwargs, whatever that says."""
    off = {"enable_thinking": False}
    by_config, by_record = (reader("qwen3_5", template_kwargs=each) for each in (off, {}))
    chat = {"messages": [*ASK, say("assistant", "b")]}
    own = off if key == "enable_thinking" else {key: off}
    rows = {}
    for prompt in (False, True):
        rows[prompt] = by_config.encode(chat, "x:1", prompt)
        found = by_record.encode({**chat, **own}, "x:1", prompt)
        assert found.ids_S.tolist() == rows[prompt].ids_S.tolist()
        assert found.trained_S.tolist() == rows[prompt].trained_S.tolist()
    # A finished answer without thoughts is the same either way, but its prompt is not.
    assert rows[True].ids_S.tolist() != by_record.encode(chat, "x:1", True).ids_S.tolist()
    thinks = by_config.encode({**chat, "enable_thinking": True}, "x:1", True)
    assert thinks.ids_S.tolist() == by_record.encode(chat, "x:1", True).ids_S.tolist()
    plain = by_record.encode(chat, "x:1")
    assert by_record.is_contrary(chat, plain) and not by_record.is_contrary({**chat, **own}, plain)
    turns, reply = TurnEncoder(by_record), [say("tool", "3")]
    expected = TurnEncoder(by_config).reply(reply, "x:1")[0].ids_S.tolist()
    assert turns.reply(reply, "x:1", own)[0].ids_S.tolist() == expected
    assert turns.reply(reply, "x:1")[0].ids_S.tolist() != expected


def test_variables_that_a_record_may_not_set(reader):
    chat = {"messages": [*ASK, say("assistant", "b")]}
    ours = reader("qwen3_5")
    for variables, name in (({"mood": 1}, "mood"), ({"enable_thinking": "no"}, "enable_thinking")):
        with raises(DataError, place="x:1", key=name, remedy_has=f"ignore_keys=[{name}]"):
            ours.encode({**chat, "chat_template_kwargs": variables}, "x:1")
        ignoring = reader("qwen3_5", ignore_keys=(name,))
        ignoring.encode({**chat, "chat_template_kwargs": variables}, "x:1")
    with raises(DataError, place="x:1", key="chat_template_kwargs.tools"):
        ours.encode({**chat, "chat_template_kwargs": {"tools": []}}, "x:1")
    with raises(DataError, place="x:1", key="enable_thinking", found=True):
        both = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
        ours.encode({**chat, **both}, "x:1")


def test_the_system_message_of_chats_that_have_none(reader):
    ours, plain = reader("qwen3_5", system="Be brief."), reader("qwen3_5")
    chat = [*ASK, say("assistant", "b")]
    expected = plain.encode({"messages": [say("system", "Be brief."), *chat]}, "x:1")
    for raw in ({"messages": chat}, {"messages": chat, "system": ""}):
        found = ours.encode(raw, "x:1")
        assert found.ids_S.tolist() == expected.ids_S.tolist()
        assert found.trained_S.tolist() == expected.trained_S.tolist()
    for raw in ({"messages": [say("system", "Be kind."), *chat]}, {"chunks": [{"tokens": [1, 2]}]}):
        assert ours.encode(raw, "x:1").ids_S.tolist() == plain.encode(raw, "x:1").ids_S.tolist()


@pytest.mark.parametrize(
    ("name", "variables"),
    [("qwen3_5", {}), ("qwen3_6", {}), ("qwen3_8", {"preserve_thinking": False})],
)
def test_a_template_that_forgets_thoughts_rewrites_what_was_before_a_question(
    name, variables, reader
):
    encoder = TurnEncoder(reader(name, template_kwargs=variables))
    row, is_continued = encoder.reply([say("user", "and?")], "x:1")
    assert not is_continued
    words = encoder.reader.encoder.renderer.tokenizer.decode(row.ids_S.tolist())
    assert words.startswith("\n<|im_start|>user\nand?<|im_end|>")


@pytest.mark.parametrize(
    ("name", "variables", "answer"),
    [
        ("qwen3_5", QUIET, "b"),
        ("qwen3_5_small", {}, "b"),
        ("qwen3_6", {}, "late\n</think>\n\nd"),
        ("qwen3_8", {}, "late\n</think>\n\nd"),
    ],
)
def test_a_question_of_an_evaluation_ends_as_a_prompt(name, variables, answer, folder, tmp_path):
    chat = PLAIN if answer == "b" else {"messages": [*THINKS["messages"], *ASK, think("late", "d")]}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(chat))
    path = str(tmp_path / "held_out.jsonl")
    data = open_set(path, folder(name), None, template_kwargs=variables)
    question = question_of(data, data.handle(0))
    prompt = data.readers[0].encode({"messages": chat["messages"][:-1]}, "x:1", prompt=True)
    assert question.prompt.ids_S.tolist() == prompt.ids_S.tolist()
    tokenizer = data.readers[0].encoder.renderer.tokenizer
    assert tokenizer.decode(question.answer_ids) == answer


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_6", "qwen3_8"])
def test_an_answer_of_a_chat_is_shown_as_it_was_thought(name, folder, reader):
    """What a model has said does not have the block's first line, which is in the prompt."""
    ours = reader(name)
    chats = [
        {"messages": [*ASK, answer, say("user", "c")]}
        for answer in (say("assistant", DRAWN[0]), think("r", "b"))
    ]
    said, expected = (ours.encode(chat, "x:1", prompt=True).ids_S.tolist() for chat in chats)
    assert said == expected
