"""Runs in the environment of the public client: tokens of chats as the cookbook's renderers see
them, with -1 for each token of a picture.

renderers.py MODEL RENDERER FILE: the file has a list of records, in the form of OpenAI's; prints
JSON: of each record the prompt, and if it ends with an answer the tokens and which of them are
trained.
"""

import base64
import io
import json
import sys
from pathlib import Path

import tinker
from PIL import Image
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import ToolCall, TrainOnWhat, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer


def part_of(part):
    if part["type"] == "text":
        return part
    file = io.BytesIO(base64.b64decode(part["image"].split(",")[1]))
    return {"type": "image", "image": Image.open(file).convert("RGB")}


def message_of(message):
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [part_of(part) for part in parts]
    if thoughts := message.get("reasoning_content"):
        parts = [{"type": "thinking", "thinking": thoughts}, *parts]
    plain = len(parts) == 1 and parts[0]["type"] == "text"
    found = {"role": message["role"], "content": parts[0]["text"] if plain else parts}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            ToolCall(
                function=ToolCall.FunctionBody(
                    name=call["function"]["name"],
                    arguments=json.dumps(call["function"]["arguments"]),
                )
            )
            for call in calls
        ]
    return found


def ids_of(prompt):
    ids = []
    for chunk in prompt.chunks:
        text = isinstance(chunk, tinker.types.EncodedTextChunk)
        ids += chunk.tokens if text else [-1] * chunk.length
    return [int(each) for each in ids]


def main(model, name, file):
    renderer = get_renderer(name, get_tokenizer(model), get_image_processor(model))
    found = []
    for record in json.loads(Path(file).read_text()):
        messages = [message_of(each) for each in record["messages"]]
        if tools := record.get("tools"):
            system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
            messages = [*renderer.create_conversation_prefix_with_tools(tools, system), *messages]
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        seen = {"prompt": ids_of(renderer.build_generation_prompt(asked))}
        if asked is not messages:
            ids, weights = renderer.build_supervised_example(
                messages, TrainOnWhat.LAST_ASSISTANT_MESSAGE
            )
            seen |= {"ids": ids_of(ids), "trained": [float(each) for each in weights]}
        found.append(seen)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
