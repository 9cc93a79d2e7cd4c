"""The chat template of a tokenizer: a program that turns messages into text. It may raise anything
and may never end; what it refuses is an error of the record. If it can switch reasoning off, a
prompt has a part of the answer, and some answers begin as no prompt asks.

Shapes: U tokens before placeholders are expanded, S tokens, K tokens of a pattern."""

import ctypes
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.records.record import ChatMessage, Conversation, Image
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.chat_format import ChatFormat, Openings
from megatron_vlm.io.untrusted import UntrustedFile, reason

_THOUGHT = "thought before it is said"  # text that no template has
_CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
_PATIENCE_S = 60.0  # limit for a template to render a chat, which takes milliseconds
THINKING_VARIABLE = "enable_thinking"  # variable of a chat template
THINKING_VARIABLES = (THINKING_VARIABLE, "preserve_thinking")  # A template would take "no" for yes.


class ChatTemplate:
    """The template of a tokenizer, with the values of its variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        outside: UntrustedFile,
        chat_format: ChatFormat,
        variables: Mapping[str, Any],
    ):
        """Check the template and its variables, which are data.template_kwargs."""
        if not isinstance(tokenizer.chat_template, str) or not tokenizer.chat_template:
            raise ConfigError(
                "is missing",
                place=outside.name,
                key="chat_template",
                remedy="give the tokenizer's files as the checkpoint has them: hf download "
                "ORG/NAME --exclude '*.safetensors'",
            )
        self.tokenizer, self.outside, self.variables = tokenizer, outside, variables
        self.chat_format, self.thoughts = chat_format, chat_format.thoughts
        self.name = f"the chat template of {tokenizer.name_or_path}"
        self._check_variables()

    def text_of(self, chat: Conversation) -> str:
        """Return the text of a chat."""
        try:
            messages = [self._form(turn) for turn in chat.turns]
            text = self._apply(messages, tools=list(chat.tools) or None)
            is_hidden = bool(self._hidden(chat)) and self.hidden_thoughts(chat) == ""
        except TemplateSyntaxError as error:
            raise self.outside.error(f"its chat template is wrong: {reason(error)}") from error
        except Exception as error:  # a template is a program, which may raise anything
            raise DataError(
                f": {self.name} cannot show it: {error}",
                place=chat.where,
                remedy=self.chat_format.remedy_of(str(error)),
            ) from error
        if is_hidden:
            raise DataError(
                f"of an answer is not shown by {self.name}",
                place=chat.where,
                key="reasoning_content",
                remedy="train a checkpoint whose template does, as of Thinking ones, or leave "
                "it out with data.ignore_keys=[reasoning_content,reasoning,thinking]",
            )
        return text

    def hidden_thoughts(self, chat: Conversation) -> str:
        """Return the thoughts of the answer that ends the chat, if the template does not show them
        and the chat format can."""
        hidden = self._hidden(chat)
        is_last = hidden == [chat.turns[-1]] and self.chat_format.begin_answer is not None
        return chat.turns[-1].reasoning if is_last else ""

    def _hidden(self, chat: Conversation) -> list[ChatMessage]:
        """Return the answers whose thoughts the template should show, and does not. If a format can
        write the last answer's thoughts, no template shows thoughts before a question."""
        turns = chat.turns
        if self.chat_format.begin_answer is not None:
            asked = max((n for n, turn in enumerate(turns) if turn.role == "user"), default=-1)
            turns = turns[asked + 1 :]
        return [turn for turn in turns if turn.reasoning and not self.shows_thoughts_of(turn)]

    def opening_of(self, chat: Conversation, text: str) -> str:
        """Return what the template adds to the text of a chat when an answer is to follow."""
        if self.chat_format.begin_answer is None:
            return self.opening  # always the same
        messages = [self._form(turn) for turn in chat.turns]
        opened = self._apply(messages, tools=list(chat.tools) or None, add_generation_prompt=True)
        if not opened.startswith(text):
            raise self.outside.error("its chat template changes a chat that an answer follows")
        return opened.removeprefix(text)

    def closing_of(self, chat: Conversation, text: str) -> str:
        """Return the end of the text of a chat, after what its last answer says."""
        messages = [self._form(turn) for turn in chat.turns]
        try:
            said = self._apply(
                messages, tools=list(chat.tools) or None, continue_final_message=True
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise DataError(
                f": {self.name} cannot leave its last answer open: {str(error).splitlines()[0]}",
                place=chat.where,
                remedy="give an answer with text, or end with a message of the user",
            ) from error
        if not text.startswith(said):
            raise self.outside.error("its chat template changes an answer that continues")
        return text.removeprefix(said)

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text that the template renders."""
        options |= self.variables
        with time_limit(_PATIENCE_S):
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    @cached_property
    def shows_reasoning(self) -> bool:
        """True if the template shows the last answer's reasoning; Qwen's show no earlier one."""
        return self._shows_reasoning_with({"content": "b"})

    @cached_property
    def _shows_reasoning_of_calls(self) -> bool:
        """True if it shows reasoning before a call, as do Gemma templates that show no other."""
        return self._shows_reasoning_with({"content": "", "tool_calls": [_CALL]})

    def _shows_reasoning_with(self, fields: Mapping[str, Any]) -> bool:
        answer = {"role": "assistant", **fields, "reasoning_content": _THOUGHT}
        return _THOUGHT in self._apply([{"role": "user", "content": "a"}, answer])

    def shows_thoughts_of(self, turn: ChatMessage) -> bool:
        """Return whether the template shows the reasoning of such an answer, if it is the last."""
        return self.shows_reasoning or (bool(turn.tool_calls) and self._shows_reasoning_of_calls)

    @cached_property
    def _reads_thoughts_in_text(self) -> bool:
        """True if the template finds the thoughts in the text of an answer."""
        if not self.has_switch:
            return True
        question, text = {"role": "user", "content": "a"}, self.thoughts.text_of(_THOUGHT, "b")
        answer = {"role": "assistant", "content": text}
        found, split = (self._apply([question, each]) for each in (answer, self._split(answer)))
        return found == split

    def _form(self, turn: ChatMessage) -> dict[str, Any]:
        """Return the turn in the form that the template expects."""
        message = template_message(turn)
        in_text = self.thoughts.end in str(message["content"])
        return self._split(message) if in_text and not self._reads_thoughts_in_text else message

    def _split(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an assistant's message with the thoughts in its text in their own field."""
        content = message["content"]
        if message["role"] != "assistant" or "reasoning_content" in message:
            return message
        if not isinstance(content, str) or (found := self.thoughts.split(content)) is None:
            return message
        return {**message, "content": found[1], "reasoning_content": found[0]}

    def _check_variables(self) -> None:
        """Raise a ConfigError for a variable that the template does not read or take."""
        for name, value in self.variables.items():
            if not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                raise ConfigError(
                    f": {self.name} does not read it",
                    key=f"data.template_kwargs.{name}",
                    found=value,
                    remedy="correct the name, or leave it out",
                )
            if name in THINKING_VARIABLES and not isinstance(value, bool):
                raise ConfigError(
                    key=f"data.template_kwargs.{name}", found=value, allowed=(True, False)
                )
            if (refusal := self._refusal({name: value})) and not self._refusal({}):
                raise ConfigError(
                    f": {self.name} does not take it: {refusal}",
                    key=f"data.template_kwargs.{name}",
                    found=value,
                    remedy="give a value that it takes, or leave it out",
                )

    def _refusal(self, variables: Mapping[str, Any]) -> str:
        """Return why the template does not show a short chat with these variables, or ""."""
        chat = [{"role": "user", "content": "a"}]
        try:
            with time_limit(_PATIENCE_S):
                self.tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        except Exception as error:  # a template is a program, which may raise anything
            return str(error) or type(error).__name__
        return ""

    @cached_property
    def has_switch(self) -> bool:
        """True if thinking can be switched off in the template."""
        return bool(re.search(rf"\b{THINKING_VARIABLE}\b", str(self.tokenizer.chat_template)))

    @cached_property
    def opening(self) -> str:
        """Text that the template adds when an answer is to follow."""
        return self._opening_after([{"role": "user", "content": ""}])

    @cached_property
    def openings(self) -> Openings:
        """Text that the template adds after a question, and after the result of a tool."""
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": ""},
        ]
        return Openings(self.opening, self._opening_after(chat))

    def opening_after(self, role: str) -> str:
        """Return what the template adds after a message of this role."""
        is_open = role == "tool" and self.chat_format.begin_answer is not None
        return self.openings.after_result if is_open else self.opening

    def _opening_after(self, chat: list[dict[str, Any]]) -> str:
        with self.outside.wrap_errors("its chat template cannot open an answer"):
            closed, opened = (
                self._apply(chat, add_generation_prompt=opens) for opens in (False, True)
            )
        return opened.removeprefix(closed)


