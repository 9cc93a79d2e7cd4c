"""Prompts of two turns as verifiers' train client makes them: its renderer renders the first, and
extends what was drawn for the second. Reads JSON, and prints the ids of both."""

import json
import sys
from types import SimpleNamespace

from renderers.qwen3_vl import Qwen3VLRenderer
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

given = json.load(sys.stdin)
processor = SimpleNamespace(
    image_processor=Qwen2VLImageProcessorPil.from_pretrained(given["model"])
)
tokenizer = AutoTokenizer.from_pretrained(given["model"])
# The renderer asks for these tokens, and refuses one that is also the unknown token. No text here
# has any of them.
tokenizer.unk_token = None
names = ("tool_call", "tool_response", "think")
tokenizer.add_tokens([f"<{mark}{name}>" for name in names for mark in ("", "/")])
renderer = Qwen3VLRenderer(tokenizer, processor=processor)
first = renderer.render_ids(given["first"], add_generation_prompt=True)
second = renderer.bridge_to_next_turn(first, given["drawn"], given["second"])
print(json.dumps([first, second.token_ids]))
