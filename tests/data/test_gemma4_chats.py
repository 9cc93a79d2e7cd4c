"""Chats of Gemma 4: rows and prompts have transformers' tokens, rows begin as their prompts do, and
of the model's turn only its own words are trained. The released templates are in TRL."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.tokenizer import add_special_tokens, read_tokenizer
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.turn_tokens import TurnEncoder
from tests.support.chats import FAMILY_CHATS, call, check_continued, image, say, text, think, video
from tests.support.engine import ENVIRONMENT
from tests.support.error_fields import raises
from tests.support.gemma4_chats import gemma_ids, gemma_text
from tests.support.sets import open_set
from tests.support.trl_environment import PYTHON as TRL_PYTHON

ROOT = Path(__file__).parents[2]
EMPTY = "<|channel>thought\n<channel|>"
THINKING, QUIET = {"enable_thinking": True}, {"enable_thinking": False}
KEEPING = {"preserve_thinking": True}


def one_text(chat):
    """Join texts that are parts of a message without media, of which the template takes away the
    space at both ends. Ours is one text."""
    messages = []
    for message in chat["messages"]:
        content = message["content"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        messages.append({**message, "content": content})
    return {**chat, "messages": messages}


CHATS = {name: one_text(chat) for name, chat in FAMILY_CHATS.items()}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Return `make`: make() is a tiny checkpoint, and make(template) has another template."""
    root = tmp_path_factory.mktemp("gemma4")

    def make(template=None):
        if template is None:
            return tiny(family="gemma4")
        path = root / str(hash(template))
        if not path.exists():
            shutil.copytree(tiny(family="gemma4"), path)
            (path / "chat_template.jinja").write_text(template)
        return str(path)

    return make


@pytest.fixture(scope="module")
def reader(folder):
    def make(template=None, **options):
        cfg, path = DataConfig(**options), folder(template)
        return make_reader(make_encoder(path, cfg), cfg, read_sizes(path), "")

    return make


def decode(ours, ids):
    return ours.encoder.renderer.tokenizer.decode(ids)


def shown(ours, sample):
    """Return the text of a row from the last question on, with what is trained in brackets."""
    pieces, before = [], False
    for token, trained in zip(sample.ids_S.tolist(), sample.trained_S.tolist(), strict=True):
        pieces += ["[" if trained else "]"] * (trained != before) + [decode(ours, [token])]
        before = trained
    return "".join([*pieces, "]" * before]).rpartition("<|turn>user\n")[2]


def check_tokens(ours, path, chat, **variables):
    """A row is transformers' chat, with what opens its last answer; a prompt is transformers'."""
    check_continued(ours, chat, partial(gemma_ids, path, chat, **variables))
    asked = ours.encode(chat, "x:1", prompt=True).ids_S.tolist()
    assert asked == gemma_ids(path, chat, add_generation_prompt=True, **variables)
    row, whole = ours.encode(chat, "x:1").ids_S.tolist(), gemma_ids(path, chat, **variables)
    differs = (place for place, (a, b) in enumerate(zip(row, whole, strict=False)) if a != b)
    place, more = next(differs, len(whole)), len(row) - len(whole)
    assert row[place + more :] == whole[place:]
    *before, answer = chat["messages"]
    hidden = f"<|channel>thought\n{answer.get('reasoning_content')}\n<channel|>"
    assert decode(ours, row[place : place + more]) in ("", EMPTY, hidden)
    said = [each for each in before if each["role"] != "tool"][-1]
    # Templates put the words beside a call after its results, where prompts end the turn.
    is_joined = said.get("tool_calls") and said["content"]
    is_contrary = "reasoning_content" in answer and not variables.get("enable_thinking")
    if answer["role"] == "assistant" and not is_joined and not is_contrary:
        prompt = ours.encode({**chat, "messages": before}, "x:1", prompt=True).ids_S.tolist()
        assert row[: len(prompt)] == prompt


@pytest.mark.full
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    "variables", [{}, THINKING, THINKING | KEEPING, {"enable_thinking": False}]
)
def test_tokens_equal_transformers(variables, folder, reader):
    ours = reader(template_kwargs=variables)
    for chat in CHATS.values():
        check_tokens(ours, folder(), chat, **variables)


