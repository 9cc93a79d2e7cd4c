"""Encoder for the messages of an environment, as the tokens that follow an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_vlm.data.records.formats import VARIABLE_KEYS
from megatron_vlm.data.records.record import ChatMessage, Conversation
from megatron_vlm.data.tokens.chat_template import split_thoughts
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import DataError

_NO_RECORD: Mapping[str, Any] = MappingProxyType({})
_NO_LIMIT = 2**31 - 1  # tokens
# Stand-ins for the question and the answer: a template renders the later turns in the same way
# after any text.
_BEFORE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class TurnEncoder:
    """Encoder of messages with the chat template and the image rules of a source of records."""

    def __init__(self, reader: Reader):
        # A program's messages have their images as parts, so placeholders in them are plain text.
        # They have no columns with misspelled names.
        cfg = replace(reader.encoder.cfg, unknown_keys="refuse", lone_marks="text")
        self.reader = replace(reader, kind="chat", encoder=replace(reader.encoder, cfg=cfg))
        # A conversation has what a model wrote, and rl.max_tokens limits its length.
        limits: dict[str, Any] = {"max_tokens": _NO_LIMIT, "truncation": "error"}
        whole = replace(cfg, special_tokens="escape", system=None, **limits)
        self.whole = replace(self.reader, encoder=replace(reader.encoder, cfg=whole))
        self.prompts = reader
        self.end_id = reader.encoder.renderer.end_id
        self.before: dict[str, list[int]] = {}  # tokens of _BEFORE with each choice of variables
        self._tokens_before({})

    def opening(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        record: Mapping[str, Any] = _NO_RECORD,
    ) -> Row:
        """Encode the messages as the beginning of an episode, up to the start of the answer. The
        episode's record may set variables of the chat template."""
        return self._row(messages, _variables(record), where)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        record: Mapping[str, Any] = _NO_RECORD,
    ) -> tuple[Row, bool]:
        """Encode the messages as they follow the token that ends an answer, up to the start of the
        next answer. Return them, and whether the chat template leaves earlier turns as they were.
        Then the answer stays as it was drawn: it is not rendered again."""
        variables = _variables(record)
        before = self._tokens_before(variables)
        row = self._row([*_BEFORE, *messages], variables, where)
        ids = row.ids_S.tolist()
        count = len(before)
        is_continued = ids[:count] == before
        if not is_continued:  # the messages follow the end of the same turn
            ends = [place for place, token in enumerate(ids) if token == self.end_id]
            turns = before.count(self.end_id)
            if len(ends) < turns:
                raise DataError(
                    ": the chat template leaves earlier turns out, so that no answer can follow",
                    place=where,
                    key="data.template_kwargs",
                    remedy="give values that keep earlier turns, or a template that does",
                )
            count = ends[turns - 1] + 1
        return replace(row, ids_S=row.ids_S[count:], labels_S=row.labels_S[count:]), is_continued

    def conversation(
        self, opening: Conversation, said: Sequence[ChatMessage], shown: Sequence[Row], where: str
    ) -> list[int]:
        """Return the tokens of a conversation up to the start of the next answer, with the answers
        as text. Its pictures are those of the rows that were shown, and are not read again."""
        chat = replace(opening, where=where, turns=(*opening.turns, *said))
        sample = self.whole.encode_chat(chat, prompt=True)
        for grids, name in (
            (sample.image_grids, "image_grid_I3"),
            (sample.video_grids, "video_grid_I3"),
        ):
            seen = [grid for row in shown for grid in _grids(row, name)]
            if [list(grid) for grid in grids] != seen:
                raise DataError(
                    f": the chat template shows {len(grids)} of {len(seen)} pictures or videos "
                    "once others follow, or in another size",
                    place=where,
                    remedy="give a template that keeps the pictures of earlier turns",
                )
        return sample.ids_S.tolist()

    def parse_opening(
        self, messages: Sequence[Mapping[str, Any]] | None, where: str, record: Mapping[str, Any]
    ) -> Conversation:
        """Parse the beginning of an episode: messages, or else the prompt of its record."""
        if messages is None:
            chat = self.prompts.parse(record, where)
        else:
            chat = self.reader.parse({**_variables(record), "messages": list(messages)}, where)
        if not isinstance(chat, Conversation):
            raise DataError(
                ": the chat template writes earlier turns in another way once others follow, and "
                "the prompt of this record is tokens, which it cannot write",
                place=where,
                key="chunks",
                remedy="give the prompt as messages",
            )
        return chat

    def parse_reply(
        self, messages: Sequence[Mapping[str, Any]], where: str
    ) -> Sequence[ChatMessage]:
        """Parse messages of the environment."""
        chat = self.whole.parse({"messages": list(messages)}, where)
        assert isinstance(chat, Conversation)
        return chat.turns

    def _tokens_before(self, variables: Mapping[str, Any]) -> list[int]:
        """Return the tokens of the stand-ins. Those after the end of the answer are left out: they
        would open another answer."""
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self.before:
            before = self._row(_BEFORE, variables, "the chat template").ids_S.tolist()
            self.before[key] = before[: _last_place(before, self.end_id) + 1]
        return self.before[key]

    def _row(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str
    ) -> Row:
        record = {**variables, "messages": list(messages)}
        sample = self.reader.encode(record, where, prompt=True)
        return self.reader.row(record, where, sample).row


def answer_message(text: str) -> ChatMessage:
    """Return the message of an answer, with its thoughts apart, as a server gives it to the
    template."""
    parts = split_thoughts({"role": "assistant", "content": text})
    return ChatMessage(
        "assistant", (parts["content"],), reasoning=parts.get("reasoning_content", "")
    )


def _variables(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in VARIABLE_KEYS if record.get(key) is not None}


def _last_place(ids: Sequence[int], token_id: int) -> int:
    return max(place for place, token in enumerate(ids) if token == token_id)


def _grids(row: Row, name: str) -> list[list[int]]:
    grids = getattr(row, name)
    return [] if grids is None else grids.tolist()
