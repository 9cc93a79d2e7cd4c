# .venv/bin/python -m pytest tests/data/test_formats.py
"""Every format of records becomes the same turns, and a wrong record is refused with its place."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import PIL.Image
import pytest
import yaml

from megatron_vlm.data.records.formats import FORMAT_KEYS, OnlyAsksError, parse_record
from megatron_vlm.data.records.keys import UnknownKeysError
from megatron_vlm.data.records.record import (
    Box,
    ChatMessage,
    Conversation,
    EncodedRecord,
    Image,
    ImageChunk,
    Objects,
    Video,
)
from megatron_vlm.errors import DataError
from megatron_vlm.family.video_plan import VideoOptions
from tests.support.chats import call, say, text
from tests.support.error_fields import at, raises


def user(content):
    return {"messages": [{"role": "user", "content": content}, say("assistant", "b")]}


DIALOGUE = user("a")["messages"]
ASKED = (
    ChatMessage("user", (Image("a.png"), "What is it?")),
    ChatMessage("assistant", ("A cat.",)),
)
QUESTION, ANSWER = text("What is it?"), say("assistant", "A cat.")
MARKED_QUESTION = say("user", "<image>What is it?")
LISTED = say("assistant", {"type": "text", "text": "A cat."})

SAME = {
    "openai parts": {
        "messages": [say("user", {"type": "image", "image": "a.png"}, QUESTION), ANSWER]
    },
    "image_url, null fields, content as a list": {
        "messages": [
            say(
                "user",
                {"type": "image_url", "image_url": {"url": "a.png"}, "text": None},
                {**QUESTION, "image_url": None},
                name=None,
                tool_calls=None,
            ),
            LISTED,
        ],
        "tools": None,
    },
    "messages as a JSON string": {
        "messages": '[{"role":"user","content":[{"image":"a.png"},{"text":"What is it?"}]},'
        '{"role":"assistant","content":["A cat."]}]'
    },
    "parts without a source, images in a column": {
        "messages": [say("user", {"type": "image"}, QUESTION), ANSWER],
        "images": ["a.png"],
    },
    "marks in messages": {
        "messages": [MARKED_QUESTION, ANSWER],
        "images": [{"path": "a.png", "bytes": None}],
    },
    "llava": {
        "id": "1",
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
    "prompt and completion, no mark: the image comes first": dict(
        prompt="What is it?", completion="A cat.", images=["a.png"]
    ),
    "prompt and completion as messages": dict(
        prompt=[MARKED_QUESTION], completion=[ANSWER], image="a.png"
    ),
    "LLaMA-Factory's v1": {
        "_dataset_name": "a",
        "messages": [
            say(
                "user",
                {"type": "image_url", "value": "a.png"},
                {"type": "text", "value": "What is it?"},
            ),
            say("assistant", {"type": "text", "value": "A cat."}),
        ],
    },
    "alpaca": dict(instruction="<image>What is it?", input="", output="A cat.", image="a.png"),
    "a question, its answer and more": dict(
        image="a.png", question="What is it?", answer="A cat.", answer_type="a", question_id=7
    ),
    "a problem and its answer": dict(images="a.png", problem="<image>What is it?", answer="A cat."),
    "a problem, a worked solution and its bare answer": dict(
        images=["a.png"], problem="<image>What is it?", solution="A cat.", answer="cat"
    ),
    "a problem, an empty solution and an answer": dict(
        images=["a.png"], problem="<image>What is it?", solution="", answer="A cat."
    ),
    "query and response": {"image": "a.png", "query": "What is it?", "response": "A cat."},
    "prompt and response": {"image": "a.png", "prompt": "What is it?", "response": "A cat."},
    "answers that are all the same": dict(
        image={"bytes": None, "path": "a.png"}, question="What is it?", answers=["A cat."] * 2
    ),
    "the Cauldron": {
        "images": ["a.png"],
        "texts": [{"user": "What is it?", "assistant": "A cat.", "source": "AI2D"}],
    },
    "ms-swift's pairs": {
        "images": ["a.png"],
        "conversation": [{"human": "<image>What is it?", "assistant": "A cat."}],
    },
}


@pytest.mark.parametrize("name", SAME)
def test_formats_give_the_same_chat(name):
    assert parse_record(SAME[name], "x:1") == Conversation("x:1", ASKED)


def test_the_documentation_has_the_keys_of_every_format():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = page.partition("Formats are recognised by their keys:")[2].partition("###")[0]
    assert FORMAT_KEYS - {*re.findall(r"`(\w+)`", table)} == set()


def test_images_stand_where_their_marks_are():
    raw = {
        "conversations": [
            {"from": "human", "value": "<image>\n<image>\nCompare."},
            {"from": "gpt", "value": "Alike."},
            {"from": "human", "value": "And <image> with <video>?"},
            {"from": "gpt", "value": "No."},
        ],
        "images": ["1.png", "2.png", "3.png"],
        "videos": ["4.mp4"],
        "system": "Be brief.",
    }
    turns = parse_record(raw, "x:1").turns
    assert [turn.parts for turn in turns] == [
        ("Be brief.",),
        (Image("1.png"), Image("2.png"), "Compare."),
        ("Alike.",),
        ("And ", Image("3.png"), " with ", Video("4.mp4"), "?"),
        ("No.",),
    ]


@pytest.mark.parametrize("key", ["text", "caption"])
def test_a_caption_answers_the_question_of_the_configuration(key):
    raw = {"image": "a.png", key: "A cat.", "image_id": 7}
    asked = parse_record(raw, "x:1", caption_prompt="What is it?")
    assert asked == Conversation("x:1", ASKED)
    alone = ChatMessage("user", (Image("a.png"),))
    assert parse_record(raw, "x:1").turns == (alone, ASKED[1])


ONLY_ASKING = {
    "trl's": {"prompt": [{"role": "user", "content": "<image>What is it?"}], "solution": "A cat."},
    "a text": {"prompt": "What is it?", "label": True, "reward_model": {"ground_truth": "A cat."}},
    "geometry3k": {"problem": "<image>What is it?", "answer": 7},
    "a completion": {"prompt": "What is it?", "completion": 7, "response": "b", "chosen": "c"},
    "keys that other forms read": {"prompt": "What is it?", "query": "b", "input_ids": [1]},
    "several answers": {"question": "What is it?", "answers": ["A cat.", "cat"]},
}


@pytest.mark.parametrize("name", ONLY_ASKING)
def test_a_prompt_for_a_reward_needs_no_answer(name):
    """All keys that are not of the prompt are for the reward, but a slip of a key is none."""
    raw = {**ONLY_ASKING[name], "image": "a.png"}
    unused_keys = Counter()
    record = parse_record(raw, "x:1", unused_keys=unused_keys, prompts_only=True)
    assert record == Conversation("x:1", ASKED[:1]) and not unused_keys
    with raises(UnknownKeysError, place="x:1", problem_has="'imagse'"):
        parse_record({**raw, "imagse": ["b.png"]}, "x:1", prompts_only=True)
    with pytest.raises(DataError):
        parse_record(raw, "x:1")


def test_a_question_without_its_answer_is_for_rl():
    with raises(OnlyAsksError, place="x:1", key="prompt", remedy_has="megatron-vlm rl"):
        parse_record({"prompt": "What is 1 + 1?", "solution": "2"}, "x:1")


@pytest.mark.parametrize("form", [("instruction", "output"), ("query", "response")])
def test_a_question_with_history_and_system(form):
    question, answer = form
    raw = {"system": "Be brief.", "history": [["Hi", "Hello"]], question: "Add", answer: "3"}
    raw |= {"input": "1 and 2"} if question == "instruction" else {question: "Add\n1 and 2"}
    assert parse_record(raw, "x:1").turns == (
        ChatMessage("system", ("Be brief.",)),
        ChatMessage("user", ("Hi",)),
        ChatMessage("assistant", ("Hello",)),
        ChatMessage("user", ("Add\n1 and 2",)),
        ChatMessage("assistant", ("3",)),
    )


@pytest.mark.parametrize(
    "look",
    [
        {**call("look", x=1), "id": "c1"},
        {"type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
        {"name": "look", "arguments": {"x": 1}},
    ],
)
def test_tool_calls_are_brought_to_one_shape(look):
    seen = say("tool", {"type": "image", "image": "a.png"})
    messages = [say("user", "Look."), {"role": "assistant", "content": None, "tool_calls": [look]}]
    raw = {"messages": [*messages, seen, say("assistant", "A cat.", weight=0)]}
    record = parse_record({**raw, "tools": f"[{json.dumps(call('look'))}]"}, "x:1")
    numbered = {"id": look["id"]} if "id" in look else {}
    assert record.turns[1] == ChatMessage("assistant", (), ({**call("look", x=1), **numbered},))
    assert record.turns[2] == ChatMessage("tool", (Image("a.png"),))
    assert record.turns[3].weight == 0
    assert record.tools == (call("look"),)


LOOKS = (call("look", x=1), call("look"))
# The calls and results of one answer, as several projects write them.
CALLS = {
    "ms-swift": [
        {"role": "assistant", "content": "I look."},
        {"role": "tool_call", "content": '{"name": "look", "arguments": {"x": 1}}'},
        {"role": "tool_call", "content": '{"name": "look", "arguments": {}}'},
        {"role": "tool_response", "content": "a cat"},
        {"role": "tool_response", "content": "nothing"},
    ],
    "ShareGPT": [
        {"from": "gpt", "value": "I look."},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": '{"name": "look", "arguments": {}}'},
        {"from": "observation", "value": "a cat"},
        {"from": "observation", "value": "nothing"},
    ],
    "Anthropic": [
        say(
            "assistant",
            text("I look."),
            {"type": "tool_use", "id": "1", "name": "look", "input": {"x": 1}},
            {"type": "tool_use", "id": "2", "name": "look", "input": {}},
        ),
        say(
            "user",
            {"type": "tool_result", "tool_use_id": "1", "content": "a cat"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"text": "nothing"}]},
        ),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_one_answer(name):
    messages = [DIALOGUE[0], *CALLS[name], DIALOGUE[1]]
    bare = {"name": "look", "input_schema": {"type": "object"}}
    record = parse_record({"messages": messages, "tools": [bare]}, "x:1")
    ids = ("1", "2") if name == "Anthropic" else ("", "")
    looks = tuple(
        {**each, **({"id": id} if id else {})} for each, id in zip(LOOKS, ids, strict=True)
    )
    assert record.turns == (
        ChatMessage("user", ("a",)),
        ChatMessage("assistant", ("I look.",), looks),
        ChatMessage("tool", ("a cat",), call_id=ids[0]),
        ChatMessage("tool", ("nothing",), call_id=ids[1]),
        ChatMessage("assistant", ("b",)),
    )
    function = {"name": "look", "parameters": {"type": "object"}}
    assert record.tools == ({"type": "function", "function": function},)


def test_the_older_function_call_of_openai():
    function = {"name": "look", "parameters": {"type": "object"}}
    called = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    result = {"role": "function", "name": "look", "content": "a cat"}
    raw = {"messages": [DIALOGUE[0], called, result, DIALOGUE[1]], "functions": [function]}
    record = parse_record(raw, "x:1")
    answer = ChatMessage("tool", ("a cat",), name="look")
    shown = ChatMessage("assistant", (), (call("look"),)), answer
    assert record.turns[1:3] == shown
    assert record.tools == ({"type": "function", "function": function},)
    with raises(DataError, place="x:1", key="tools"):
        parse_record({**raw, "tools": [function]}, "x:1")


def test_names_that_change_nothing():
    picture = {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}
    asked = {"role": "user", "name": "Ann", "content": [picture, "What is it?"]}
    raw = {"messages": [asked, {"role": "assistant", "content": "A cat."}], "channel": "vision"}
    raw |= {"metadata": {"a": "b"}, "parallel_tool_calls": True, "width": 640, "height": 480}
    unused_keys = Counter()
    record = parse_record(raw, "x:1", strict=True, unused_keys=unused_keys)
    assert record == Conversation("x:1", ASKED) and not unused_keys


def test_the_index_of_a_picture_is_its_place():
    def parts(*numbers):
        pictures = [{"type": "image", "text": None, "index": number} for number in numbers]
        return user([*pictures, {"type": "text", "text": "a", "index": None}])

    for numbers in ((0, 1), (None, None), (0.0, 1.0)):
        turns = parse_record({**parts(*numbers), "images": ["1.png", "2.png"]}, "x:1").turns
        assert turns[0].parts == (Image("1.png"), Image("2.png"), "a")
    with raises(DataError, place="x:1: message 0, part 0", key="index", found=1, allowed=0):
        parse_record({**parts(1, 0), "images": ["1.png", "2.png"]}, "x:1")


@pytest.mark.parametrize("flag", ["train", "training", "trainable", "weight", "loss"])
def test_a_message_says_whether_it_is_learnt(flag):
    raw = {"messages": [{**DIALOGUE[0], flag: False}, {**DIALOGUE[1], flag: True}]}
    assert [turn.weight for turn in parse_record(raw, "x:1").turns] == [0, 1]


PICTURES = {
    "LLaVA's list": {"type": "image", "path": "a.png"},
    "Oumi": {"type": "image_path", "content": "a.png"},
    "Oumi's bytes": {"type": "image_binary", "binary": "AAAA"},
    "Anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        "cache_control": {"type": "ephemeral"},
    },
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_as_other_projects_write_them(name):
    parts = (
        parse_record(user([PICTURES[name], {"type": "text", "content": "a"}]), "x:1").turns[0].parts
    )
    is_encoded = "AAAA" in str(PICTURES[name])
    assert parts == (Image("data:image;base64,AAAA" if is_encoded else "a.png"), "a")


def test_an_answer_that_is_a_picture_is_refused():
    raw = {"messages": [DIALOGUE[0], {"role": "assistant", "content": "<image>"}]}
    raw["images"] = ["a.png"]
    with raises(DataError, place="x:1: message 1", key="content", problem_has="is a picture"):
        parse_record(raw, "x:1")
    raw["messages"][1] |= {"weight": 0}
    assert parse_record(raw, "x:1").turns[1].parts == (Image("a.png"),)


def test_boxes_in_the_older_form_of_ms_swift():
    boxes = [{"caption": "dog", "bbox": [1, 2, 3, 4], "bbox_type": "norm_1000", "image": 0}]
    raw = {"query": "<image>Find the dog.", "response": "<bbox>", "images": ["a.png"]}
    for objects in (boxes, json.dumps(boxes)):
        found = parse_record({**raw, "objects": objects}, "x:1").objects
        assert found == Objects((), (Box((1, 2, 3, 4), "norm1000", 0),))
    mixed = [*boxes, {**boxes[0], "bbox_type": "real"}]
    with raises(DataError, place="x:1: objects", key="bbox_type"):
        parse_record({**raw, "objects": mixed}, "x:1")


def test_llama_factorys_v1_with_everything():
    looks = [
        {"type": "reasoning", "value": "I need eyes."},
        {"type": "text", "value": "Let me see."},
        {"type": "tool_call", "value": '{"name": "look", "arguments": {"x": 1}}'},
        {"type": "tool_call", "value": {"name": "look", "arguments": {}}},
    ]
    shown = [{"type": "text", "value": "Look at "}, {"type": "video_url", "value": "a.mp4"}]
    messages = [
        say("user", *shown, loss_weight=0.0),
        say("assistant", *looks, loss_weight=0.5),
        say("tool", {"type": "text", "value": "a cat"}, loss_weight=0),
        say("assistant", {"type": "text", "value": "A cat."}),
    ]
    tools = '[{"type": "function", "function": {"name": "look"}}]'
    assert parse_record({"tools": tools, "messages": messages}, "x:1").turns == (
        ChatMessage("user", ("Look at ", Video("a.mp4")), weight=0),
        ChatMessage("assistant", ("Let me see.",), LOOKS, 0.5, "I need eyes."),
        ChatMessage("tool", ("a cat",), weight=0),
        ChatMessage("assistant", ("A cat.",)),
    )


def test_images_as_bytes_pil_and_base64():
    picture = PIL.Image.new("RGB", (4, 4))
    file = io.BytesIO()
    picture.save(file, "PNG")
    parts = [{"type": "image", "image": value} for value in (picture, file.getvalue())]
    parts += [{"type": "image", "base64": "AAAA"}, {"type": "image", "image": {"bytes": b"123"}}]
    raw = {"prompt": [{"role": "user", "content": parts}], "completion": "Four."}
    sources = [part.source for part in parse_record(raw, "x:1").turns[0].parts]
    assert sources == [picture, file.getvalue(), "data:image;base64,AAAA", b"123"]


def test_a_video_as_frames():
    part = {"type": "video", "video": ["1.png", "2.png"], "fps": 2.0}
    raw = {"prompt": [{"role": "user", "content": [part]}], "completion": "It moves."}
    video = parse_record(raw, "x:1").turns[0].parts[0]
    assert video == Video((Image("1.png"), Image("2.png")), VideoOptions(fps=2.0))


def test_chunks():
    raw = {
        "chunks": [
            {"type": "encoded_text", "tokens": [1, 2]},
            {"type": "image", "data": "AAAA", "format": "png", "expected_tokens": 4},
            {"type": "encoded_text", "tokens": [3]},
        ],
        "weights": [0, 0, 0, 0, 0, 0, 1.0],
    }
    record = parse_record(raw, "x:1")
    chunk = ImageChunk(Image("data:image;base64,AAAA"), 4)
    mask = (False, False, False, False, False, False, True)
    assert record == EncodedRecord("x:1", ((1, 2), chunk, (3,)), mask)
    assert parse_record({"model_input": {"chunks": raw["chunks"]}}, "x:1").mask is None


def chunks(*parts, **more):
    return {"chunks": list(parts), **more}


def answered(**message):
    return {"messages": [{"role": "assistant", **message}]}


PART = "message 0, part 0"
# Wrong records, and the fields of their errors.
WRONG = {
    "not an object": ([1, 2], at(has="JSON")),
    "null": (None, at(has="JSON")),
    "no known keys": ({"title": "a", "body": "b"}, at(has="['body', 'title'] match no known")),
    "empty": ({}, at(has="match no known format")),
    "no messages": ({"messages": []}, at("", "messages")),
    "messages a number": ({"messages": 3}, at("", "messages", "an int")),
    "messages bad JSON": ({"messages": "[{"}, at("", "messages", "JSON")),
    "message a string": ({"messages": ["hi"]}, at("message 0", has="a str")),
    "no role": ({"messages": [{"content": "a"}]}, at("message 0", "role", found=None)),
    "unknown role": (answered(role="robot", content="a"), at("message 0", "role", found="robot")),
    "role a number": (answered(role=3, content="a"), at("message 0", "role", found=3)),
    "no content": (user(None), at("message 0", "content")),
    "empty content": (user(""), at("message 0", "content")),
    "empty list": (user([]), at("message 0", "content")),
    "content a number": (user(7), at("message 0", "content", "an int")),
    "part a number": (user([7]), at(PART, has="an int")),
    "part of unknown type": (
        user([{"type": "audio", "audio": "a"}]),
        at(PART, "type", found="audio"),
    ),
    "part without type": (user([{"colour": "red"}]), at(PART, "type", found="")),
    "text a number": (user([{"type": "text", "text": 3}]), at(PART, "text", "an int")),
    "text missing": (user([{"type": "text"}]), at(PART, "text", "null")),
    "image a number": (user([{"type": "image", "image": 3}]), at(PART, has="an int")),
    "image an empty path": (user([{"type": "image", "image": ""}]), at(PART, has="a str")),
    "image an empty object": (user([{"type": "image", "image": {}}]), at(PART, has="null")),
    "fewer images than places": (
        {**user([{"type": "image"}, {"type": "image"}]), "images": ["a.png"]},
        at("", "images", "2 image places"),
    ),
    "more images than marks": (
        {**user("<image>a"), "images": ["a.png", "b.png"]},
        at("", "images", "but 2 images"),
    ),
    "images nowhere to go": (
        {**answered(content="b"), "images": ["a.png"]},
        at("", "images", "no user message to put them in"),
    ),
    "place but no images": (user([{"type": "image"}]), at("", "images", "1 image places")),
    "system in the middle": (
        {"messages": [*user("a")["messages"], {"role": "system", "content": "c"}]},
        at("message 2", "role", found="system"),
    ),
    **{
        f"weight of {weight!r}": (
            answered(content="a", weight=weight),
            at("message 0", "weight", found_has=weight),
        )
        for weight in (-1, 1e-30, 1e30, float("nan"), float("inf"), "1", [1])
    },
    "v1 call that is not JSON": (
        user([{"type": "tool_call", "value": "{x"}]),
        at(PART, "tool_call", "JSON"),
    ),
    "v1 unknown key": (
        user([{"type": "text", "value": "a", "mood": "b"}]),
        at(has="'mood' (message 0, part 0)", kind=UnknownKeysError),
    ),
    "call without a name": (
        answered(tool_calls=[{"arguments": "{}"}]),
        at("message 0, a tool call", "function.name"),
    ),
    "arguments not JSON": (
        answered(tool_calls=[{"name": "f", "arguments": "{x"}]),
        at("message 0, a tool call", "arguments of f", "JSON"),
    ),
    "arguments a list": (
        answered(tool_calls=[{"name": "f", "arguments": "[1]"}]),
        at("message 0, a tool call", "arguments of f", "a list"),
    ),
    "tools a string": ({**user("a"), "tools": "look"}, at("", "tools", "JSON")),
    "tools a number": ({**user("a"), "tools": 3}, at("", "tools", "an int")),
    "prompt a number": ({"prompt": 3, "completion": "a"}, at("", "messages", "an int")),
    "output missing its text": ({"instruction": "a", "output": 3}, at("", "output", "an int")),
    "several answers": ({"question": "a", "answers": ["b", "c"]}, at("", "answers", "2 answers")),
    "answer and response": (
        {"question": "a", "answer": "b", "response": "c"},
        at("", "answer", "and response"),
    ),
    "an empty answer": ({"question": "a", "answer": ""}, at("", "answer")),
    "an empty caption": ({"image": "a", "text": ""}, at("", "text")),
    "the number of an answer": ({"question": "a", "answer": 3}, at("", "answer", "an int")),
    "a pair without an answer": (
        {"texts": [{"user": "a", "assistant": None}]},
        at("texts[0]", "assistant", "null"),
    ),
    "input a list": (
        {"instruction": "a", "input": ["b"], "output": "c"},
        at("", "input", "a list"),
    ),
    **{
        f"history {name}": (
            {"instruction": "a", "output": "c", "history": history},
            at("", "history", "pairs"),
        )
        for name, history in (
            ("a number", 3),
            ("of strings", ["ab"]),
            ("of halves", [["a"]]),
            ("of objects", [{"a": "b"}]),
            ("of other things", [["a", {"b": 1}]]),
        )
    },
    "no frames": (user([{"type": "video", "video": []}]), at(PART, has="the video has no frames")),
    "video a number": (user([{"type": "video", "video": 3}]), at(PART, has="an int")),
    "no chunks": (chunks(), at("", "chunks", "with at least one chunk")),
    "chunk a list": (chunks([1]), at("chunk 0", has="a list")),
    "chunk of nothing": (chunks({"type": "text"}), at("chunk 0", has="['type']")),
    "tokens as floats": (chunks({"tokens": [1.5]}), at("chunk 0", "tokens")),
    "negative tokens": (chunks({"tokens": [-1]}), at("chunk 0", "tokens")),
    "expected_tokens of zero": (
        chunks({"data": "AA", "expected_tokens": 0}),
        at("chunk 0", "expected_tokens", found=0),
    ),
    "a negative mask": (chunks({"tokens": [1]}, mask=[-1]), at("", "mask[0]", found=-1)),
    "mask of text": (chunks({"tokens": [1]}, mask="1"), at("", "mask", "0 and 1")),
}


MARKED = {
    "llava": {"conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]},
    "an empty column": {**user("<image>What is it?"), "images": []},
    "a null": {**user("<image>What is it?"), "image": None},
    "a video beside an image": {**user("<image><video>Compare."), "images": ["a.png"]},
    "sound": user("What does <audio> say?"),
    "alpaca": {"instruction": "<image>What is it?", "output": "A cat."},
    "an answer": {"messages": [{"role": "assistant", "content": "See <image>."}]},
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_without_media_of_their_kind_are_refused(name):
    """Formats that have marks refuse lone ones, and data.lone_marks=text makes words of them."""
    with raises(DataError, place="x:1", remedy_has="data.lone_marks=text") as caught:
        parse_record(MARKED[name], "x:1")
    assert re.search("1 <(image|video|audio)> mark", caught.value.problem)
    if "images" not in name and name != "a video beside an image":
        record = parse_record(MARKED[name], "x:1", lone_marks="text")
        assert "<" in record.turns[0].parts[0]


MENTIONED = {
    "prompt and completion": {"prompt": "What does <image> mean?", "completion": "Nothing."},
    "a part": user([{"type": "text", "text": "What does <image> mean?"}]),
    "HTML": user("<video>no player</video> and <image></image>"),
}


@pytest.mark.parametrize("name", MENTIONED)
def test_words_that_look_like_marks_stay_text(name):
    """Marks are text where the format has none, and where the text closes them as HTML does."""
    record = parse_record(MENTIONED[name], "x:1")
    assert len(record.turns[0].parts) == 1 and "<image>" in record.turns[0].parts[0]


PREFERENCE = "this is preference data, by "
# Keys that no format has, or whose meaning is not supported. Each is named, with the setting that
# ignores it.
UNKNOWN = {
    "of other formats": (
        {"messages": DIALOGUE, "loss_mask": [1], "documents": [{"name": "f"}]},
        "the meaning of 'loss_mask', 'documents' is",
    ),
    "a slip": (
        {"messages": DIALOGUE, "imagse": ["a.png"], "tool": [{"name": "f"}], "Systm": "b"},
        "the meaning of 'imagse' (most likely 'images'), 'tool' (most likely 'tools'), "
        "'Systm' (most likely 'system') is",
    ),
    "a second picture": (
        {**user("a"), "image": "a.png", "image_2": "b.png"},
        "the meaning of 'image_2' is",
    ),
    "of every kind at once": (
        {
            "weights": [1],
            "messages": [
                say("user", {**text("a"), "bbox": [1, 2]}),
                say("assistant", "b", refusal="no"),
                say("assistant", tool_calls=[{"name": "f", "parameters": {"x": 1}}]),
                say("assistant", "b", refusal="no"),
            ],
        },
        "'weights', 'bbox' (message 0, part 0), 'refusal' (message 1), "
        "'parameters' (message 2, a tool call) is",
    ),
    "the choices of a question": (
        {"question": "Which?", "choices": ["a", "b"], "answer": "b"},
        "the meaning of 'choices' is",
    ),
    "two questions": (
        {"question": "Which?", "query": "Which of them?", "answer": "b"},
        "the meaning of 'question' is",
    ),
    "another format's": ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "'history'"),
    "two formats at once": (
        {"messages": DIALOGUE, "conversations": [{"from": "human", "value": "c"}]},
        "'conversations'",
    ),
    "chunks beside messages": (chunks({"tokens": [1]}, messages=DIALOGUE), "'messages'"),
    "of a chunk": (chunks({"tokens": [1], "logprobs": [0.5]}), "'logprobs' (chunk 0)"),
    "a picture's size": (user([{"image": "a", "scale": 9}, "a"]), "'scale'"),
    "parts of an answer to be learnt": (
        {"messages": [DIALOGUE[0], {**DIALOGUE[1], "train_detail": [{"train": True}]}]},
        "'train_detail' (message 1)",
    ),
    "a refusal": (
        {"messages": [DIALOGUE[0], {**DIALOGUE[1], "refusal": "No."}]},
        "'refusal' (message 1)",
    ),
    "a key that a shell would take apart": (
        {"messages": [{**DIALOGUE[0], "my score, new": 1}, DIALOGUE[1]]},
        "data.ignore_keys=['my score, new']",
    ),
    "chosen and rejected": (
        {"conversations": DIALOGUE, "chosen": {"from": "gpt"}, "rejected": {"from": "gpt"}},
        f"{PREFERENCE}'chosen' and 'rejected':",
    ),
    "a disliked answer": ({"messages": DIALOGUE, "label": False}, f"{PREFERENCE}'label':"),
    "a tag": ({"messages": DIALOGUE, "kto_tag": True}, f"{PREFERENCE}'kto_tag':"),
    "a rejected response": (
        {"messages": DIALOGUE, "rejected_response": "c"},
        f"{PREFERENCE}'rejected_response':",
    ),
    "sound": ({**user("What is it?"), "audios": ["a.wav"]}, "there is sound, by 'audios',"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_keys_are_refused_by_name_until_they_are_ignored(name):
    raw, words = UNKNOWN[name]
    with pytest.raises(DataError) as error:
        parse_record(raw, "chats.jsonl:7")
    assert error.value.place == "chats.jsonl:7"
    assert words in str(error.value)
    names = yaml.safe_load(error.value.remedy.rpartition("data.ignore_keys=")[2])
    parse_record(raw, "chats.jsonl:7", names)
    for missing in names:
        with pytest.raises(DataError, match=missing):
            parse_record(raw, "chats.jsonl:7", [other for other in names if other != missing])


def test_the_remedy_keeps_what_is_ignored_already():
    with raises(UnknownKeysError, place="x:1", remedy_has="data.ignore_keys=[loss_mask,score]"):
        parse_record({"messages": DIALOGUE, "score": 1, "loss_mask": 2}, "x:1", ["score"])


PASSED = {"score": 1, "meta": {"a": 1}, "label": "cat", "num_images": 3, "image_size": [4, 5]}
PASSED |= {"url": "https://a.b/c", "my score, new": 1, "task": "vqa", "pages": 2, "reward": 1.5}


def test_other_keys_of_a_record_are_passed_over_and_counted():
    for raw in ({"messages": DIALOGUE, **PASSED}, {"messages": DIALOGUE, "score": 2, "x": None}):
        unused_keys = Counter()
        assert parse_record(raw, "x:1", unused_keys=unused_keys) == parse_record(user("a"), "x:1")
        assert unused_keys == dict.fromkeys(raw.keys() & PASSED.keys(), 1)
        with raises(UnknownKeysError, place="x:1") as caught:
            parse_record(raw, "x:1", strict=True)
        assert "score" in caught.value.keys


MEDIA = {"image_path": "x.png", "img": "x.png", "file_name": "a/b", "pictures": ["x.png"]}
MEDIA |= {"imageUrl": "http://a", "video_file": "x.mp4", "path": "a/x.JPG", "photo_1": "x"}
MEDIA |= {"scan": {"bytes": b"x", "path": None}, "left": b"x", "both": [b"x"], "image_files": ["x"]}


@pytest.mark.parametrize("key", MEDIA)
def test_what_looks_like_media_is_not_to_be_ignored(key):
    """The remedy offers to ignore such a key only where the record has other media."""
    raw = {**user("<image>What is it?"), key: MEDIA[key]}
    with raises(UnknownKeysError, place="x:1", problem_has=f"'{key}'") as error:
        parse_record(raw, "x:1")
    assert error.value.keys[key].is_media and "ignore_keys" not in str(error.value)
    with raises(UnknownKeysError, remedy_has=f"ignore_keys=[{key}]"):
        parse_record({**raw, "images": ["a.png"]}, "x:1")
    with raises(DataError, remedy_has="data.lone_marks"):
        parse_record(raw, "x:1", [key])


def test_a_slip_of_a_format_is_answered():
    with raises(DataError, place="x:1", remedy_has="; 'mesages' is most likely 'messages'; or"):
        parse_record({"mesages": DIALOGUE, "meta": 1}, "x:1")
    with pytest.raises(DataError) as error:
        parse_record({"prompt": "a", "meta": 1}, "x:1")
    assert "most likely" not in str(error.value)


def test_names_of_media_are_looked_at_in_no_time():
    from megatron_vlm.data.records.keys import looks_like_media  # for names as in a hostile file

    assert not any(looks_like_media(f"image{'1_' * 40}x" * n, "a") for n in range(1, 50))


def test_only_preference_and_sound_without_a_format():
    """Records in trl's form match no format, and are still refused as preference data."""
    for raw in ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen_messages": DIALOGUE}):
        with raises(DataError, place="x:1", problem_has=PREFERENCE):
            parse_record(raw, "x:1")