QUICK = ("images side by side, ", "video and picture", "calls with thoughts, system", "tools")


@pytest.mark.parametrize("variables", [{}, THINKING])
def test_tokens_of_pictures_videos_and_calls_equal_transformers(variables, folder, reader):
    ours = reader(template_kwargs=variables)
    chats = {name: chat for name, chat in CHATS.items() if name.startswith(QUICK)}
    assert len(chats) >= 5
    for chat in chats.values():
        check_tokens(ours, folder(), chat, **variables)


@pytest.mark.slow
@pytest.mark.engine("vllm")  # it has torchvision
def test_tokens_are_those_of_the_processor(folder):
    """Of transformers' Gemma4Processor itself, for all chats."""
    cases = [
        (chat, {**v, "add_generation_prompt": p})
        for chat in CHATS.values()
        for p in (0, 1)
        for v in ({}, THINKING)
    ]
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-m", "tests.support.gemma4_chats", folder()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [gemma_ids(folder(), chat, **options) for chat, options in cases]


ASK, LOOK = say("user", "Count."), call("look", x="a")
CALLS = say("assistant", "", tool_calls=[LOOK])
ANSWER, RESULT = say("assistant", "three"), say("tool", "3")
CALLED = '<|tool_call>call:look{x:<|"|>a<|"|>}<tool_call|><|tool_response>'
RESULTED = 'response:look{value:<|"|>3<|"|>}<tool_response|>'
NUMBERED = [{**call("a"), "id": "1"}, {**call("b"), "id": "2"}]
TRAINED = {
    "an answer": ([ASK, ANSWER], {}, f"{EMPTY}[three<turn|>]"),
    "a call": ([ASK, CALLS], {}, f"{EMPTY}[{CALLED}]"),
    "an answer to a result": (
        [ASK, CALLS, RESULT, ANSWER],
        {},
        f"[{CALLED}]{RESULTED}[three<turn|>]",
    ),
    "the last answer": (
        [ASK, CALLS, RESULT, ANSWER],
        {"train_on": "last_assistant"},
        f"{CALLED}{RESULTED}[three<turn|>]",
    ),
    "results": (
        [ASK, CALLS, RESULT, ANSWER],
        {"train_on": ["tool"]},
        f"{CALLED}[{RESULTED}]three<turn|>",
    ),
    "one of two": (
        [ASK, {**CALLS, "weight": 0}, RESULT, ANSWER],
        {},
        f"{CALLED}{RESULTED}[three<turn|>]",
    ),
    "two calls": (
        [ASK, CALLS, RESULT, CALLS, RESULT, ANSWER],
        {},
        f"[{CALLED}]{RESULTED}[{CALLED}]{RESULTED}[three<turn|>]",
    ),
    "words beside a call": (
        [ASK, {**CALLS, "content": "So:"}, RESULT, ANSWER],
        {"train_on": "last_assistant"},
        f"{CALLED}{RESULTED}[So:three<turn|>]",
    ),
    "results in another order, with pictures": (
        [
            ASK,
            say("assistant", "", tool_calls=NUMBERED),
            say("tool", text("x"), image(96, 96), tool_call_id="2"),
            say("tool", "y", tool_call_id="1"),
            ANSWER,
        ],
        {},
        "[<|tool_call>call:a{}<tool_call|><|tool_call>call:b{}<tool_call|><|tool_response>]"
        'response:b{value:<|"|>x<|"|>}<tool_response|><|image><|image|><image|>'
        '<|tool_response>response:a{value:<|"|>y<|"|>}<tool_response|>[three<turn|>]',
    ),
    "a result without an answer": (
        [ASK, CALLS, RESULT, ASK, CALLS, RESULT],
        {},
        f"[{CALLED}]{RESULTED}",
    ),
    "thoughts": (
        [ASK, think("Hm.", "three")],
        {"template_kwargs": THINKING},
        "[<|channel>thought\nHm.\n<channel|>three<turn|>]",
    ),
    "thoughts in the text": (
        [ASK, say("assistant", "<|channel>thought\nHm.\n<channel|>three")],
        {"template_kwargs": THINKING},
        "[<|channel>thought\nHm.\n<channel|>three<turn|>]",
    ),
    "thoughts that no prompt asks for": (
        [ASK, think("Hm.", "three")],
        {},
        "<|channel>thought\n[Hm.\n<channel|>three<turn|>]",
    ),
    "thoughts of calls": (
        [ASK, {**CALLS, "reasoning": "One."}, RESULT, think("Two.", "three")],
        {"template_kwargs": THINKING},
        f"[<|channel>thought\nOne.\n<channel|>{CALLED}]{RESULTED}<|channel>thought\n"
        "[Two.\n<channel|>three<turn|>]",
    ),
    # A prompt after a result leaves its channel open, and the answer closes it.
    "no thoughts after a result with a video": (
        [ASK, CALLS, say("tool", text("3"), video(1, 2)), ANSWER],
        {"template_kwargs": THINKING},
        f"[{CALLED}]{RESULTED}00:00 <|image><|video|><image|> 00:00 <|image><|video|><image|>"
        "<|channel>thought\n[<channel|>three<turn|>]",
    ),
    "text that spells marks": (
        [ASK, say("assistant", "<|turn> <turn|> <|tool_response>x<tool_response|>")],
        {"special_tokens": "escape"},
        f"{EMPTY}[<|turn> <turn|> <|tool_response>x<tool_response|><turn|>]",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_only_the_words_of_the_model_are_trained(name, reader):
    messages, options, expected = TRAINED[name]
    ours = reader(**options)
    actual = shown(ours, ours.encode({"messages": messages}, "x:1"))
    answer = re.sub(r"(<\|(image|video)\|>)+", r"\1", actual.split("<|turn>model\n")[1])
    assert answer.rstrip("\n") == expected


def test_a_prompt_with_tools_and_a_picture_has_the_channel(reader):
    chat = {"messages": [say("user", image(64, 64), text("Which?"))]}
    for variables, end in (({}, EMPTY), (THINKING, "")):
        ours = reader(template_kwargs=variables)
        ids = ours.encode(chat, "x:1", prompt=True).ids_S.tolist()
        assert decode(ours, ids).endswith(f"<image|>Which?<turn|>\n<|turn>model\n{end}")


WRONG = {
    "a mark": ([ASK, say("assistant", 'a <|"|> b')], DataError, {"problem_has": '<|"|>'}),
    "a mark in a name": ([ASK, CALLS, {**RESULT, "name": "<turn|>"}, ANSWER], DataError, {}),
    "a late channel": ([ASK, say("assistant", "a <|channel>thought\nb<channel|>")], DataError, {}),
    "a result without a call": (
        [ASK, RESULT, ANSWER],
        ConfigError,
        {"problem_has": "leaves out 2 of 3 messages"},
    ),
    "two weights": (
        [ASK, {**CALLS, "content": "So:", "weight": 0}, RESULT, ANSWER],
        DataError,
        {"key": "weight"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chats_are_refused(name, reader):
    messages, kind, fields = WRONG[name]
    with raises(kind, place="x:1", **fields):
        reader().encode({"messages": messages}, "x:1")


def test_a_template_of_another_format_is_refused(reader):
    with raises(ConfigError, place="x:1", problem_has="templates of Gemma 4"):
        reader("{{ messages[0].content }}").encode({"messages": [ASK, ANSWER]}, "x:1")


def test_a_token_that_is_not_marked_as_special_becomes_one(folder):
    """As <|video|> is, where files have it as a word of the vocabulary alone."""
    tokenizer = read_tokenizer(folder())
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    word = max((word for word in words if word.isalpha()), key=lambda word: (len(word), word))
    number = tokenizer.convert_tokens_to_ids(word)
    count = len(tokenizer)
    add_special_tokens(tokenizer, [word, "<|turn>", "no word"])
    assert tokenizer.added_tokens_decoder[number].special and len(tokenizer) == count
    assert number in tokenizer(f"q{word}q", add_special_tokens=False).input_ids


def test_answers_that_no_prompt_asks_for_are_said(folder, tmp_path):
    path = tmp_path / "mixed.jsonl"
    chats = ([ASK, ANSWER], [ASK, think("Hm.", "three")])
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    for variables, count in (({}, 1), (THINKING, 0)):
        data = open_set(str(path), folder(), None, template_kwargs=variables)
        lines = Remarks.from_data(data, "data.train", DataConfig()).lines
        assert len(lines) == count
        assert all("data.train: 1 of 2 records have reasoning" in line for line in lines)


def released(name):
    """Return a template of E2B that TRL has, or with 31B's end, as other projects show it."""
    folder = next(TRL_PYTHON.parents[1].glob("lib/*/site-packages/trl/chat_templates"))
    text = (folder / f"{name.removesuffix('_31b')}.jinja").read_text()
    if name.endswith("_31b"):
        turn = "{{- '<|turn>model\\n' -}}\n"
        before, after = text.rsplit(turn, 1)
        empty = (
            "{%- if not enable_thinking | default(false) -%}{{- '" + EMPTY + "' -}}{%- endif -%}"
        )
        text = before + turn + empty.replace("\n", "\\n") + after
    return text


EPISODES = {
    "an answer": ("Red.", [ANSWER | {"content": "Red."}], say("user", image(64, 64), text("And?"))),
    "a call": (CALLED.removesuffix("<|tool_response>"), [CALLS], RESULT),
    "thoughts": ("<|channel>thought\nHm.\n<channel|>Red.", [think("Hm.", "Red.")], ASK),
    "thoughts of a call": (
        f"<|channel>thought\nHm.\n<channel|>{CALLED}".removesuffix("<|tool_response>"),
        [{**CALLS, "reasoning_content": "Hm."}],
        RESULT,
    ),
}


@pytest.mark.parametrize("name", EPISODES)
def test_turns_of_an_episode_are_the_chat_of_transformers(name, folder, reader):
    """What was drawn is rendered again as the template shows it in a chat, with its opening left
    out and its calls named by their results."""
    drawn, answers, reply = EPISODES[name]
    variables = THINKING if "thoughts" in name else {}
    turns = TurnEncoder(reader(template_kwargs=variables))
    opening = turns.opening([ASK], "x:1")
    assert opening.ids_S.tolist() == gemma_ids(
        folder(), {"messages": [ASK]}, add_generation_prompt=True, **variables
    )
    row, is_continued = turns.reply([reply], "x:1")
    assert not is_continued
    said = [ChatMessage("assistant", (drawn,)), *turns.parse_reply([reply], "x:1")]
    first = turns.parse_opening([ASK], "x:1", {})
    chat = {"messages": [ASK, *answers, reply]}
    expected = gemma_ids(folder(), chat, add_generation_prompt=True, **variables)
    assert turns.conversation(first, said, [opening, row], "x:1") == expected


NAMES = ("gemma4", *(f"gemma4_v{number}" for number in range(2, 6)))


@pytest.mark.slow
@pytest.mark.engine("trl")
@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_31b" for name in NAMES)])
def test_the_released_templates(name, folder, reader):
    """Of each revision of E2B's that TRL has. What one leaves out is refused by name."""
    template, refused = released(name), []
    for variables in ({}, THINKING):
        ours = reader(template, template_kwargs=variables)
        for chat in CHATS.values():
            try:
                check_tokens(ours, folder(template), chat, **variables)
            except DataError as error:
                refused.append(error.key or "images" * ("images" in str(error)))
    assert set(refused) <= {"reasoning_content", "images"}
    assert bool(refused) == (not name.startswith(("gemma4_v4", "gemma4_v5")))


@pytest.mark.engine("trl")
def test_the_tiny_template_renders_what_the_newest_released_one_does(reader):
    """But for an answer after words beside a call, to which that gives no role."""
    tokenizer = reader().encoder.renderer.tokenizer
    newest = released("gemma4_v5_31b")
    for chat in CHATS.values():
        for options in ({}, THINKING, KEEPING):
            theirs = gemma_text(tokenizer, chat, chat_template=newest, **options)
            assert gemma_text(tokenizer, chat, **options) == theirs
            options = {"add_generation_prompt": True, **options}
            theirs = gemma_text(tokenizer, chat, chat_template=newest, **options)
            if not theirs.endswith(("<turn|>\n", "<turn|>\n<|channel>thought\n")):
                assert gemma_text(tokenizer, chat, **options) == theirs
