"""Calls of tools and their results, which formats write in many ways."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.data.records.record import both_given, is_list, parse_text, require_object
from megatron_vlm.data.records.taken import Fields, Keys
from megatron_vlm.errors import DataError

_OF_CALLS = ("type", "id", "index", "cache_control")  # a call's keys beside its name and arguments
_RESULT = "tool_result"  # type of Anthropic's parts with the answer of a tool


def parse_call(call: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Convert a call to {"type": "function", "function": {"name": ..., "arguments": {...}}}, with
    its id, if it has one."""
    if call.get("type") == "tool_use":  # Anthropic's
        call = {{"input": "arguments"}.get(k, k): v for k, v in call.items() if k != "type"}
    with keys.at("a tool call"):
        fields = keys.open(call)
        fields.take_all(*_OF_CALLS)
        if call.get("type") not in (None, "function"):
            raise DataError(key="type", found=call["type"], allowed="function")
        if call.get("function") is not None:
            fields.take("function")
            if not isinstance(call["function"], Mapping):
                raise DataError("is missing", key="function.name")
            fields = keys.open(call["function"])
            fields.take_all(*_OF_CALLS)
        name, arguments = fields.take("name"), fields.take("arguments")
        if not isinstance(name, str) or not name:
            raise DataError("is missing", key="function.name")
        if isinstance(arguments, str):
            arguments = parse_text(arguments, f"arguments of {name}")
        given = require_object({} if arguments is None else arguments, f"arguments of {name}")
    numbered = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": name, "arguments": dict(given)}
    return {"type": "function", **numbered, "function": function}


def split_results(message: Any, keys: Keys) -> list[Any]:
    """Return the messages that one of Anthropic's is: results of tools, which come as parts of a
    user's message, are messages of their own."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    if not is_list(content) or message.get("role") != "user":
        return [message]
    is_result = [isinstance(part, Mapping) and part.get("type") == _RESULT for part in content]
    if not any(is_result):
        return [message]
    if is_result != sorted(is_result, reverse=True):
        raise DataError(
            ": results of tools come before the other parts of a message", key="content"
        )
    pieces: list[Any] = []
    for number, result in enumerate(content[: sum(is_result)]):
        with keys.at(f"part {number}"):
            fields = keys.open(result)
        fields.take_all("type", "cache_control")
        content_of_result, call = fields.take("content"), fields.take("tool_use_id")
        pieces.append({"role": "tool", "content": content_of_result, "tool_call_id": call})
    rest = content[len(pieces) :]
    return [*pieces, {**message, "content": rest}] if rest else pieces


def parse_tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    """Return a record's tools, each as {"type": "function", "function": {...}}, as ms-swift and
    LLaMA-Factory wrap them. OpenAI's older `functions` become tools."""
    tools, functions = fields.dicts("tools"), fields.dicts("functions")
    if tools and functions:
        raise both_given("tools", "functions")
    return tuple(map(_wrap_tool, tools + functions))


def _wrap_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "name" not in tool or "function" in tool or tool.get("type") not in (None, "function"):
        return tool
    names = {"input_schema": "parameters"}  # Anthropic's name
    function = {names.get(key, key): value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
