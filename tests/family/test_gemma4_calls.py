"""Calls and thoughts in the text of Gemma 4's answers."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_vlm.family.gemma4 import chat
from megatron_vlm.family.gemma4.chat import CHAT, read_calls
from megatron_vlm.serve.protocol.chat_messages import AnswerStream, read_answer

QUOTE = '<|"|>'
VALUES = [
    {},
    {"x": 'say "hi"\n{a:1}, <tool_call|> \\', "n": [1, -2.5, 1e-05, True, None]},
    {"deep": {"a": [{"b": []}, [["c"]]], "d": {}}, "é 三": "ü"},
]
BROKEN = {
    "no name": "call:{}",
    "no call": "look{}",
    "a bare word": "call:look{x:red}",
    "NaN": "call:look{x:NaN}",
    "no key": "call:look{:1}",
    "two values": "call:look{x:1 2}",
    "a loose comma": "call:look{x:1,}",
    "one brace too many": "call:look{x:1}}",
    "a list": "call:look{[1]",
    "an open string": f"call:look{{x:{QUOTE}a}}",
    "too deep": "call:look{x:" + 10**5 * "[" + "}",
    "half of a pair": f"call:look{{x:{QUOTE}\ud800{QUOTE}}}",
}


def written(values: dict) -> str:
    """Return a call as the template writes it."""
    path = chat.__file__.replace("chat.py", "chat_template.jinja")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    with open(path) as file:
        template = environment.from_string(file.read())
    calls = [{"function": {"name": "look", "arguments": values}}]
    text = template.render(messages=[{"role": "assistant", "tool_calls": calls}])
    return text.removeprefix("<|turn>model\n").removesuffix("<|tool_response>")


@pytest.mark.parametrize("values", VALUES)
def test_a_call_is_read_as_it_was_written(values):
    text = written(values)
    assert read_calls(f"So: {text}{text}", []) == 2 * [("look", values)]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_stays_text(name):
    broken = f"<|tool_call>{BROKEN[name]}<tool_call|>"
    for text in (broken, written({}) + broken, written({})[:-1], "words"):
        assert read_calls(text, []) is None


def test_an_answer_is_divided():
    text = "<|channel>thought\nA shape.\n<channel|>So:" + written({"x": "red"})
    answer = read_answer(CHAT, text, False, [{"name": "look"}])
    assert (answer.thoughts, answer.content) == ("A shape.", "So:")
    assert [(call.name, call.arguments) for call in answer.calls] == [("look", {"x": "red"})]
    # After the result of a tool, a prompt that thinks has opened the channel.
    opened = read_answer(CHAT, text.partition("\n")[2], True, [{"name": "look"}])
    assert (opened.thoughts, opened.content) == ("A shape.", "So:")
    stream = AnswerStream(CHAT, False, [{"name": "look"}], [])
    told = [stream.advance(text[:place]) for place in range(len(text))] + [stream.end(answer)]
    assert tuple(map("".join, zip(*told, strict=True))) == ("A shape.", "So:")
