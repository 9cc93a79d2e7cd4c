"""ChatML as Qwen's templates write it, and calls of tools in the text of answers."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.chat_format import (
    CallMarks,
    ChatFormat,
    ChatTurn,
    FoundCall,
    MessageSpan,
    RenderedText,
    ThoughtMarks,
    VisionMarks,
    is_blank,
)

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
# Qwen3.5 writes calls as XML: a function with a block for each parameter. A name has a limit, so
# that the time for any answer is linear in its length.
_FUNCTION, _FUNCTION_CALL_END = re.compile(r"<function=([^>\n]{1,256})>\n?"), "</function>"
_PARAMETER, _PARAMETER_CALL_END = re.compile(r"<parameter=([^>\n]{1,256})>\n?"), "</parameter>"
_WORDS = {"True": True, "False": False, "None": None}  # values as its template writes them


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[FoundCall] | None:
    """Return the calls in a text, or None if there is none, or one that cannot be read."""
    calls = [_read_call(block, tools) for block in _blocks(text)]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == text.count(_CALL) else None


def _blocks(text: str) -> Iterator[str]:
    """Yield what is inside the blocks of calls."""
    at = 0
    while (start := text.find(_CALL, at)) >= 0 and (end := text.find(_CALL_END, start)) >= 0:
        yield text[start + len(_CALL) : end].strip()
        at = end + len(_CALL_END)


def _read_call(text: str, tools: Sequence[Mapping[str, Any]]) -> FoundCall | None:
    try:
        name, values = _read_function(text, tools)
        # A model may write what JSON, or a client, cannot take.
        json.dumps([name, values], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(values, dict):
        return None
    return name, values


def _read_function(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return the name and the arguments of a call, or raise an error."""
    function = _FUNCTION.match(text)
    if function is None or not text.endswith(_FUNCTION_CALL_END, function.end()):
        call = json.loads(text)
        return call["name"], call.get("arguments", {})
    name, body, at = function[1].strip(), text[function.end() : -len(_FUNCTION_CALL_END)], 0
    schemas, values = _schemas_of(name, tools), {}
    while parameter := _PARAMETER.search(body, at):
        end = body.find(_PARAMETER_CALL_END, parameter.end())
        if end < 0 or body[at : parameter.start()].strip():
            break
        key, value = parameter[1].strip(), body[parameter.end() : end].removesuffix("\n")
        values[key] = _value(value, _types(schemas.get(key)))
        at = end + len(_PARAMETER_CALL_END)
    if body[at:].strip():
        raise ValueError("has text beside its parameters")
    return name, values


def _schemas_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the declared schema of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters", function.get("input_schema")) or {}
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            if isinstance(properties, Mapping):
                return properties
    return {}


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows."""
    if not isinstance(schema, Mapping):
        return set()
    named, choices = schema.get("type"), schema.get("anyOf")
    types = {each for each in (named if isinstance(named, list) else [named]) if each}
    return types.union(*map(_types, choices if isinstance(choices, list) else []))


def _value(text: str, types: set[str]) -> Any:
    """Return a parameter's value. XML does not tell a text from other values; its schema does."""
    if "string" in types and not ("null" in types and text in ("null", "None")):
        return text
    try:
        return _WORDS[text] if text in _WORDS else json.loads(text)
    except ValueError:
        return text


_TEXT_RULES = r"""
text[lazy]: TEXT
TEXT: /(.|\n)*<\/parameter>/ & ~/(.|\n)*<\/?tool_call>(.|\n)*/"""
# What a schema may have beside its type, if its values are written as they are.
_NOTES = {"type", "title", "description", "default", "examples", "$schema"}
_OF_OBJECTS = {"properties", "required", "additionalProperties", "$defs", "definitions"}


def call_rules(
    tools: Sequence[Mapping[str, Any]], template: str, symbol: Callable[[str], str]
) -> str:
    """Return rules in Lark for a call as a template writes it: as JSON, or Qwen3.5's as XML."""
    is_xml = "<function=" in template
    names, rules = [], _TEXT_RULES if is_xml else ""
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        schema = function.get("parameters") or {"type": "object"}
        name = function.get("name")
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise DataError(key=f"tools[{number}]", found=tool, allowed="a name and parameters")
        names.append(f"call{number}")
        if is_xml:
            blocks = " ".join(_parameter_rules(f"tools[{number}].parameters", schema))
            rules += f"\ncall{number}: {_quote(_tag('function', name))} {blocks} "
            rules += _quote(_FUNCTION_CALL_END)
        else:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            rules += f"\ncall{number}: {_quote(head)} %json {json.dumps(schema)} {_quote('}')}"
    start, end = symbol(_CALL), symbol(_CALL_END)
    return f'call: {start} "\\n" ({" | ".join(names)}) "\\n" {end}{rules}'