def template_message(turn: ChatMessage) -> dict[str, Any]:
    """Return the turn in the form that templates expect."""
    texts = [part for part in turn.parts if isinstance(part, str)]
    content: Any = "".join(texts)
    if len(texts) < len(turn.parts):
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image" if isinstance(part, Image) else "video"}
            for part in turn.parts
        ]
    calls = {"tool_calls": list(turn.tool_calls)} if turn.tool_calls else {}
    thoughts = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
    named = {"name": turn.name, "tool_call_id": turn.call_id}
    of_call = {key: value for key, value in named.items() if value}
    return {"role": turn.role, "content": content, **thoughts, **calls, **of_call}


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TemplateTimeout(Exception):  # noqa: N818 - its text ends a sentence
    """An error that is raised by its class alone, without arguments."""

    def __str__(self) -> str:
        return "it takes so long that it may never end"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TemplateTimeout in this thread after `seconds`, once it runs Python code again."""
    here = ctypes.c_ulong(threading.get_ident())
    timer = threading.Timer(seconds, _raise_in, (here, ctypes.py_object(TemplateTimeout)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _raise_in(here, None)  # A timeout that came too late is not raised elsewhere.


@dataclass(frozen=True)
class AnswerOpening:
    """The tokens after an answer's role in a prompt: an open or an empty block of thoughts."""

    ids_K: np.ndarray
    contrary_K: np.ndarray  # beginning of an answer that such a prompt does not ask for
    is_open: bool  # true if the prompt leaves its block open, so that the model thinks

    def given(self, answer_U: np.ndarray) -> int:
        """Return how many of the answer's first tokens the prompt has already."""
        length = min(len(answer_U), len(self.ids_K))
        other = np.flatnonzero(answer_U[:length] != self.ids_K[:length])
        return int(other[0]) if len(other) else length

    def is_contrary(self, ids_S: np.ndarray, trained_S: np.ndarray) -> bool:
        """Return whether an answer that the prompt does not ask for is trained: an empty block
        where the prompt opens one, or reasoning where the prompt has an empty block."""
        count = len(self.contrary_K)
        starts = np.flatnonzero(ids_S[: max(len(ids_S) - count + 1, 0)] == self.contrary_K[0])
        # Its first tokens may belong to the prompt, so that only the next one is trained.
        return any(
            trained_S[start + count - 1 : start + count + 1].any()
            and np.array_equal(ids_S[start : start + count], self.contrary_K)
            for start in starts.tolist()
        )
