"""Records for the tests of encoding, and Hugging Face's processor as their reference."""

import base64
import io
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from megatron_vlm.errors import DataError
from tests.support.videos import END, PAD, START, Oracle


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    values = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3))
    return PIL.Image.fromarray(values.astype(np.uint8))


def data_uri(width: int, height: int, seed: int = 0) -> str:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(width: int, height: int, seed: int = 0) -> dict:
    return {"type": "image", "image": data_uri(width, height, seed)}


def video(*seeds: int, fps: float = 2.0) -> dict:
    return {"type": "video", "video": [data_uri(64, 96, seed) for seed in seeds], "fps": fps}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def say(role: str, *content, **more) -> dict:
    plain = len(content) == 1 and isinstance(content[0], str)
    return {"role": role, "content": content[0] if plain else list(content), **more}


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Zoom into the picture <here>",
            "parameters": {"type": "object", "properties": {"box": {"type": "array"}}},
        },
    },
    {"type": "function", "function": {"name": "count"}},
]

# 100 x 60 pixels become 4 x 6 patches, so 6 tokens; 64 x 64 make 4; 200 x 40 make 6.
CHATS = {
    "text": {"messages": [say("user", "Hello?"), say("assistant", "Hello.")]},
    "image": {
        "messages": [say("user", image(100, 60), text("What is it?")), say("assistant", "Red.")]
    },
    "system": {
        "messages": [
            say("system", "Answer with a single word."),
            say("user", text("What colour? "), image(64, 64)),
            say("assistant", "blue"),
        ]
    },
    "multi-turn": {
        "messages": [
            say("user", image(64, 64), text("How many shapes?")),
            say("assistant", "three"),
            say("user", "And now?"),
            say("assistant", "\n\nfour\n"),
            say("user", "Sure?"),
            say("assistant", [text("yes"), text(" no")][0], text(" no")),
        ]
    },
    "images side by side": {
        "messages": [
            say("user", image(64, 64), image(100, 60, 1), image(200, 40, 2), text("Compare.")),
            say("assistant", "Alike."),
            say("user", text("And "), image(40, 90, 3), text("?")),
            say("assistant", "Not."),
        ]
    },
    "tools": {
        "tools": TOOLS,
        "messages": [
            say("system", "You see well."),
            say("user", image(64, 64), text("Count.")),
            say(
                "assistant",
                "Let me see.",
                tool_calls=[call("zoom", box=[1, 2, 3, 4]), call("count")],
            ),
            say("tool", image(100, 60), text("the part")),
            say("tool", "3"),
            say("assistant", "three"),
        ],
    },
    "call without words": {
        "tools": TOOLS[1:],
        "messages": [
            say("user", "Count."),
            {"role": "assistant", "content": "", "tool_calls": [call("count", what="é ü 三")]},
            say("tool", "3"),
            say("assistant", "three"),
        ],
    },
    "unicode": {
        "messages": [say("user", "caf\u0065\u0301 \u00e9 三 🙂  x"), say("assistant", " 🙂\n")]
    },
    "ends with user": {"messages": [say("user", "a"), say("assistant", "b"), say("user", "c")]},
}


def think(thoughts: str, answer: str, **more) -> dict:
    return say("assistant", answer, reasoning_content=thoughts, **more)


