"""Messages of OpenAI's and Anthropic's clients in the form of a record, with pictures as bytes, and
the text of an answer for them: its thoughts, its calls of tools, and what remains of it before a
stop string. Messages name no files and no addresses, since the server would open them for
anybody."""

import base64
import binascii
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.serve.protocol.payloads import RequestError

Json: TypeAlias = dict[str, Any]
_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_CONTENT = "a text, or a list of parts"
_URI = "data:image/png;base64,..."
# Parts of Anthropic's messages, by role.
_BLOCKS = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def read_messages(messages: Any, max_pictures: int) -> list[Json]:
    """Read the messages of a chat completion. An answer at the end is to be continued."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(key="messages", found=messages, allowed="a list of one message or more")
    read = [_message(each, f"messages[{number}]") for number, each in enumerate(messages)]
    if "tool_calls" in read[-1]:
        raise RequestError(
            "ends the chat, and only the text of an answer can be continued",
            key=f"messages[{len(messages) - 1}].tool_calls",
            remedy="add the results of the calls",
        )
    parts = [part for each in read if isinstance(each["content"], list) for part in each["content"]]
    if (pictures := sum(part["type"] == "image" for part in parts)) > max_pictures:
        raise RequestError(
            f"has {pictures} pictures, and limit pictures is {max_pictures}", key="messages"
        )
    return read


def read_prompts(prompt: Any, most: int) -> list[str | list[int]]:
    """Return the prompts of a completion: a text, tokens, or a list of either."""
    prompts = [prompt] if _is_prompt(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise RequestError(
            key="prompt", found=prompt, allowed="a text, a list of tokens, or a list of either"
        )
    if len(prompts) > most:
        raise RequestError(
            f"has {len(prompts)} prompts, and limit client_samples is {most}", key="prompt"
        )
    return prompts


def _is_prompt(value: Any) -> bool:
    ids = value if isinstance(value, list) else []
    return isinstance(value, str) or (bool(ids) and all(type(each) is int for each in ids))


def text_length(value: Any) -> int:
    """Return the characters of all texts in a value of JSON. Files of pictures do not count."""
    length, values = 0, [value]
    while values:
        each = values.pop()
        if isinstance(each, str):
            length += len(each)
        elif isinstance(each, Mapping):
            values += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            values += each
    return length


def _message(message: Any, where: str) -> Json:
    message = as_object(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(key=f"{where}.role", found=role, allowed=tuple(_ROLES))
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise RequestError("is missing", key=f"{where}.content", allowed=_CONTENT)
    read: Json = {"role": _ROLES[role], "content": _content(content, f"{where}.content")}
    if role == "assistant":
        given = {
            "tool_calls": calls,
            "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        }
        read |= {name: value for name, value in given.items() if value}
    if role == "tool":  # some templates show which call it answers
        given = {name: message.get(name) for name in ("name", "tool_call_id")}
        read |= {name: value for name, value in given.items() if isinstance(value, str)}
    return read


def _content(content: Any, where: str) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(key=where, found=content, allowed=_CONTENT)
    return [_part(each, f"{where}[{number}]") for number, each in enumerate(content)]


def _part(part: Any, where: str) -> Json:
    part = as_object(part, where)
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": as_text(part.get("text"), f"{where}.text")}
    if kind in ("image_url", "input_image"):
        at, url = f"{where}.image_url", part.get("image_url")
        if isinstance(url, Mapping):
            at, url = f"{at}.url", url.get("url")
        return {"type": "image", "image": _picture(url, at)}
    raise RequestError(
        ": parts of another type are not supported",
        key=f"{where}.type",
        found=kind,
        allowed=("text", "image_url", "input_text", "input_image"),
    )


def _picture(uri: Any, where: str) -> bytes:
    """Return the file in a data URI."""
    if not isinstance(uri, str) or not uri.startswith("data:"):
        raise RequestError(
            ": this server opens no addresses and no files",
            key=where,
            found=uri if not isinstance(uri, str) or len(uri) <= 120 else uri[:100] + "...",
            allowed=_URI,
        )
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError(key=where, found=uri[:40], allowed=_URI)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"is not base64 ({error})", key=where, allowed=_URI) from error


def from_anthropic(system: Any, messages: Any) -> list[Json]:
    """Return Anthropic's messages in OpenAI's form. A system message among them becomes one of the
    user: most templates show a system message at the beginning alone."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(key="messages", found=messages, allowed="a list of one message or more")
    converted: list[Json] = []
    if system:
        converted.append({"role": "system", "content": system})
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        message = as_object(message, where)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise RequestError(key=f"{where}.role", found=role, allowed=tuple(_BLOCKS))
        role = "user" if role == "system" and converted else role
        if isinstance(content, list):
            converted += _blocks(role, content, f"{where}.content")
        else:
            converted.append({"role": role, "content": content})
    return converted


def _blocks(role: str, content: Sequence[Any], where: str) -> list[Json]:
    """Return the messages of a list of blocks. Results of tools are messages of their own, and
    come before what the user says."""
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        kind = as_object(block, at).get("type")
        if kind not in _BLOCKS[role]:
            raise RequestError(key=f"{at}.type", found=kind, allowed=_BLOCKS[role])
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            numbered = {"id": block["id"]} if isinstance(block.get("id"), str) else {}
            calls.append({"type": "function", **numbered, "function": function})
        elif kind == "redacted_thinking":
            continue  # nobody else can read it
        elif kind == "thinking":
            thoughts.append(as_text(block.get("thinking"), f"{at}.thinking"))
        elif kind == "tool_result":
            said = block.get("content") or ""
            if not isinstance(said, str | list):
                raise RequestError(key=f"{at}.content", found=said, allowed=_CONTENT)
            inner = said if isinstance(said, str) else [_block_part(b, at) for b in said]
            called = {"tool_call_id": block.get("tool_use_id")}
            results.append({"role": "tool", "content": inner, **called})
        else:
            parts.append(_block_part(block, at))
    if not parts and not calls and not thoughts:
        return results
    answer = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
    return [*results, {"role": role, "content": parts, **answer}]


