"""Prompts of chats, and what renders them: a tokenizer, which the front of the service is given."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megatron_vlm.errors import DataError
from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.protocol.chat_messages import Json, read_messages, text_length

MAX_TOKEN_LENGTH = 16  # maximum characters of a token on average; usual text has about 4
T = TypeVar("T")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat."""

    chunks: list[dict[str, Any]]  # as a sampling request has them
    ids: list[int]  # with a placeholder for each part of a picture
    is_thinking: bool  # the answer begins inside a block of thoughts


class ChatTexts(Protocol):
    """The tokenizer and the chat template, for the routes of chats."""

    @property
    def ends(self) -> Sequence[str]: ...  # tokens that end an answer

    @property
    def chat_format(self) -> ChatFormat: ...

    @property
    def has_switch(self) -> bool: ...  # thinking can be switched off

    def convert_pictures(self, messages: Sequence[Mapping[str, Any]]) -> None: ...

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> ChatPrompt: ...

    def encode(self, text: str) -> list[int]: ...

    def text(self, ids: Sequence[int]) -> str: ...

    def growing(self) -> Callable[[Sequence[int]], str]: ...

    def bytes_of(self, token: int) -> bytes: ...


def too_long(longest: int, what: str, param: str) -> HttpError:
    """Return the error of a prompt for which the model has no room."""
    return HttpError(
        400,
        f"{param}: {what}, and the model takes {longest} tokens with the answer",
        param=param,
        code="context_length_exceeded",
    )


class ChatPrompts:
    """Maker of prompts. The tokenizer serves one thread at a time, and each key waits for it with
    one request at most, so that none keeps the others waiting."""

    def __init__(self, texts: ChatTexts, longest: int, max_pictures: int) -> None:
        self.texts, self.longest, self._max_pictures = texts, longest, max_pictures
        self._thread = ThreadPoolExecutor(1, "chat")
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key

    async def render(
        self,
        key: str,
        messages: Any,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        """Return the prompt of these messages, which are as a client sends them."""

        def read() -> list[Json]:
            chat = read_messages(messages, self._max_pictures)
            self._check_length([chat, tools, variables], "messages")
            self.texts.convert_pictures(chat)
            return chat

        async with self._turns[key]:
            chat = await asyncio.to_thread(read)
            try:
                return await self._in_thread(self.texts.prompt, chat, tools, variables)
            except DataError as error:
                if error.key != "data.max_tokens":  # set to what the model takes
                    raise
                raise too_long(self.longest, "the prompt has more tokens", "messages") from error

    async def encode(self, key: str, text: str) -> list[int]:
        """Return the tokens of a text."""
        self._check_length(text, "prompt")
        async with self._turns[key]:
            return await self._in_thread(self.texts.encode, text)

    async def _in_thread(self, work: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)

    def _check_length(self, value: Any, param: str) -> None:
        """Refuse texts that are far too long, before they cost the time of a tokenizer."""
        if (length := text_length(value)) > MAX_TOKEN_LENGTH * self.longest:
            raise too_long(self.longest, f"the prompt has {length} characters", param)

    def no_thinking(self, is_off: bool) -> dict[str, bool]:
        """Return the variables of the chat template for a request that wants no thoughts. A
        template without a switch has none."""
        return {"enable_thinking": False} if is_off and self.texts.has_switch else {}
