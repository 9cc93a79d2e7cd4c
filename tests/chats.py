"""Records for the tests of encoding, and Hugging Face's processor as their reference."""

import base64
import io

import numpy as np
import PIL.Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    values = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3))
    return PIL.Image.fromarray(values.astype(np.uint8))


def data_uri(width: int, height: int, seed: int = 0) -> str:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(width: int, height: int, seed: int = 0) -> dict:
    return {"type": "image", "image": data_uri(width, height, seed)}


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
    images = [
        PIL.Image.open(io.BytesIO(base64.b64decode(part["image"].split(",")[1])))
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    return processor(text=[rendered], images=images or None, return_tensors="pt")
