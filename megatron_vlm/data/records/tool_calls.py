"""Calls of tools and their results, which formats write in many ways."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.record import dicts, is_list, parse_text, require_object
from megatron_vlm.errors import DataError

_RESULT = "tool_result"  # type of Anthropic's parts with the answer of a tool


def parse_call(call: Mapping[str, Any], where: str, keys: Keys) -> dict[str, Any]:
    """Convert a call to {"type": "function", "function": {"name": ..., "arguments": {...}}}, with
    its id, if it has one."""
    place, own = f"{where}, a tool call", {"type", "id", "index", "cache_control"}
    if call.get("type") == "tool_use":  # Anthropic's
        call = {{"input": "arguments"}.get(k, k): v for k, v in call.items() if k != "type"}
    function = call.get("function")
    if function is None:
        function = keys.read(call, {*own, "name", "arguments"}, place)
    else:
        keys.read(call, {*own, "function"}, place)
    if call.get("type") not in (None, "function"):
        raise DataError(place=place, key="type", found=call["type"], allowed="function")
    if isinstance(function, Mapping):
        function = keys.read(function, {*own, "name", "arguments"}, place)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise DataError("is missing", place=place, key="function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments, f"arguments of {name}", where)
    values = require_object({} if arguments is None else arguments, where, f"arguments of {name}")
    numbered = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    function = {"name": name, "arguments": dict(values)}
    return {"type": "function", **numbered, "function": function}


def split_results(message: Any, where: str, keys: Keys) -> list[Any]:
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
            ": results of tools come before the other parts of a message",
            place=where,
            key="content",
        )
    pieces: list[Any] = []
    for number, result in enumerate(content[: sum(is_result)]):
        known = {"type", "tool_use_id", "content", "cache_control"}
        fields = keys.read(result, known, f"{where}, part {number}")
        called = {"tool_call_id": fields.get("tool_use_id")}
        pieces.append({"role": "tool", "content": fields.get("content"), **called})
    rest = content[len(pieces) :]
    return [*pieces, {**message, "content": rest}] if rest else pieces


def parse_tools(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """Return a record's tools, each as {"type": "function", "function": {...}}, as ms-swift and
    LLaMA-Factory wrap them. OpenAI's older `functions` become tools."""
    both = [dicts(raw.get(name) or (), name, where) for name in ("tools", "functions")]
    if all(both):
        raise DataError(
            "and functions both have a value", place=where, key="tools", remedy="give one of them"
        )
    return tuple(map(_wrap_tool, [*both[0], *both[1]]))


def _wrap_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "name" not in tool or "function" in tool or tool.get("type") not in (None, "function"):
        return tool
    names = {"input_schema": "parameters"}  # Anthropic's name
    function = {names.get(key, key): value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
