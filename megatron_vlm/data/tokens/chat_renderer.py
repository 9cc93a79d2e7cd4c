"""Chats as tokens: rendered once by the tokenizer's own template, with the span of every message by
the family's chat format. The trained messages are chosen here. Text that merely spells a special
token never becomes one, so thoughts and calls are taken out of the text of an answer.

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

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.records.record import ChatMessage, Conversation
from megatron_vlm.data.tokens.chat_template import THINKING_VARIABLE, AnswerOpening, ChatTemplate
from megatron_vlm.data.tokens.tokenizer import PRIVATE_USE, add_special_tokens, split_special_tokens
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.chat_format import ChatFormat, RenderedText
from megatron_vlm.io.untrusted import UntrustedFile


@dataclass(frozen=True)
class RenderedMessage:
    """A message of the rendered text: tokens [body, end) after its role, with its closing token."""

    role: str
    body: int
    end: int
    turns: list[ChatMessage]  # turns that it shows
    is_after_result: bool = False  # an answer in the turn of the result before it

    @property
    def weight(self) -> float | None:
        """Weight of its tokens' losses, if the record has one."""
        return self.turns[0].weight if self.turns else None


def choose_trained(
    messages: Sequence[RenderedMessage], train_on: str | Sequence[str]
) -> list[bool]:
    """Return a flag for each message: true if data.train_on picks it."""
    if train_on == "record":
        return [bool(message.weight) for message in messages]
    if train_on == "last_assistant":
        answers = (m for m in reversed(messages) if m.role == "assistant" and m.turns)
        last = next((message.turns[-1] for message in answers), None)
        return [any(turn is last for turn in message.turns) for message in messages]
    roles = ["assistant"] if train_on == "all_assistant" else train_on
    return [message.role in roles for message in messages]


def weight_of_message(message: RenderedMessage, where: str) -> float:
    """Return the weight of the loss of each token in the message."""
    if len(weights := {turn.weight for turn in message.turns}) > 1:
        listing = ", ".join("none" if weight is None else f"{weight:g}" for weight in weights)
        raise DataError(
            f"differs between {len(message.turns)} {message.role} messages that the chat template "
            f"shows as one: {listing}",
            place=where,
            key="weight",
            remedy="give them the same",
        )
    return 1.0 if message.weight is None else message.weight


def with_thoughts(turn: ChatMessage, chat_format: ChatFormat) -> ChatMessage:
    """Take the thoughts at the beginning of an answer out of its text."""
    thoughts, first = chat_format.thoughts, next(iter(turn.parts), None)
    is_marked = turn.role == "assistant" and thoughts.end in chat_format.shown
    if not is_marked or turn.reasoning or not isinstance(first, str):
        return turn
    block, end, rest = first.partition(thoughts.end)
    if not end or not block.startswith(thoughts.opened):
        return turn
    reasoning = block.removeprefix(thoughts.opened).strip("\n")
    return replace(turn, reasoning=reasoning, parts=(rest, *turn.parts[1:]))


