"""Conversion of a raw dict, in any of the common formats, into a Record. The keys tell the format,
as docs/data.md lists them."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_vlm.data.records.boxes import parse_objects
from megatron_vlm.data.records.keys import Fields, Keys, misspelled_key
from megatron_vlm.data.records.messages import image_of, media_column, parse_messages, parse_tools
from megatron_vlm.data.records.record import (
    ChatMessage,
    Conversation,
    EncodedRecord,
    ImageChunk,
    Record,
    check_lone_marks,
    is_empty,
    is_list,
    parse_text,
    place_media,
    require_object,
    require_record,
    text_of,
    weight_of,
)
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile, is_too_deep


@dataclass(frozen=True)
class _PlainForm:
    """A form by its keys: that of the question, those that may have the answer, and others that it
    reads. A question that is None is data.caption_prompt, and the answer is the caption."""

    question: str | None
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()

    def turns(self, fields: Fields, keys: Keys, caption_prompt: str) -> list[ChatMessage]:
        """Return the question and, unless the record is only to ask, its answer."""
        turns = _past_turns(fields.take("history")) if "history" in self.more else []
        if self.question is None:
            turns.append(ChatMessage("user", (caption_prompt,) if caption_prompt else ()))
        elif self.question == "prompt":
            turns += as_turns(fields.take("prompt"), "user", keys)
        else:
            names = (self.question, "input") if "input" in self.more else (self.question,)
            texts = [text_of(value, name) for name, value in fields.take_all(*names).items()]
            turns.append(ChatMessage("user", ("\n".join(filter(None, texts)),)))
        name = "" if keys.prompts_only else self._answer_name(fields)
        if name:
            turns += _answer(fields.take(name), name, keys)
        if not (self.question is None or name == "completion"):  # trl's prompts have no marks
            keys.marked += [part for turn in turns for part in turn.parts if isinstance(part, str)]
        return turns

    def _answer_name(self, fields: Fields) -> str:
        """Return the key of the answer. A worked solution is learnt in place of the bare answer
        beside it."""
        present = [name for name in self.answers if name in fields]
        names = [name for name in present if not is_empty(fields.values[name])] or present
        fields.take(*(name for name in names if name != "answer" or "solution" not in names))
        return names[0]


def _answer(value: Any, name: str, keys: Keys) -> list[ChatMessage]:
    if name == "completion":
        return as_turns(value, "assistant", keys)
    if name == "answers":
        value = _only_answer(value)
    if value == "":
        raise DataError("is empty", key=name)
    return [ChatMessage("assistant", (text_of(value, name),))]


_FORMS = (
    _PlainForm("prompt", ("completion", "response")),
    _PlainForm("instruction", ("output", "response"), ("input", "history")),
    _PlainForm("query", ("response", "answer"), ("history",)),
    _PlainForm("question", ("solution", "answer", "answers", "response")),
    _PlainForm("problem", ("solution", "answer")),
    _PlainForm("input", ("output",)),
)
_CAPTION = _PlainForm(None, ("text", "caption"))
_PICTURES = ("image", "images", "video", "videos")
_QUESTIONS = tuple(form.question for form in _FORMS if form.question)
# Where a question has a key of its own, these hold other parts of it, or other answers: without
# them something else would be learnt.
_NEEDED = frozenset({"answers", "options", "choices", "context", "passage", "hint"})


def _find_plain_form(fields: Fields, prompts_only: bool) -> _PlainForm | None:
    """Return the form of a record, or None. With `prompts_only`, records need no answer."""
    for form in _FORMS:
        if form.question in fields and (
            prompts_only or any(name in fields for name in form.answers)
        ):
            return form
    has_picture = any(name in fields for name in _PICTURES)
    return _CAPTION if has_picture and any(name in fields for name in _CAPTION.answers) else None


def _parse_pairs(value: Any, key: str, keys: Keys) -> list[ChatMessage]:
    """Parse a list of questions with answers, in the words of ms-swift or the Cauldron."""
    if not is_list(value) or not all(isinstance(pair, Mapping) for pair in value):
        raise DataError("must be a list of objects", key=key)
    turns = []
    for number, pair in enumerate(value):
        with keys.at(f"{key}[{number}]"):
            fields = keys.open(pair)
            fields.take("source")
            question = text_of(fields.take("human", "user"), "user")
            answer = text_of(fields.take("assistant"), "assistant")
        keys.marked += [question, answer]
        turns += [ChatMessage("user", (question,)), ChatMessage("assistant", (answer,))]
    return turns


def as_turns(value: Any, role: str, keys: Keys) -> list[ChatMessage]:
    """Return one turn with this role for a string, and the messages of a list."""
    if value is None or value == "":
        return [] if role == "system" else [ChatMessage(role, ())]
    if isinstance(value, str):
        return [ChatMessage(role, (value,))]
    return parse_messages(value, keys)


def _past_turns(history: Any) -> list[ChatMessage]:
    turns: list[ChatMessage] = []
    for pair in () if history is None else history if is_list(history) else [history]:
        if not is_list(pair) or [type(text) for text in pair] != [str, str]:
            raise DataError(
                "must be a list of pairs of strings, a question and its answer", key="history"
            )
        turns += [ChatMessage("user", (pair[0],)), ChatMessage("assistant", (pair[1],))]
    return turns


def _only_answer(value: Any) -> Any:
    """Return the answer of a list of answers that are all the same."""
    answers = list(value) if is_list(value) else [value]
    if len(answers) == 0 or any(answer != answers[0] for answer in answers):
        raise DataError(
            f"has {len(answers)} answers, and one is to be learnt",
            key="answers",
            remedy="give that one as answer",
        )
    return answers[0]


# The keys of a list of messages or pairs, which identify a format.
_LISTS = ("messages", "conversations", "conversation", "texts")
# Variables of the chat template: trl's object, and the one that decides about thinking.
VARIABLE_KEYS = ("chat_template_kwargs", "enable_thinking")
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# The keys that identify a format, as docs/data.md lists them.
FORMAT_KEYS = frozenset({*_LISTS, *_QUESTIONS, *(name for form in _FORMS for name in form.answers)})
_NAMES = (
    "messages; conversations; prompt and completion; question and answer; instruction and output; "
    "image and text; or chunks"
)


def parse_record(
    raw: Any,
    where: str,
    ignore_keys: Collection[str] = (),
    strict: bool = False,
    lone_marks: Literal["refuse", "text"] = "refuse",
    unused_keys: Counter[str] | None = None,
    caption_prompt: str = "",
    prompts_only: bool = False,
) -> Conversation | EncodedRecord:
    """Parse a raw dict into a Record, or raise a DataError with the problem and its place. A key
    that most likely has a meaning is an error where it is neither read nor in `ignore_keys`. Other
    keys of the record itself are counted in `unused_keys`; `strict` makes them errors, too. With
    `prompts_only`, keys with answers are for the reward alone."""
    keys = Keys(ignore_keys, strict, prompts_only)
    with keys.record_at(where):
        raw = require_record(raw)
        if is_too_deep(raw):
            raise UntrustedFile("", remedy="mend the record or drop it").depth_error()
        fields = keys.record(raw)
        if "chunks" in fields or "model_input" in fields:
            record: Record = _parse_chunks(fields, keys, where)
        else:
            record = _parse_chat(fields, keys, caption_prompt, where)
        keys.check_record(fields, record)
        if lone_marks == "refuse":
            check_lone_marks(keys.marked, record)
    if unused_keys is not None:
        unused_keys.update(keys.unused_keys)
    return record


def _parse_chat(fields: Fields, keys: Keys, caption_prompt: str, where: str) -> Conversation:
    turns = _parse_turns(fields, keys, caption_prompt)
    turns = as_turns(fields.take("system", "system_prompt"), "system", keys) + turns
    columns = {kind: media_column(fields, kind, keys) for kind in ("image", "video")}
    turns = place_media(turns, columns)
    for number, turn in enumerate(turns):
        with keys.at(f"message {number}"):
            _check_turn(turn, is_first=number == 0, is_learnt=not keys.prompts_only)
    objects = parse_objects(fields.take("objects"), turns, keys)
    variables = _variables(fields, keys.ignored)
    return Conversation(where, tuple(turns), parse_tools(fields), objects, variables)


def _parse_turns(fields: Fields, keys: Keys, caption_prompt: str) -> list[ChatMessage]:
    for name in _LISTS:
        if name not in fields or (name == "texts" and not _has_pairs(fields.values[name])):
            continue
        value = fields.take(name)
        pairs = _has_pairs(value)
        turns = _parse_pairs(value, name, keys) if pairs else parse_messages(value, keys)
        if not turns:
            raise DataError("is empty", key=name)
        return turns
    form = _find_plain_form(fields, keys.prompts_only)
    if form is None:
        raise _unknown_format(fields.values)
    if form.question not in (None, "prompt"):
        keys.needed = {*_NEEDED, *_QUESTIONS} - ({"answers"} if keys.prompts_only else set())
    return form.turns(fields, keys, caption_prompt)


def _variables(fields: Fields, ignored: Collection[str]) -> dict[str, Any]:
    """Return the variables of the chat template that the record sets."""
    given = fields.take("chat_template_kwargs") or {}
    given = parse_text(given, "chat_template_kwargs") if isinstance(given, str) else given
    filled = require_object(given, "chat_template_kwargs").items()
    named = {str(name): value for name, value in filled if value is not None}
    variables = {name: value for name, value in named.items() if name not in ignored}
    if taken := sorted(_OWN_VARIABLES & variables.keys()):
        raise DataError(
            "is not a variable that a record may set",
            key=f"chat_template_kwargs.{taken[0]}",
            remedy="leave it out; messages and tools have keys of their own",
        )
    thinks = fields.take("enable_thinking")
    if thinks is not None and variables.setdefault("enable_thinking", thinks) != thinks:
        raise DataError(
            "differs from that of chat_template_kwargs",
            key="enable_thinking",
            found=thinks,
            remedy="give one of them",
        )
    return variables


def _check_turn(turn: ChatMessage, is_first: bool, is_learnt: bool) -> None:
    """Refuse a system message inside a chat, and an answer to be learnt that is pictures alone:
    only its end would be learnt."""
    if turn.role == "system" and not is_first:
        raise DataError(
            ": only the first message may be a system message", key="role", found="system"
        )
    is_picture = turn.parts and not any(isinstance(part, str) for part in turn.parts)
    says_more = turn.tool_calls or turn.reasoning or turn.weight == 0
    if is_learnt and turn.role == "assistant" and is_picture and not says_more:
        raise DataError(
            ": the answer is a picture or a video, as in data for making pictures, and the "
            "model writes text alone",
            key="content",
            remedy="leave such records out, or set weight: 0 for this message to show it "
            "without learning it",
        )


def _has_pairs(value: Any) -> bool:
    """Return whether the entries of a list have an answer each, in place of a role."""
    first = value[0] if is_list(value) and len(value) else None
    return isinstance(first, Mapping) and "assistant" in first and not {"role", "from"} & {*first}


class OnlyAsksError(DataError):
    """A record that has a question and no answer."""


def _unknown_format(raw: Mapping[str, Any]) -> DataError:
    key_names = sorted(map(str, raw))
    if question := next((name for name in _QUESTIONS if name in raw), ""):
        return OnlyAsksError(
            f"has a question, and none of the keys {key_names} is known to have its answer",
            key=question,
            remedy="name the answer completion, response or answer; a record that only asks is "
            "for megatron-vlm rl, whose reward gets all other keys",
        )
    known = FORMAT_KEYS - {"texts"}  # most likely, `text` is no slip of it
    slips = [(key, misspelled_key(key, known)) for key in key_names if key not in known]
    likely = [f"{key!r} is most likely {near!r}" for key, near in slips if near]
    return DataError(
        f": the keys {key_names} match no known format",
        remedy=f"give {'; '.join([_NAMES, *likely])}; or name your keys by data.columns; see "
        "docs/data.md",
    )


def _parse_chunks(fields: Fields, keys: Keys, where: str) -> EncodedRecord:
    """Parse a raw dict that has `chunks` or `model_input`."""
    chunks: Any = fields.take("chunks", "model_input")
    if isinstance(chunks, Mapping):
        with keys.at("model_input"):
            chunks = keys.open(chunks).take("chunks")
    if not is_list(chunks) or not len(chunks):
        raise DataError("must be a list with at least one chunk", key="chunks")
    parsed = []
    for number, chunk in enumerate(chunks):
        with keys.at(f"chunk {number}"):
            parsed.append(_parse_chunk(chunk, keys))
    mask = fields.take("mask", "loss_mask", "weights")
    if mask is not None:
        if not is_list(mask):
            raise DataError(
                "must be a list of weights such as 0 and 1, one for each token", key="mask"
            )
        mask = tuple(weight_of(value, f"mask[{i}]") for i, value in enumerate(mask))
    return EncodedRecord(where, tuple(parsed), mask)


def _parse_chunk(chunk: Any, keys: Keys) -> tuple[int, ...] | ImageChunk:
    fields = keys.open(chunk)
    fields.take("type")
    if chunk.get("tokens") is not None:
        fields.take("tokens")
        tokens = chunk["tokens"]
        if not is_list(tokens) or any(type(t) is not int or t < 0 for t in tokens):
            raise DataError("must be a list of token ids", key="tokens")
        return tuple(tokens)
    fields.take("format")  # the bytes of a picture tell it
    source, expected = fields.take("data", "image", "location"), fields.take("expected_tokens")
    if source is None:
        raise DataError(f"has neither tokens nor an image; its keys are {sorted(fields.values)}")
    if isinstance(source, str) and fields.take("type") == "image" and "data" in fields:
        source = f"data:image;base64,{source}"  # JSON carries bytes as base64
    if expected is not None and (type(expected) is not int or expected < 1):
        raise DataError(key="expected_tokens", found=expected, allowed="a count, at least 1")
    return ImageChunk(image_of(source, keys), expected)
