"""Records whose questions and answers, or pictures and captions, have keys of their own.

`find_plain_form` tells the form by the keys, and `PlainForm.turns` makes turns of their values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vlm.data.records.messages import parse_messages
from megatron_vlm.data.records.record import (
    ChatMessage,
    both_given,
    dicts,
    is_empty,
    is_list,
    text_of,
)
from megatron_vlm.data.records.taken import Fields, Keys
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile


@dataclass(frozen=True)
class PlainForm:
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


def find_plain_form(fields: Fields, prompts_only: bool) -> PlainForm | None:
    """Return the form of a record, or None. With `prompts_only`, records need no answer."""
    for form in _FORMS:
        if form.question in fields and (
            prompts_only or any(name in fields for name in form.answers)
        ):
            return form
    has_picture = any(name in fields for name in _PICTURES)
    return _CAPTION if has_picture and any(name in fields for name in _CAPTION.answers) else None


def needed_beside(form: PlainForm, prompts_only: bool) -> Collection[str]:
    """Return the keys that may not be passed over in a record of this form."""
    if form.question is None or form.question == "prompt":
        return ()
    return {*_NEEDED, *QUESTIONS} - ({"answers"} if prompts_only else set())


def parse_pairs(value: Any, key: str, keys: Keys) -> list[ChatMessage]:
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


def answer_at(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the answer at one of these keys, a text or a list of messages, or None."""
    present = [name for name in names if name in raw]
    if not present:
        return None
    if len(present) > 1:
        raise both_given(*present[:2])
    value = raw[present[0]]
    if isinstance(value, str):
        value = _messages_in(value)
    if is_empty(value) or (isinstance(value, str) and not value.strip()):
        raise DataError(
            "is empty: nothing can be compared with it",
            key=present[0],
            remedy="leave the record out, or set data.max_errors=100",
        )
    return value if isinstance(value, str) else dicts(value, present[0])


def _messages_in(text: str) -> Any:
    """Return the messages that a text has as JSON, or the text: an answer may be JSON, too."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = UntrustedFile("").parse(text, "is no JSON")
    except DataError:
        return text
    first = value[0] if is_list(value) and value else value
    is_message = isinstance(first, Mapping) and ({"role", "content"} <= {*first} or "from" in first)
    return value if is_message else text
