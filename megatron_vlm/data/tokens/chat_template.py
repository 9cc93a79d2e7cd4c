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
from megatron_vlm.io.untrusted import UntrustedFile, reason

_THOUGHT = "thought before it is said"  # text that no template has
_PATIENCE_S = 60.0  # limit for a template to render a chat, which takes milliseconds
OPEN_BLOCK, CLOSE = "<think>\n", "</think>"
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
THINKING_VARIABLE = "enable_thinking"  # variable of a chat template
THINKING_VARIABLES = (THINKING_VARIABLE, "preserve_thinking")  # A template would take "no" for yes.


class ChatTemplate:
    """The template of a tokenizer, with the values of its variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        outside: UntrustedFile,
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
        self.name = f"the chat template of {tokenizer.name_or_path}"
        self._check_variables()

    def text_of(self, chat: Conversation) -> str:
        """Return the text of a chat."""
        try:
            messages = [self._form(turn) for turn in chat.turns]
            text = self._apply(messages, tools=list(chat.tools) or None)
            has_reasoning = any(turn.reasoning for turn in chat.turns)
            is_hidden = has_reasoning and not self._shows_reasoning
        except TemplateSyntaxError as error:
            raise self.outside.error(f"its chat template is wrong: {reason(error)}") from error
        except Exception as error:  # a template is a program, which may raise anything
            raise DataError(
                f": {self.name} cannot show it: {error}",
                place=chat.where,
                remedy=remedy_of(str(error)),
            ) from error
        if is_hidden:
            raise DataError(
                f"of an answer is not shown by {self.name}",
                place=chat.where,
                key="reasoning_content",
                remedy="train a Thinking checkpoint, or leave it out with data.ignore_keys="
                "[reasoning_content,reasoning,thinking]",
            )
        return text

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text that the template renders."""
        options |= self.variables
        with time_limit(_PATIENCE_S):
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    @cached_property
    def _shows_reasoning(self) -> bool:
        """True if the template shows the last answer's reasoning; Qwen's show no earlier one."""
        answer = {"role": "assistant", "content": "b", "reasoning_content": _THOUGHT}
        return _THOUGHT in self._apply([{"role": "user", "content": "a"}, answer])

    @cached_property
    def _reads_thoughts_in_text(self) -> bool:
        """True if the template finds the thoughts in the text of an answer."""
        if not self.has_switch:
            return True
        question, text = {"role": "user", "content": "a"}, f"<think>\n{_THOUGHT}\n</think>\n\nb"
        answer = {"role": "assistant", "content": text}
        found, split = (self._apply([question, each]) for each in (answer, split_thoughts(answer)))
        return found == split

    def _form(self, turn: ChatMessage) -> dict[str, Any]:
        """Return the turn in the form that the template expects."""
        message = _message(turn)
        in_text = "</think>" in str(message["content"])
        return split_thoughts(message) if in_text and not self._reads_thoughts_in_text else message

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
        chat = [{"role": "user", "content": ""}]
        with self.outside.wrap_errors("its chat template cannot open an answer"):
            closed, opened = (
                self._apply(chat, add_generation_prompt=opens) for opens in (False, True)
            )
        return opened.removeprefix(closed)


def _message(turn: ChatMessage) -> dict[str, Any]:
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
    return {"role": turn.role, "content": content, **thoughts, **calls}


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
        return any(
            trained_S[start + count - 1]
            and np.array_equal(ids_S[start : start + count], self.contrary_K)
            for start in starts.tolist()
        )


def split_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with the thoughts in its text moved into their own field, as
    Qwen3.5's template takes them out of the text; that of Qwen3.8 does not."""
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    if not isinstance(content, str) or CLOSE not in content:
        return message
    thoughts = content.split(CLOSE)[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = content.split(CLOSE)[-1].lstrip("\n")
    return {**message, "content": answer, "reasoning_content": thoughts}


def contrary_text(opening: str) -> str:
    """Return how an answer begins that is contrary to the text that opens answers."""
    return OPEN_BLOCK if CLOSE in opening else EMPTY_BLOCK


_REMEDIES = (
    ("No user query found", "give the chat a message of the user that is no answer of a tool"),
    ("System message cannot contain", "move pictures and videos into a message of the user"),
    ("System message must be at the beginning", "put the system message first"),
)


def remedy_of(refusal: str) -> str:
    """Return the remedy for what the template of a Qwen model refuses, or ""."""
    return next((remedy for text, remedy in _REMEDIES if text in refusal), "")
