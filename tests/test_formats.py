# .venv/bin/python -m pytest tests/test_formats.py
"""Every format of records becomes the same turns; what is wrong is refused with its place."""

import io

import PIL.Image
import pytest

from megatron_vlm.data.read.formats import parse_record
from megatron_vlm.data.read.records import Chat, Chunks, Image, ImageChunk, Turn, Video
from megatron_vlm.errors import DataError

ASKED = (
    Turn("user", (Image("a.png"), "What is it?")),
    Turn("assistant", ("A cat.",)),
)

SAME = {
    "openai parts": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "a.png"},
                    {"type": "text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": "A cat."},
        ]
    },
    "image_url, null fields, content as a list": {
        "messages": [
            {
                "role": "user",
                "name": None,
                "tool_calls": None,
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.png"}, "text": None},
                    {"type": "text", "text": "What is it?", "image_url": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ],
        "tools": None,
    },
    "messages as a JSON string": {
        "messages": '[{"role":"user","content":[{"image":"a.png"},{"text":"What is it?"}]},'
        '{"role":"assistant","content":["A cat."]}]'
    },
    "parts without a source, images in a column": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
            },
            {"role": "assistant", "content": "A cat."},
        ],
        "images": ["a.png"],
    },
    "marks in messages": {
        "messages": [
            {"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": "A cat."},
        ],
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
    "prompt and completion, no mark: the image comes first": {
        "prompt": "What is it?",
        "completion": "A cat.",
        "images": ["a.png"],
    },
    "prompt and completion as messages": {
        "prompt": [{"role": "user", "content": "<image>What is it?"}],
        "completion": [{"role": "assistant", "content": "A cat."}],
        "image": "a.png",
    },
    "alpaca": {
        "instruction": "<image>What is it?",
        "input": "",
        "output": "A cat.",
        "image": "a.png",
    },
}


@pytest.mark.parametrize("name", SAME)
def test_formats_give_the_same_chat(name):
    assert parse_record(SAME[name], "x:1") == Chat("x:1", ASKED)


def test_marks_without_images_stay_text():
    record = parse_record(
        {"prompt": "What does <image> mean in HTML?", "completion": "Nothing."}, "x:1"
    )
    assert record.turns[0].parts == ("What does <image> mean in HTML?",)


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


def test_alpaca_with_history_and_system():
    raw = {
        "system": "Be brief.",
        "history": [["Hi", "Hello"]],
        "instruction": "Add",
        "input": "1 and 2",
        "output": "3",
    }
    assert parse_record(raw, "x:1").turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("Hi",)),
        Turn("assistant", ("Hello",)),
        Turn("user", ("Add\n1 and 2",)),
        Turn("assistant", ("3",)),
    )


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}, "id": "c1"},
        {"type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
        {"name": "look", "arguments": {"x": 1}},
    ],
)
def test_tool_calls_are_brought_to_one_shape(call):
    raw = {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "image", "image": "a.png"}]},
            {"role": "assistant", "content": "A cat.", "weight": 0},
        ],
        "tools": '[{"type": "function", "function": {"name": "look"}}]',
    }
    record = parse_record(raw, "x:1")
    expected = {"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    assert record.turns[1] == Turn("assistant", (), (expected,))
    assert record.turns[2] == Turn("tool", (Image("a.png"),))
    assert record.turns[3].trained is False
    assert record.tools == ({"type": "function", "function": {"name": "look"}},)


def test_sharegpt_function_calls():
    raw = {
        "conversations": [
            {"from": "human", "value": "Look."},
            {"from": "function_call", "value": '{"name": "look", "arguments": {}}'},
            {"from": "observation", "value": "A cat."},
            {"from": "gpt", "value": "A cat."},
        ]
    }
    turns = parse_record(raw, "x:1").turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[1].tool_calls[0]["function"] == {"name": "look", "arguments": {}}


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
    assert video == Video((Image("1.png"), Image("2.png")), 2.0)


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
    assert record == Chunks("x:1", ((1, 2), chunk, (3,)), mask)
    assert parse_record({"model_input": {"chunks": raw["chunks"]}}, "x:1").mask is None


def user(content):
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    }


def chunks(*parts, **more):
    return {"chunks": list(parts), **more}


