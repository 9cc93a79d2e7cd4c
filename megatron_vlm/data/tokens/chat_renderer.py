"""Chats as tokens: rendered once by the tokenizer's own template, which must be ChatML, with the
span of every message between the ids of `<|im_start|>` and `<|im_end|>`. Text that merely spells
these never becomes one of them.

Shapes: U tokens before placeholders are expanded."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.records.record import Conversation
from megatron_vlm.data.tokens.chat_template import (
    CLOSE,
    EMPTY_BLOCK,
    THINKING_VARIABLE,
    AnswerOpening,
    ChatTemplate,
    contrary_text,
)
from megatron_vlm.data.tokens.loss_spans import (
    RenderedMessage,
    choose_trained,
    take_turns,
    weight_of_message,
)
from megatron_vlm.data.tokens.tokenizer import PRIVATE_USE, cut_special_tokens
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.spec import VisionMarks
from megatron_vlm.io.untrusted import UntrustedFile

START, END = "<|im_start|>", "<|im_end|>"
_CUTS = f"[{chr(PRIVATE_USE.start)}-{chr(PRIVATE_USE.stop)}]"
_LONG_WORD = 2**16  # characters without a space
_MAX_RENDERERS = 64  # renderers that are kept, each with other variables of records
_SPARE = 8  # tokens that a mark at the end of a shortened text may take from it


@dataclass(frozen=True)
class Rendered:
    """A chat in tokens, with a single placeholder for each image and video frame."""

    ids_U: np.ndarray  # int32
    weights_U: np.ndarray  # float32, weights of the loss; 0: not trained
    video_starts: tuple[int, ...] = ()  # first token of each video's text


class ChatRenderer:
    """A tokenizer with its template, which turns chats into tokens and locates their messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special_tokens: str,
        marks: VisionMarks,
        variables: Mapping[str, Any] | None = None,
    ):
        """Check the tokenizer and its template. `variables` are data.template_kwargs."""
        self.outside = UntrustedFile(
            f"the tokenizer of {tokenizer.name_or_path}",
            ConfigError,
            "give a Qwen3-VL tokenizer as the checkpoint has it",
        )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, self.outside, dict(variables or {}))
        self.special_tokens, self.marks = special_tokens, marks
        names = (START, END, marks.image, marks.video, marks.start, marks.end)
        with self.outside.wrap_errors("cannot look up its tokens"):
            ids = tokenizer.convert_tokens_to_ids(list(names))
            known = [None if id is None else tokenizer.convert_ids_to_tokens(id) for id in ids]
        for name, known_name in zip(names, known, strict=True):
            if known_name != name:
                raise ConfigError(
                    "is not among its tokens, so that it is not a Qwen-VL tokenizer",
                    place=self.outside.name,
                    key=name,
                )
        self.start_id, self.end_id, self.image_id, self.video_id = ids[:4]
        self.vision_start_id, self.vision_end_id = ids[4:]
        added = tokenizer.added_tokens_decoder.values()
        special = sorted({*names, *(token.content for token in added if token.special)})
        self.special = re.compile("|".join(map(re.escape, special)))
        self._with_variables: dict[str, ChatRenderer] = {}

    def for_chat(self, chat: Conversation) -> "ChatRenderer":
        """Return the renderer with the chat's own variables, which precede data.template_kwargs."""
        if not chat.variables:
            return self
        key = json.dumps(chat.variables, sort_keys=True, default=str)
        if key not in self._with_variables:
            variables = {**self.template.variables, **chat.variables}
            try:
                renderer = ChatRenderer(self.tokenizer, self.special_tokens, self.marks, variables)
            except ConfigError as error:
                name = str(error.key).removeprefix("data.template_kwargs.")
                remedy = f"correct it, or set data.ignore_keys=[{name}]"
                fields = error.fields() | {"place": chat.where, "key": name, "remedy": remedy}
                raise DataError(**fields) from error
            if len(self._with_variables) == _MAX_RENDERERS:
                self._with_variables.clear()
            self._with_variables[key] = renderer
        return self._with_variables[key]

    def render(
        self,
        chat: Conversation,
        videos: Sequence[str],
        train_on: str | Sequence[str],
        bounded: Callable[[str], str] = str,
    ) -> Rendered:
        """Return the tokens and the weights of their losses. `videos` has the text of each video.
        `bounded` may shorten the text, or refuse it, before it costs time and memory as tokens."""
        chat, cut = cut_special_tokens(chat, self.special, self.special_tokens)
        text = self.template.text_of(chat)
        text, video_chars = _fill(bounded(text), self.marks.video, videos, cut, chat.where)
        ids_U, starts_U = self._tokenize(text.split(cut) if cut else [text])
        text = text.replace(cut, "") if cut else text
        rendered_messages = self._messages(chat, text, ids_U, starts_U)
        weights_U = np.zeros(len(ids_U), dtype=np.float32)
        for message, is_trained in zip(
            rendered_messages, choose_trained(rendered_messages, train_on), strict=True
        ):
            if is_trained and message.turns:
                first = message.body + self._given(message, ids_U)
                weights_U[first : message.end] = weight_of_message(message, chat.where)
        return Rendered(ids_U, weights_U, tuple(np.searchsorted(starts_U, video_chars).tolist()))

    def _given(self, message: RenderedMessage, ids_U: np.ndarray) -> int:
        """Return how many of the first tokens of an answer its prompt has already."""
        if message.role != "assistant" or self.opening is None:
            return 0
        return self.opening.given(ids_U[message.body : message.end])

    def is_contrary(self, ids_S: np.ndarray, trained_S: np.ndarray) -> bool:
        """Return whether a trained answer begins as no prompt asks, unless thinking is set."""
        decided = THINKING_VARIABLE in self.template.variables
        opening = None if decided else self.opening
        return opening is not None and opening.is_contrary(ids_S, trained_S)

    def min_tokens_of(self, text: str) -> int:
        """Return a lower bound of the text's number of tokens, by the longest token."""
        bound = len(text.encode()) // self._longest_token
        if not bound:
            return 0
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        text = re.sub(_CUTS, "", text)  # These characters do not become tokens.
        text = normalizer.normalize_str(text) if normalizer else text
        return len(text.encode()) // self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token. The vocabulary has one character for each byte."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return max(map(len, [*self.tokenizer.get_vocab(), *(text.encode() for text in added)]))

    def shorten(self, text: str, tokens: int) -> str:
        """Keep at least the first `tokens` tokens of a text, and of the rest only empty turns."""
        end = tokens * self._longest_token
        while self.min_tokens_of(text[:end]) < tokens + _SPARE and end < len(text):
            end *= 2
        space = re.compile(r"\s").search(text, end, end + _LONG_WORD)  # Words are cut there anyway.
        end = space.start() if space else end
        frame = re.compile(rf"{re.escape(START)}[^\n]*\n|{self.special.pattern}")
        marks = []
        for mark in frame.finditer(text):
            if mark.end() > end:
                marks.append(mark[0])
                end = min(end, mark.start())
        return text[:end] + "".join(marks)

    def open_answer(self, rendered: Rendered) -> Rendered:
        """Return the chat followed by the tokens that open an answer."""
        ids_U = np.concatenate([rendered.ids_U, self._opening_tokens])
        weights_U = np.pad(rendered.weights_U, (0, len(self._opening_tokens)))
        return replace(rendered, ids_U=ids_U, weights_U=weights_U)

    @cached_property
    def opening(self) -> AnswerOpening | None:
        """The part of an answer that a prompt has already, if thinking can be switched off."""
        if not self.template.has_switch:
            return None
        opening = self.template.opening
        line, _, block = opening.partition("\n")
        if not block or not EMPTY_BLOCK.startswith(block):
            return None
        ids_K, starts_K = self._tokenize([opening])
        contrary_K = self._tokenize([contrary_text(block)])[0]
        return AnswerOpening(ids_K[starts_K > len(line)], contrary_K, CLOSE not in block)

    @cached_property
    def _opening_tokens(self) -> np.ndarray:
        """Tokens that the template adds when an answer is to follow."""
        return self._tokenize([self.template.opening])[0]

    @cached_property
    def end_of_text(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself adds at the end of any text, as that of
        Qwen3-VL-Embedding does. Other programs that read an export add the same."""
        with self.outside.wrap_errors("cannot encode text"):
            whole, bare = (
                list(self.tokenizer("a", add_special_tokens=adds)["input_ids"])
                for adds in (True, False)
            )
        if whole[: len(bare)] != bare:
            raise ConfigError(
                ": it adds tokens before each text", place=self.outside.name, key="post_processor"
            )
        return tuple(whole[len(bare) :])

    def ids_of(self, words: Sequence[str]) -> list[int]:
        """Return the token of each word that is one token."""
        vocab = self.tokenizer.get_vocab()
        for word in words:
            if word not in vocab:
                raise ConfigError(
                    "is not one of its tokens",
                    place=self.outside.name,
                    key="rerank.positive_token" if word == words[0] else "rerank.negative_token",
                    found=word,
                )
        return [vocab[word] for word in words]

    def _tokenize(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids, and the character at which each token starts. Pieces are tokenized
        separately: a special token that was cut in two is plain text in both pieces."""
        with self.outside.wrap_errors("cannot encode text"):
            encoded = self.tokenizer(
                pieces,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        starts: list[int] = []
        base = 0
        for piece, offsets in zip(pieces, encoded["offset_mapping"], strict=True):
            starts += [base + start for start, _ in offsets]
            base += len(piece)
        ids = list(itertools.chain(*encoded["input_ids"]))
        return np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int64)

    def _messages(
        self, chat: Conversation, text: str, ids_U: np.ndarray, starts_U: np.ndarray
    ) -> list[RenderedMessage]:
        opens = np.flatnonzero(ids_U == self.start_id)
        closes = np.flatnonzero(ids_U == self.end_id)
        if not len(opens) or len(opens) != len(closes) or (closes < opens).any():
            raise ConfigError(
                f": the chat template renders {len(opens)} {START} and {len(closes)} {END}; only "
                "ChatML templates are supported",
                place=chat.where,
            )
        messages = []
        pending = list(chat.turns)
        for start, close in zip(opens.tolist(), closes.tolist(), strict=True):
            line = text.find("\n", starts_U[start])
            role = text[starts_U[start] + len(START) : line]
            body = int(np.searchsorted(starts_U, line + 1))
            turns = take_turns(pending, role)
            role = turns[0].role if turns else role
            messages.append(RenderedMessage(role, min(body, close), close + 1, turns))
        if pending:
            raise ConfigError(
                f": the chat template leaves out {len(pending)} of {len(chat.turns)} messages, "
                f"the first of which is a {pending[0].role} message",
                place=chat.where,
            )
        return messages


def _fill(
    text: str, mark: str, videos: Sequence[str], cut: str, where: str
) -> tuple[str, list[int]]:
    """Replace each video placeholder. The returned places do not count the cuts."""
    before, *rest = text.split(mark)
    if len(rest) != len(videos):
        raise ConfigError(
            f": the chat template renders {len(rest)} {mark} for {len(videos)} videos", place=where
        )
    starts = []
    for video, after in zip(videos, rest, strict=True):
        starts.append(len(before) - (before.count(cut) if cut else 0))
        before += video + after
    return before, starts