def _block_part(block: Any, where: str) -> Json:
    kind = as_object(block, where).get("type")
    if kind not in ("image", "document"):
        return dict(block)
    source = as_object(block.get("source"), f"{where}.source")
    if kind == "document":
        return _document(block, source, where)
    if source.get("type") != "base64":
        raise RequestError(
            ": this server opens no addresses and no files",
            key=f"{where}.source.type",
            found=source.get("type"),
            allowed="base64",
        )
    uri = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": uri}


def _document(block: Mapping[str, Any], source: Mapping[str, Any], where: str) -> Json:
    """Return a document as text, after its title and its context."""
    if source.get("type") != "text":
        raise RequestError(
            ": only documents of plain text are supported",
            key=f"{where}.source.type",
            found=source.get("type"),
            allowed="text",
        )
    if isinstance(block.get("citations"), Mapping) and block["citations"].get("enabled"):
        raise RequestError("are not supported", key=f"{where}.citations", remedy="leave them out")
    parts = block.get("title"), block.get("context"), source.get("data")
    said = [as_text(part, f"{where}.source.data") for part in parts if part is not None]
    return {"type": "text", "text": "\n".join(said)}


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(key=where, found=value, allowed="an object")
    return value


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(key=where, found=value, allowed="a text")
    return value


_HEAD = 32  # characters of a mark that are looked for at any place near the end of a text


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as an object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ChatAnswer:
    """The parts of an answer."""

    content: str
    thoughts: str | None = None
    calls: tuple[ToolCall, ...] = ()


def cut_at_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[str, str | None]:
    """Return the text before the first stop string from this place on, and that string, or
    None."""
    places = [(at, stop) for stop in stops if (at := text.find(stop, begin)) >= 0]
    if not places:
        return text, None
    place, stop = min(places, key=lambda each: each[0])
    return text[:place], stop


def read_answer(
    chat_format: ChatFormat | None,
    text: str,
    is_thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None,
) -> ChatAnswer:
    """Divide the text of an answer. `is_thinking`: its prompt has opened a block of thoughts. With
    `tools`, blocks become calls if all of them can be read; else they stay text. Without a format
    it is text."""
    if chat_format is None:
        return ChatAnswer(text)
    thoughts, marks = None, chat_format.thoughts
    if is_thinking or text.lstrip().startswith(marks.start):
        before, close, after = text.partition(marks.end)
        thoughts = before.lstrip().removeprefix(marks.start).strip("\n")
        text = after.lstrip("\n") if close else ""
    if not tools:
        return ChatAnswer(text, thoughts)
    found = chat_format.calls.read(text, tools)
    if found is None:
        return ChatAnswer(text, thoughts)
    calls = tuple(ToolCall(f"call_{uuid.uuid4().hex[:24]}", *call) for call in found)
    return ChatAnswer(text.partition(chat_format.calls.start)[0].rstrip(), thoughts, calls)


class AnswerStream:
    """An answer that grows. It gives away no half of a character, no beginning of a stop string,
    and no block that may become a call of a tool."""

    def __init__(
        self,
        chat_format: ChatFormat | None,
        is_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        stops: Sequence[str],
    ) -> None:
        self._chat_format, self._is_thinking = chat_format, is_thinking
        self._call, self._stops, self._marks = "", stops, tuple(stops)
        if chat_format is not None:
            thoughts, self._call = chat_format.thoughts, chat_format.calls.start if tools else ""
            self._marks += (thoughts.start, thoughts.end, *filter(None, [self._call]))
        self._longest_stop = max(map(len, stops), default=0)
        self._searched = 0  # characters before which no stop string begins
        self._thoughts = self._content = ""  # what was given

    def advance(self, text: str) -> tuple[str, str]:
        """Return what follows in the thoughts and in the content, for the text so far."""
        text, stop = cut_at_stop(text.rstrip("\ufffd"), self._stops, self._searched)
        if stop is None:
            self._searched = max(0, len(text) - self._longest_stop)
            text = text[: len(text) - _held_back(text, self._marks)]
        if self._call:
            text = text.partition(self._call)[0].rstrip()
        answer = read_answer(self._chat_format, text, self._is_thinking, None)
        return self._give((answer.thoughts or "").rstrip("\n"), answer.content)

    def end(self, answer: ChatAnswer) -> tuple[str, str]:
        """Return what remains of the whole answer."""
        return self._give(answer.thoughts or "", answer.content)

    def _give(self, thoughts: str, content: str) -> tuple[str, str]:
        given = thoughts[len(self._thoughts) :], content[len(self._content) :]
        self._thoughts, self._content = self._thoughts + given[0], self._content + given[1]
        return given


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many of the last characters may be the beginning of a mark. With long marks it
    may be more than necessary."""
    held = 0
    for mark in marks:
        head, before = mark[:_HEAD], max(0, len(text) - len(mark) + 1)
        if len(mark) > _HEAD and (at := text.find(head, before)) >= 0:
            held = max(held, len(text) - at)
    for size in range(min(_HEAD - 1, len(text)), held, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return held