def test_an_ignored_key_is_as_if_it_were_not_there():
    raw = {"messages": [{**DIALOGUE[0], "weight": 1}, DIALOGUE[1]], "tools": [{"name": "f"}]}
    assert parse_record(raw, "x:1", ["weight", "tools"]) == parse_record(user("a"), "x:1")


def test_what_is_empty_and_metadata_are_no_keys():
    empty = {"reward": None, "objects": {}, "bbox": [], "audios": [], "chosen": "", "label": None}
    raw = {
        "messages": [{**DIALOGUE[0], "name": "", "x": {"y": None}}, DIALOGUE[1]],
        "id": 7,
        "source": "a book",
        "category": "b",
        "image": "",
        "images": [],
        **empty,
    }
    assert parse_record(raw, "x:1") == parse_record(user("a"), "x:1")


def test_system_beside_messages_is_the_first_of_them():
    record = parse_record({"system": "Be brief.", "messages": DIALOGUE}, "x:1")
    assert record.turns[0] == ChatMessage("system", ("Be brief.",))


TWICE = {
    "image and images": {**user("a"), "image": "a.png", "images": ["b.png"]},
    "content and value": {"messages": [{"role": "user", "content": "a", "value": "b"}]},
    "role and from": {"messages": [{"role": "user", "from": "gpt", "content": "b"}]},
    "image and url": user([{"type": "image", "image": "a.png", "url": "b.png"}]),
    "weight and train": {"messages": [{**DIALOGUE[1], "weight": 0, "train": True}]},
    "mask and weights": chunks({"tokens": [1]}, mask=[1], weights=[0]),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_keys_that_mean_the_same_and_differ_are_refused(name):
    first, second = name.split(" and ")
    with raises(DataError, key=first, problem_has=f"and {second}"):
        parse_record(TWICE[name], "x:1")


def test_two_keys_that_say_the_same_are_one():
    message = {"role": "user", "from": "human", "content": "a", "value": "a"}
    assert parse_record({"messages": [message, DIALOGUE[1]]}, "x:1") == parse_record(
        user("a"), "x:1"
    )


def test_the_keys_of_an_answer_to_a_call():
    answer = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"}
    raw = {"messages": [*DIALOGUE, answer]}
    assert parse_record(raw, "x:1").turns[2] == ChatMessage("tool", ("3",), name="f", call_id="c1")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_refused_with_their_place(name):
    raw, fields = WRONG[name]
    with raises(**{"kind": DataError} | fields):
        parse_record(raw, "a:7")
