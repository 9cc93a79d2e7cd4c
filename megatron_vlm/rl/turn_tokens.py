"""Encoder for the messages of an environment, as the tokens that follow an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_vlm.data.records.formats import VARIABLE_KEYS
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import DataError

_NO_RECORD: Mapping[str, Any] = MappingProxyType({})
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
    ) -> Row:
        """Encode the messages as they follow the token that ends an answer, up to the start of the
        next answer. The answer itself stays as it was drawn: it is not rendered again."""
        variables = _variables(record)
        before = self._tokens_before(variables)
        row = self._row([*_BEFORE, *messages], variables, where)
        count = len(before)
        if row.ids_S[:count].tolist() != before:
            raise DataError(
                ": the chat template shows earlier turns in another way once others follow, so "
                "the model would be trained on what it has not seen",
                place=where,
                key="data.template_kwargs",
                remedy="give values that keep earlier turns as they are, or a template that does",
            )
        return replace(row, ids_S=row.ids_S[count:], labels_S=row.labels_S[count:])

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


def _variables(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in VARIABLE_KEYS if record.get(key) is not None}


def _last_place(ids: Sequence[int], token_id: int) -> int:
    return max(place for place, token in enumerate(ids) if token == token_id)
