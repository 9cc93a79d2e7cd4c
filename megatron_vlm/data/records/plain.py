"""Records whose questions and answers, or pictures and captions, have keys of their own.

`find_plain_form` tells the form by the keys, and `PlainForm.turns` makes turns of their values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.messages import parse_messages
from megatron_vlm.data.records.record import (
    ChatMessage,
    dicts,
    is_empty,
    is_list,
    single_value,
    text_of,
)
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile


@dataclass(frozen=True)
class PlainForm:
    """A form by its keys: that of the question, those that may have the answer, and others that it
    reads. A question that is None is data.caption_prompt, and the answer is the caption."""

    question: str | None
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()

    def known(self, raw: Mapping[str, Any], prompts_only: bool) -> set[str]:
        """Return the keys of this record that are read. A worked solution is learnt in place of the
        bare answer beside it. With `prompts_only`, answers are not read."""
        present = {name for name in self.answers if name in raw and not prompts_only}
        answers = {name for name in present if not is_empty(raw[name])} or present
        answers -= {"answer"} if "solution" in answers else set()
        return {*answers, *self.more} | ({self.question} if self.question else set())

    def turns(self, raw: Mapping[str, Any], keys: Keys, caption_prompt: str) -> list[ChatMessage]:
        """Return the question and, unless the record is only to ask, its answer."""
        where = keys.where
        turns = _past_turns(raw.get("history", ()), where)
        if self.question is None:
            turns.append(ChatMessage("user", (caption_prompt,) if caption_prompt else ()))
        elif self.question == "prompt":
            turns += as_turns(raw["prompt"], "user", keys)
        else:
            names = (self.question, "input") if "input" in self.more else (self.question,)
            texts = [text_of(raw[name], name, where) for name in names if name in raw]
            turns.append(ChatMessage("user", ("\n".join(filter(None, texts)),)))
        if not keys.prompts_only:
            turns += self._answer(raw, keys)
        if not (self.question is None or "completion" in raw):  # trl's prompts have no marks
            texts = [part for turn in turns for part in turn.parts if isinstance(part, str)]
            keys.marked += texts
        return turns

    def _answer(self, raw: Mapping[str, Any], keys: Keys) -> list[ChatMessage]:
        value = single_value(raw, [name for name in self.answers if name in raw], keys.where)
        name = next(name for name in self.answers if raw.get(name) is value)
        if name == "completion":
            return as_turns(value, "assistant", keys)
        if name == "answers":
            value = _only_answer(value, keys.where)
        if value == "":
            raise DataError("is empty", place=keys.where, key=name)
        return [ChatMessage("assistant", (text_of(value, name, keys.where),))]


_FORMS = (
    PlainForm("prompt", ("completion", "response")),
    PlainForm("instruction", ("output", "response"), ("input", "history")),
    PlainForm("query", ("response", "answer"), ("history",)),
    PlainForm("question", ("solution", "answer", "answers", "response")),
    PlainForm("problem", ("solution", "answer")),
    PlainForm("input", ("output",)),
)
_CAPTION = PlainForm(None, ("text", "caption"))
_PICTURES = ("image", "images", "video", "videos")
QUESTIONS = tuple(form.question for form in _FORMS if form.question)
PLAIN_NAMES = frozenset({*QUESTIONS, *(name for form in _FORMS for name in form.answers)})
# Where a question has a key of its own, these hold other parts of it, or other answers: without
# them something else would be learnt.
_NEEDED = frozenset({"answers", "options", "choices", "context", "passage", "hint"})


def find_plain_form(raw: Mapping[str, Any], prompts_only: bool) -> PlainForm | None:
    """Return the form of a record, or None. With `prompts_only`, records need no answer."""
    for form in _FORMS:
        if form.question in raw and (prompts_only or any(name in raw for name in form.answers)):
            return form
    has_picture = any(name in raw for name in _PICTURES)
    return _CAPTION if has_picture and any(name in raw for name in _CAPTION.answers) else None


def needed_beside(form: PlainForm, prompts_only: bool) -> Collection[str]:
    """Return the keys that may not be passed over in a record of this form."""
    if form.question is None or form.question == "prompt":
        return ()
    return {*_NEEDED, *QUESTIONS} - ({"answers"} if prompts_only else set())


def parse_pairs(value: Any, key: str, keys: Keys) -> list[ChatMessage]:
    """Parse a list of questions with answers, in the words of ms-swift or the Cauldron."""
    if not is_list(value) or not all(isinstance(pair, Mapping) for pair in value):
        raise DataError("must be a list of objects", place=keys.where, key=key)
    turns = []
    for number, pair in enumerate(value):
        where = f"{keys.where}: {key}[{number}]"
        pair = keys.read(pair, {"human", "user", "assistant", "source"}, where)
        question = text_of(single_value(pair, ("human", "user"), where), "user", where)
        answer = text_of(pair.get("assistant"), "assistant", where)
        keys.marked += [question, answer]
        turns += [ChatMessage("user", (question,)), ChatMessage("assistant", (answer,))]
    return turns


def as_turns(value: Any, role: str, keys: Keys) -> list[ChatMessage]:
    """Return one turn with this role for a string, and the messages of a list."""
    if value is None or value == "":
        return [] if role == "system" else [ChatMessage(role, ())]
    if isinstance(value, str):
        return [ChatMessage(role, (value,))]
    return parse_messages(value, keys.where, keys)


def _past_turns(history: Any, where: str) -> list[ChatMessage]:
    turns: list[ChatMessage] = []
    for pair in history if is_list(history) else [history]:
        if not is_list(pair) or [type(text) for text in pair] != [str, str]:
            raise DataError(
                "must be a list of pairs of strings, a question and its answer",
                place=where,
                key="history",
            )
        turns += [ChatMessage("user", (pair[0],)), ChatMessage("assistant", (pair[1],))]
    return turns


def _only_answer(value: Any, where: str) -> Any:
    """Return the answer of a list of answers that are all the same."""
    answers = list(value) if is_list(value) else [value]
    if len(answers) == 0 or any(answer != answers[0] for answer in answers):
        raise DataError(
            f"has {len(answers)} answers, and one is to be learnt",
            place=where,
            key="answers",
            remedy="give that one as answer",
        )
    return answers[0]


def answer_at(raw: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """Return the answer at one of these keys, a text or a list of messages, or None."""
    present = [name for name in names if name in raw]
    if not present:
        return None
    if len(present) > 1:
        raise DataError(
            f"and {present[1]} both have a value",
            place=where,
            key=present[0],
            remedy="give one of them",
        )
    value = raw[present[0]]
    if isinstance(value, str):
        value = _messages_in(value, where)
    if is_empty(value) or (isinstance(value, str) and not value.strip()):
        raise DataError(
            "is empty: nothing can be compared with it",
            place=where,
            key=present[0],
            remedy="leave the record out, or set data.max_errors=100",
        )
    return value if isinstance(value, str) else dicts(value, present[0], where)


def _messages_in(text: str, where: str) -> Any:
    """Return the messages that a text has as JSON, or the text: an answer may be JSON, too."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = UntrustedFile(where).parse(text, "is no JSON")
    except DataError:
        return text
    first = value[0] if is_list(value) and value else value
    is_message = isinstance(first, Mapping) and ({"role", "content"} <= {*first} or "from" in first)
    return value if is_message else text
