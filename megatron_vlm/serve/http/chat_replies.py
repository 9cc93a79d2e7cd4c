"""Answers of the chat routes: their parts, and their growth while they are drawn."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request

from megatron_vlm.serve.http.chat_prompt import ChatPrompt, ChatTexts
from megatron_vlm.serve.http.chat_samples import ChatSamples
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.protocol.chat_answers import (
    AnswerStream,
    ChatAnswer,
    cut_at_stop,
    read_answer,
)
from megatron_vlm.serve.protocol.payloads import Sampled, Samples

PIECE_S = 0.05  # seconds between two events of a stream
PING_S = 15.0  # seconds without one after which a stream says that it is alive


@dataclass(frozen=True)
class ChatRequest:
    """A chat that is to be answered."""

    prompt: ChatPrompt
    tools: Sequence[dict[str, Any]]
    stops: Sequence[str]
    num_answers: int = 1

    @staticmethod
    def of_tokens(ids: list[int], stops: Sequence[str]) -> "ChatRequest":
        """Return a prompt that is no chat."""
        return ChatRequest(ChatPrompt([], ids, is_thinking=False), (), stops)


@dataclass(frozen=True)
class Reply:
    """An answer to a chat."""

    sampled: Sampled
    answer: ChatAnswer
    stop: str | None  # the stop string that has ended it
    shown: int  # number of its tokens that are not the end or a part of a stop string

    @property
    def is_whole(self) -> bool:
        """True if it ended by itself."""
        return self.sampled.stopped


@dataclass(frozen=True)
class Delta:
    """Text that follows in an answer."""

    index: int
    kind: Literal["thoughts", "content"]
    text: str


def replies(texts: ChatTexts, question: ChatRequest, samples: Samples) -> list[Reply]:
    """Return the answers that were drawn."""
    return [_reply(texts, question, sampled) for sampled in samples.sequences]


def _reply(texts: ChatTexts, question: ChatRequest, sampled: Sampled) -> Reply:
    ids = sampled.tokens.tolist()
    text, stop = cut_at_stop(texts.text(ids), question.stops)
    shown = len(ids) - (sampled.stopped and stop is None)
    if stop is not None:
        shown = _tokens_before(texts, ids, len(text.encode()))
    answer = read_answer(texts.chat_format, text, question.prompt.is_thinking, question.tools)
    return Reply(sampled, answer, stop, shown)


def _tokens_before(texts: ChatTexts, ids: Sequence[int], size: int) -> int:
    """Return how many tokens begin within the first bytes of the text."""
    begun = 0
    for number, token in enumerate(ids):
        if begun >= size:
            return number
        begun += len(texts.bytes_of(token))
    return len(ids)


class GrowingReplies:
    """Answers to a chat while they are drawn. At the end `replies` has them."""

    def __init__(
        self, chats: ChatSamples, request: Request, call: Call, question: ChatRequest
    ) -> None:
        self.question, self.texts = question, chats.texts
        self.replies: list[Reply] = []
        self._news = chats.follow(request, call)
        self._streams = [
            AnswerStream(
                self.texts.chat_format, question.prompt.is_thinking, question.tools, question.stops
            )
            for _ in range(question.num_answers)
        ]
        self._grow = [chats.texts.growing() for _ in self._streams]

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield what follows in the answers. An empty list says that the connection is alive."""
        told = time.monotonic()
        async for news in self._news:
            if isinstance(news, Samples):
                self.replies = await asyncio.to_thread(replies, self.texts, self.question, news)
                ends = zip(self._streams, self.replies, strict=True)
                yield _deltas([stream.end(reply.answer) for stream, reply in ends])
                continue
            grown = zip(self._streams, self._grow, news, strict=False)  # none is not streamed
            deltas = _deltas([stream.advance(grow(ids)) for stream, grow, ids in grown])
            if deltas or time.monotonic() - told > PING_S:
                told = time.monotonic()
                yield deltas
                await asyncio.sleep(PIECE_S)


def _deltas(grown: Sequence[tuple[str, str]]) -> list[Delta]:
    """Return the texts that are not empty."""
    deltas: list[Delta] = []
    for index, (thoughts, content) in enumerate(grown):
        deltas += [Delta(index, "thoughts", thoughts)] if thoughts else []
        deltas += [Delta(index, "content", content)] if content else []
    return deltas
