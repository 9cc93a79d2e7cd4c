"""Agents of `megatron-vlm rl` as users write them, with the clients of others as these are, which
find the model by the variables that the trainer sets.

    python rl_agents.py KIND

The kinds are the functions below. Each looks at the picture again with a tool."""

import json
import os
import sys
from typing import Any

import anthropic
import openai
from agents import Agent, Runner, function_tool, set_tracing_disabled

RECORD = json.load(sys.stdin)
PICTURE = RECORD["messages"][0]["content"][0]["image_url"]["url"]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def of_openai() -> str:
    client, messages = openai.OpenAI(), RECORD["messages"]
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    model = os.environ["OPENAI_MODEL"]
    while True:
        asked = client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = asked.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        seen = {"type": "image_url", "image_url": {"url": PICTURE}}
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": [seen]})


def of_anthropic() -> str:
    client = anthropic.Anthropic()
    data = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    picture = {"type": "image", "source": data}
    messages: Any = [{"role": "user", "content": [picture, {"type": "text", "text": "what?"}]}]
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    while True:
        given = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 90, "tools": tools}
        with client.messages.stream(messages=messages, **given) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [picture]} for call in calls
        ]
        messages.append({"role": "user", "content": results})


@function_tool
def look(x: int) -> str:
    """Look at a place."""
    return f"red at {x}"


def of_agents_sdk() -> str:
    set_tracing_disabled(True)
    agent = Agent(name="seer", model=os.environ["OPENAI_MODEL"], tools=[look])
    parts: Any = [
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        {"type": "input_text", "text": "what?"},
    ]
    return str(Runner.run_sync(agent, [{"role": "user", "content": parts}]).final_output)


if __name__ == "__main__":
    print(json.dumps({"reward": float(globals()[sys.argv[1]]() == "It is red.")}))