def message_of(
    text: str, chat_format: ChatFormat, tools: Sequence[Mapping[str, Any]]
) -> ChatMessage:
    """Return an answer with its first thoughts and, if all can be read, its calls. Later thoughts
    are cut out, as the template would do."""
    message, calls = ChatMessage("assistant", (text,)), chat_format.calls
    if calls.start not in chat_format.shown:
        return message
    message = with_thoughts(message, chat_format)
    said, cut_out = str(message.parts[0]), chat_format.thoughts.cut_out
    found = calls.read(said, tools)
    if not found:
        return replace(message, parts=(cut_out(said),))
    functions = ({"name": name, "arguments": values} for name, values in found)
    named = tuple({"type": "function", "function": each} for each in functions)
    return replace(message, parts=(cut_out(said.partition(calls.start)[0]),), tool_calls=named)


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
        chat_format: ChatFormat,
        variables: Mapping[str, Any] | None = None,
    ):
        """Check the tokenizer and its template. `variables` are data.template_kwargs."""
        self.outside = UntrustedFile(
            f"the tokenizer of {tokenizer.name_or_path}",
            ConfigError,
            "give the tokenizer's files as the checkpoint has them",
        )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, self.outside, chat_format, dict(variables or {}))
        self.chat_format = chat_format
        names, marks = chat_format.tokens, chat_format.marks
        add_special_tokens(tokenizer, names)
        with self.outside.wrap_errors("cannot look up its tokens"):
            ids = tokenizer.convert_tokens_to_ids(list(names))
            known = [None if id is None else tokenizer.convert_ids_to_tokens(id) for id in ids]
        for name, known_name in zip(names, known, strict=True):
            if known_name != name:
                raise ConfigError(
                    "is not among its tokens, and the model's chat format needs it",
                    place=self.outside.name,
                    key=name,
                )
        self.id_of = id_of = dict(zip(names, ids, strict=True))
        self.start_id = id_of[chat_format.opens]
        self.end_ids = tuple(id_of[end] for end in chat_format.ends)
        self.image_id, self.video_id = id_of[marks.image], id_of[marks.video]
        self.vision_start_id, self.vision_end_id = id_of[marks.start], id_of[marks.end]
        added = tokenizer.added_tokens_decoder.values()
        special = sorted({*names, *(token.content for token in added if token.special)})
        self.hidden_ids = {
            id
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in chat_format.shown
        }
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
                renderer = ChatRenderer(self.tokenizer, self.chat_format, variables)
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
        cfg: DataConfig,
        bounded: Callable[[str], str] = str,
        prompt: bool = False,
    ) -> Rendered:
        """Return the tokens and the weights of their losses. `videos` has the text of each video.
        `bounded` may shorten the text, or refuse it, before it costs time and memory as tokens. A
        prompt is followed by what opens an answer, or ends within its last one."""
        turns = tuple(with_thoughts(turn, self.chat_format) for turn in chat.turns)
        chat = replace(chat, turns=turns)
        chat, split_mark = split_special_tokens(chat, self.special, cfg.special_tokens)
        text = self.template.text_of(chat)
        is_opened = prompt and not chat.is_continued
        opening = self.template.opening_of(chat, text) if is_opened else ""
        closing = self.template.closing_of(chat, text) if chat.is_continued else ""
        begin_answer = self.chat_format.begin_answer
        if begin_answer is not None and not prompt and chat.turns[-1].role == "assistant":
            text = begin_answer(text, self.template.openings, self.template.hidden_thoughts(chat))
        marks = self.chat_format.marks
        text = bounded(text).replace(marks.image, marks.picture)
        text, video_chars = _fill(text, marks.video, videos, split_mark, chat.where)
        ids_U, starts_U = self._tokenize(text.split(split_mark) if split_mark else [text])
        text = text.replace(split_mark, "") if split_mark else text
        rendered_messages = self._messages(chat, text, ids_U, starts_U)
        weights_U = np.zeros(len(ids_U), dtype=np.float32)
        for message, is_trained in zip(
            rendered_messages, choose_trained(rendered_messages, cfg.train_on), strict=True
        ):
            if is_trained and message.turns:
                first = message.body + self._given(message, ids_U)
                weights_U[first : message.end] = weight_of_message(message, chat.where)
        places = np.searchsorted(starts_U, video_chars)
        if closing:
            ids_U = ids_U[starts_U < len(text) - len(closing)]
            weights_U = weights_U[: len(ids_U)]
        if opening:
            opening_K = self._tokenize([opening])[0]
            ids_U = np.concatenate([ids_U, opening_K])
            weights_U = np.pad(weights_U, (0, len(opening_K)))
        return Rendered(ids_U, weights_U, tuple(places.tolist()))

    def _given(self, message: RenderedMessage, ids_U: np.ndarray) -> int:
        """Return how many of the first tokens of an answer its prompt has already."""
        opening = self._opening_after_result if message.is_after_result else self.opening
        if message.role != "assistant" or opening is None:
            return 0
        return opening.given(ids_U[message.body : message.end])

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
        """Bytes that no token exceeds. Where a vocabulary has a character for each byte, they are
        up to twice the bytes of its longest token."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return max(len(text.encode()) for text in (*self.tokenizer.get_vocab(), *added))

    def shorten(self, text: str, tokens: int) -> str:
        """Keep at least the first `tokens` tokens of a text, and of the rest only empty turns."""
        end = tokens * self._longest_token
        while self.min_tokens_of(text[:end]) < tokens + _SPARE and end < len(text):
            end *= 2
        space = re.compile(r"\s").search(text, end, end + _LONG_WORD)  # Words are cut there anyway.
        end = space.start() if space else end
        frame = re.compile(rf"{re.escape(self.chat_format.opens)}[^\n]*\n|{self.special.pattern}")
        marks = []
        for mark in frame.finditer(text):
            if mark.end() > end:
                marks.append(mark[0])
                end = min(end, mark.start())
        return text[:end] + "".join(marks)

    @cached_property
    def opening(self) -> AnswerOpening | None:
        """The part of an answer that a prompt has already, if thinking can be switched off."""
        if not self.template.has_switch:
            return None
        line, _, block = self.template.opening.partition("\n")
        return self._answer_opening(f"{line}\n", block)

    @cached_property
    def _opening_after_result(self) -> AnswerOpening | None:
        """The same for an answer in the turn of a tool's result."""
        return self._answer_opening("", self.template.openings.after_result)

    def _answer_opening(self, header: str, block: str) -> AnswerOpening | None:
        thoughts = self.chat_format.thoughts
        if not block or not thoughts.empty.startswith(block):
            return None
        ids_K, starts_K = self._tokenize([header + block])
        contrary_K = self._tokenize([thoughts.contrary(block)])[0]
        return AnswerOpening(ids_K[starts_K >= len(header)], contrary_K, thoughts.is_open(block))

    @cached_property
    def end_of_text(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself adds at the end of any text, as that of
        Qwen3-VL-Embedding does. Other programs that read an export add the same."""
        with self.outside.wrap_errors("cannot encode text"):
            whole, bare = (
                list(self.tokenizer("a", add_special_tokens=adds)["input_ids"])
                for adds in (True, False)
            )
        if whole[:1] == [self.tokenizer.bos_token_id]:  # It comes from the template, too.
            whole = whole[1:]
        if whole[: len(bare)] != bare:
            raise ConfigError(
                ": it adds tokens before each text", place=self.outside.name, key="post_processor"
            )
        return tuple(whole[len(bare) :])

    def answer_text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens that do not belong to it."""
        shown = [id for id in ids if id not in self.hidden_ids]
        return str(self.tokenizer.decode(shown))

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
        rendered = RenderedText(text, ids_U, starts_U, self.id_of, chat.where)
        messages, shown = [], 0
        for span in self.chat_format.find_messages(rendered, chat.turns):
            turns = [chat.turns[place] for place in span.turns]
            role = turns[0].role if turns else span.role
            messages.append(RenderedMessage(role, span.body, span.end, turns, span.is_after_result))
            shown = max(shown, *(place + 1 for place in span.turns), 0)
        if left := chat.turns[shown:]:
            raise ConfigError(
                f": the chat template leaves out {len(left)} of {len(chat.turns)} messages, "
                f"the first of which is a {left[0].role} message",
                place=chat.where,
            )
        return messages


def _fill(
    text: str, mark: str, videos: Sequence[str], split_mark: str, where: str
) -> tuple[str, list[int]]:
    """Replace each video placeholder. The returned places do not count the cuts."""
    before, *rest = text.split(mark)
    if len(rest) != len(videos):
        raise ConfigError(
            f": the chat template renders {len(rest)} {mark} for {len(videos)} videos", place=where
        )
    starts = []
    for video, after in zip(videos, rest, strict=True):
        starts.append(len(before) - (before.count(split_mark) if split_mark else 0))
        before += video + after
    return before, starts