# What is wrong, and what the message must say besides the place.
WRONG = {
    "not an object": ([1, 2], "a list"),
    "a bare string": ("hello", "a str"),
    "null": (None, "null"),
    "no known keys": ({"question": "a", "answer": "b"}, "['answer', 'question'] match no known"),
    "empty": ({}, "match no known format"),
    "no messages": ({"messages": []}, "has no messages"),
    "messages a number": ({"messages": 3}, "must be a list, but this is an int"),
    "messages bad JSON": ({"messages": "[{"}, "messages is a string that is not JSON"),
    "message a string": ({"messages": ["hi"]}, "message 0 must be an object, but this is a str"),
    "no role": ({"messages": [{"content": "a"}]}, "message 0 has role None"),
    "unknown role": (
        {"messages": [{"role": "robot", "content": "a"}]},
        "'robot'; known roles: system",
    ),
    "role a number": ({"messages": [{"role": 3, "content": "a"}]}, "message 0 has role 3"),
    "no content": (user(None), "message 0 (user) has no content"),
    "empty content": (user(""), "message 0 (user) has no content"),
    "empty list": (user([]), "message 0 (user) has no content"),
    "content a number": (user(7), "content must be a string or a list, not an int"),
    "part a number": (user([7]), "message 0, part 0 must be a string or an object"),
    "part of unknown type": (
        user([{"type": "audio", "audio": "a"}]),
        "part 0 has type 'audio'; known",
    ),
    "part without type": (user([{"colour": "red"}]), "part 0 has type ''; known"),
    "text a number": (
        user([{"type": "text", "text": 3}]),
        "text must be a string, but this is an int",
    ),
    "text missing": (user([{"type": "text"}]), "text must be a string, but this is null"),
    "image a number": (user([{"type": "image", "image": 3}]), "not an int"),
    "image an empty path": (user([{"type": "image", "image": ""}]), "an image is a path, URL"),
    "image an empty object": (user([{"type": "image", "image": {}}]), "not null"),
    "fewer images than places": (
        {**user([{"type": "image"}, {"type": "image"}]), "images": ["a.png"]},
        "2 image places",
    ),
    "more images than marks": (
        {**user("<image>a"), "images": ["a.png", "b.png"]},
        "but 2 in the record's",
    ),
    "images nowhere to go": (
        {"messages": [{"role": "assistant", "content": "b"}], "images": ["a.png"]},
        "no user message to put them in",
    ),
    "place but no images": (user([{"type": "image"}]), "1 image places"),
    "system in the middle": (
        {"messages": [*user("a")["messages"], {"role": "system", "content": "c"}]},
        "message 2 is a system message",
    ),
    "weight of a half": (
        {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
        "weight is 0.5; give 0, 1",
    ),
    "call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": "{}"}]}]},
        "a tool call has no function name",
    ),
    "arguments not JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
        "arguments of f is a string that is not JSON",
    ),
    "arguments a list": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "arguments of f must be an object, not a list",
    ),
    "tools a string": ({**user("a"), "tools": "look"}, "tools is a string that is not JSON"),
    "tools a number": ({**user("a"), "tools": 3}, "tools must be a list of objects"),
    "prompt a number": (
        {"prompt": 3, "completion": "a"},
        "messages must be a list, but this is an int",
    ),
    "output missing its text": ({"instruction": "a", "output": 3}, "output must be a string"),
    "input a list": (
        {"instruction": "a", "input": ["b"], "output": "c"},
        "input must be a string, but this is a list",
    ),
    **{
        f"history {name}": (
            {"instruction": "a", "output": "c", "history": history},
            "history must be a list of pairs of strings",
        )
        for name, history in (
            ("a number", 3),
            ("of strings", ["ab"]),
            ("of halves", [["a"]]),
            ("of objects", [{"a": "b"}]),
            ("of other things", [["a", {"b": 1}]]),
        )
    },
    "no frames": (user([{"type": "video", "video": []}]), "the video has no frames"),
    "fps of zero": (user([{"type": "video", "video": ["a"], "fps": 0}]), "fps is 0; give frames"),
    "video a number": (user([{"type": "video", "video": 3}]), "a video is a path or a list"),
    "no chunks": (chunks(), "with at least one chunk"),
    "chunk a list": (chunks([1]), "chunk 0 must be an object"),
    "chunk of nothing": (chunks({"type": "text"}), "chunk 0 has neither tokens nor an image"),
    "tokens as floats": (chunks({"tokens": [1.5]}), "tokens must be a list of token ids"),
    "negative tokens": (chunks({"tokens": [-1]}), "tokens must be a list of token ids"),
    "expected_tokens of zero": (
        chunks({"data": "AA", "expected_tokens": 0}),
        "expected_tokens is 0",
    ),
    "mask of halves": (chunks({"tokens": [1]}, mask=[0.5]), "the mask must be a list of 0 and 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_refused_with_their_place(name):
    raw, words = WRONG[name]
    with pytest.raises(DataError) as error:
        parse_record(raw, "chats.jsonl:7")
    assert str(error.value).startswith("chats.jsonl:7")
    assert words in str(error.value)