def _parameter_rules(where: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield a part of a rule for each parameter, in their order."""
    _refuse_more(where, schema, _NOTES | _OF_OBJECTS)
    required, properties = schema.get("required", []), dict(schema.get("properties", {}))
    properties |= {name: {} for name in required if name not in properties}
    defs = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for name, value in properties.items():
        block = f"{_quote(_tag('parameter', name))} {_value_rule(f'{where}.{name}', value, defs)}"
        yield f'({block} "\\n"){"" if name in required else "?"}'


def _value_rule(where: str, schema: Any, defs: Mapping[str, Any]) -> str:
    end = _quote("\n" + _PARAMETER_CALL_END)
    if "string" not in _types(schema):
        return f"%json {json.dumps({**schema, **defs} if isinstance(schema, dict) else {})} {end}"
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return f"({' | '.join(_quote(str(each)) for each in choices)}) {end}"
    for each in (schema, *schema.get("anyOf", ())):
        _refuse_more(where, each, _NOTES | {"anyOf"})
    return "text"


def _refuse_more(where: str, schema: Mapping[str, Any], known: set[str]) -> None:
    if more := sorted(schema.keys() - known):
        raise DataError(
            f"has {more[0]!r}, to which no answer in Qwen3.5's form can be held",
            key=where,
            remedy="leave it out, or give tool_choice=auto",
        )


def _tag(kind: str, name: str) -> str:
    """Return the line that opens a block, or raise an error if `read_calls` would not find it."""
    line = f"<{kind}={name}>\n"
    found = (_FUNCTION if kind == "function" else _PARAMETER).fullmatch(line)
    if found is None or found[1] != name.strip():
        raise DataError(
            "cannot be written in Qwen3.5's form", place="tools", key=f"the {kind}", found=name
        )
    return line


def _quote(text: str) -> str:
    """Return a text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


CALLS = CallMarks(_CALL, read_calls, call_rules)


_START, _END = "<|im_start|>", "<|im_end|>"


def _find_messages(rendered: RenderedText, turns: Sequence[ChatTurn]) -> list[MessageSpan]:
    """Return a message for each pair of <|im_start|> and <|im_end|>."""
    opens, closes = (
        np.flatnonzero(rendered.ids_U == rendered.id_of[token]) for token in (_START, _END)
    )
    if not len(opens) or len(opens) != len(closes) or (closes < opens).any():
        raise ConfigError(
            f": the chat template renders {len(opens)} {_START} and {len(closes)} {_END}; only "
            "ChatML templates are supported",
            place=rendered.where,
        )
    messages = []
    text, starts_U, shown = rendered.text, rendered.starts_U, 0
    for start, close in zip(opens.tolist(), closes.tolist(), strict=True):
        line = text.find("\n", starts_U[start])
        role = text[starts_U[start] + len(_START) : line]
        body = int(np.searchsorted(starts_U, line + 1))
        found = _turns_of(turns, shown, role)
        messages.append(MessageSpan(role, min(body, close), close + 1, found))
        shown = found.stop
    return messages


def _turns_of(turns: Sequence[ChatTurn], first: int, role: str) -> range:
    """Return the turns that a message with this role shows: one, or several tool messages, which
    Qwen's templates show as one of the user; none for a system prompt of the template's own."""
    roles = [turn.role for turn in turns]
    if first < len(roles) and roles[first] == "system" != role and is_blank(turns[first]):
        first += 1
    end = first
    if role == "user" and roles[first : first + 1] == ["tool"]:
        while end < len(roles) and roles[end] == "tool":
            end += 1
    elif roles[first : first + 1] == [role]:
        end += 1
    return range(first, end)


CHAT = ChatFormat(
    opens=_START,
    ends=(_END,),
    # The templates themselves write what is around a picture.
    marks=VisionMarks(
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image_pad|>"
    ),
    thoughts=ThoughtMarks("<think>\n", "</think>", "<think>\n\n</think>\n\n"),
    calls=CALLS,
    find_messages=_find_messages,
    remedies=(
        ("No user query found", "give the chat a message of the user that is no answer of a tool"),
        ("System message cannot contain", "move pictures and videos into a message of the user"),
        ("System message must be at the beginning", "put the system message first"),
    ),
)