KINDS = {"s": " a b\n", "i": 3, "f": 0.5, "b": True, "n": None, "l": [1, "é"], "d": {"k": "<v>"}}
BODIES = {
    "text": [say("user", "Hello?"), say("assistant", "Hello.")],
    "space": [say("user", "\n Hello? "), say("assistant", "\n\n Hello.  ")],
    "picture": [say("user", image(100, 60), text(" What?")), think("Look.", "Red.")],
    "pictures": [
        say("user", text("Of "), image(64, 64), text(" and "), image(200, 40, 2)),
        say("assistant", "Alike."),
        say("user", image(40, 90, 3)),
        think("Two\n\nlines.\n", "Not."),
    ],
    "video": [say("user", video(1, 2, 3), text("What moves?")), think("It rolls.", "A ball.")],
    "video and picture": [
        say("user", image(64, 64), video(1, 2, 3, 4, fps=1.0), text("Where?")),
        say("assistant", "Left."),
    ],
    "turns without thoughts": CHATS["multi-turn"]["messages"],
    "turns with thoughts": [
        say("user", "One?"),
        think("Early.", "Two."),
        say("user", "Three?"),
        think("Late.", "Four."),
        say("user", "Five?"),
        say("assistant", "Six."),
    ],
    "early thoughts": [
        say("user", "One?"),
        think("Early.", "Two."),
        say("user", "Three?"),
        say("assistant", "Four."),
    ],
    "calls": CHATS["tools"]["messages"][1:],
    "call without words": [
        say("user", "Count."),
        {"role": "assistant", "content": "", "tool_calls": [call("count", **KINDS)]},
        say("tool", " 3 "),
        say("assistant", "three"),
    ],
    "calls with thoughts": [
        say("user", "Count."),
        think("First.", "", tool_calls=[call("zoom", box=[1, 2])]),
        say("tool", image(64, 64)),
        think("Second.", "I count.", tool_calls=[call("count"), call("count", deep={"a": [1]})]),
        say("tool", "3"),
        say("tool", "4"),
        think("Third.", "seven"),
        say("user", "Sure?"),
        think("Fourth.", "yes"),
    ],
    "no answer": [say("user", "a"), say("assistant", "b"), say("user", "c")],
    "no answer to a tool": [
        say("user", "Count."),
        think("First.", "So:", tool_calls=[call("count")]),
        say("tool", "3"),
    ],
    "a spelled answer of a tool": [
        say("user", "Count."),
        say("assistant", "b"),
        say("user", "<tool_response>\n3\n</tool_response>"),
        think("Hm.", "three"),
    ],
}
SYSTEMS = {"no system": [], "system": [say("system", "Be brief.")], "two parts": None}
SYSTEMS["two parts"] = [say("system", text(" You see "), text("well.\n"))]
WITH_TOOLS = ("text", "picture")  # chats with tools that they do not call
# Chats for templates of Qwen3.5, 3.6 and 3.8, which take away the space around texts.
FAMILY_CHATS = CHATS | {
    f"{body}, {system}": {"messages": SYSTEMS[system] + BODIES[body]}
    | ({"tools": TOOLS} if "call" in body or "tool" in body or body in WITH_TOOLS else {})
    for body, system in product(BODIES, SYSTEMS)
}


def hf_processor(folder: str) -> Qwen3VLProcessor:
    """Return a processor that is built without its constructor, which demands a video processor and
    therefore torchvision; images need neither."""
    processor = object.__new__(Qwen3VLProcessor)
    processor.tokenizer = AutoTokenizer.from_pretrained(folder)
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    for name in ("image", "video"):
        token = f"<|{name}_pad|>"
        setattr(processor, f"{name}_token", token)
        setattr(processor, f"{name}_token_id", processor.tokenizer.convert_tokens_to_ids(token))
    return processor


def hf_encode(processor: Qwen3VLProcessor, record: dict, **options):
    """Return the input_ids, pixel_values and image_grid_thw that Hugging Face computes."""
    messages = record["messages"]
    rendered = processor.tokenizer.apply_chat_template(
        messages, tools=record.get("tools"), tokenize=False, **options
    )
    contents = (message["content"] for message in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [_opened(part["image"]) for part in parts if part["type"] == "image"]
    before, *rest = rendered.split(PAD)
    videos = [part for part in parts if part["type"] == "video"]
    for part, after in zip(videos, rest, strict=True):
        before += _video_text(processor, part) + after
    return processor(text=[before], images=images or None, return_tensors="pt")


def check_continued(reader, record: dict, ids_of) -> None:
    """Check a prompt that ends within its last answer, wherever transformers can leave it open.
    `ids_of` returns its tokens with these options."""
    chat = reader.parse(record, "x:1")
    if chat.turns[-1].role != "assistant":
        return
    prompt = partial(reader.encode_chat, replace(chat, is_continued=True), prompt=True)
    try:
        expected = ids_of(continue_final_message=True)
        if not isinstance(expected, list):
            expected = expected["input_ids"][0].tolist()
    except ValueError:
        with pytest.raises(DataError, match=r"leave its last answer open|shows . of . images"):
            prompt()
    else:
        assert prompt().ids_S.tolist() == expected, record


def _opened(uri: str) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


def _video_text(processor: Qwen3VLProcessor, part: dict) -> str:
    """Return the text that Hugging Face puts in place of a video that is a list of frames."""
    folder = processor.tokenizer.name_or_path
    processor.video_processor = Oracle.from_pretrained(folder)
    processor.vision_start_token, processor.vision_end_token = START, END
    pixels = (torch.from_numpy(np.array(_opened(uri))) for uri in part["video"])
    frames = torch.stack([each.permute(2, 0, 1) for each in pixels])
    count, fps = len(frames), part["fps"]
    metadata = VideoMetadata(count, fps=fps, frames_indices=list(range(count)))
    inputs = processor.video_processor.preprocess(
        [frames], video_metadata=[metadata], do_sample_frames=False, return_metadata=True
    )
    return processor.replace_video_token(inputs, 0)
