"""Encoder of an environment's messages, as the tokens after an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_vlm.data.records.formats import VARIABLE_KEYS
from megatron_vlm.data.records.record import ChatMessage, Conversation
from megatron_vlm.data.tokens.chat_renderer import message_of
from megatron_vlm.data.tokens.chat_template import ChatTemplate
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import DataError

_NO_RECORD: Mapping[str, Any] = MappingProxyType({})
_NO_LIMIT = 2**31 - 1  # tokens
_LAST = 16  # tokens of a prompt, at its end, among which it opens thoughts
# Stand-ins for question and answer: the later turns look the same after any text. A template that
# drops the opening of an answer shows a tool's result only after a call.
_BEFORE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
_CALL = {"type": "function", "function": {"name": "b", "arguments": {}}}
_CALLED = (_BEFORE[0], {"role": "assistant", "content": "", "tool_calls": [_CALL]})


class TurnEncoder:
    """Encoder of messages with the chat template and the image rules of a source of records."""

    def __init__(self, reader: Reader):
        # A program's messages have their images as parts, so placeholders in them are plain text.
        # They have no columns with misspelled names. Without their end nothing could follow them.
        program: dict[str, Any] = {"unknown_keys": "refuse", "lone_marks": "text"}
        cfg = replace(reader.encoder.cfg, truncation="error", **program)
        self.reader = replace(reader, kind="chat", encoder=replace(reader.encoder, cfg=cfg))
        # A conversation has what a model wrote, and rl.max_tokens limits its length.
        limits: dict[str, Any] = {"max_tokens": _NO_LIMIT, "max_images": None}
        whole = replace(cfg, special_tokens="escape", system=None, **limits)
        self.whole = replace(self.reader, encoder=replace(reader.encoder, cfg=whole))
        self.prompts = reader
        renderer = reader.encoder.renderer
        self.end_ids, self.end_id = renderer.end_ids, renderer.end_ids[0]
        self.chat_format = renderer.chat_format
        # Tokens of stand-ins by the variables, and whether these show what opens an answer.
        self.before: dict[str, tuple[list[int], bool]] = {}
        self._tokens_before(_BEFORE, {})

    def opening(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        record: Mapping[str, Any] = _NO_RECORD,
    ) -> Row:
        """Encode the messages as the beginning of an episode, up to the start of the answer. The
        episode's record may set variables of the chat template."""
        return self._row(messages, _variables(record), where)

    def view(
        self, messages: Sequence[Mapping[str, Any]], where: str, record: Mapping[str, Any]
    ) -> Row:
        """Encode messages that a teacher sees in place of the beginning of an episode."""
        chat = self.parse_opening(messages, where, record)
        if chat.turns[-1].role == "assistant":
            raise DataError(
                " ends with an answer, and those of the episode follow what a view returns",
                place=where,
                key="teacher.view",
                remedy="leave it out, and give a hint in a message of the user",
            )
        return self.opening(messages, where, record)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        record: Mapping[str, Any] = _NO_RECORD,
    ) -> tuple[Row, bool]:
        """Encode the messages as they follow the token that ends an answer, up to the start of the
        next answer. Return them, and whether the chat template leaves earlier turns as they were.
        Then the answer stays as it was drawn: it is not rendered again."""
        variables, is_shown_whole = _variables(record), self.chat_format.begin_answer is None
        is_result = messages[0].get("role") == "tool" if messages else False
        stand_ins = _CALLED if is_result and not is_shown_whole else _BEFORE
        before, is_shown = self._tokens_before(stand_ins, variables)
        row = self._row([*stand_ins, *messages], variables, where)
        ids = row.ids_S.tolist()
        count = len(before)
        is_same = is_shown and ids[:count] == before
        if not is_same:  # the messages follow the end of the same turn
            ends = [place for place, token in enumerate(ids) if token in self.end_ids]
            count = ends[sum(token in self.end_ids for token in before) - 1] + 1
        reply = replace(row, ids_S=row.ids_S[count:], labels_S=row.labels_S[count:])
        return reply, is_same and is_shown_whole

    def answer(self, prompt: Sequence[int], text: str) -> ChatMessage:
        """Return an answer as a message. If its prompt has opened a block of thoughts, the mark
        that opens it is the first of two parts."""
        opened = self.chat_format.thoughts.opened
        end = str(self.prompts.encoder.renderer.tokenizer.decode(prompt[-_LAST:]))
        is_open = end.rstrip().endswith(opened.rstrip())
        return ChatMessage("assistant", (opened, text) if is_open else (text,))

    def conversation(
        self, opening: Conversation, said: Sequence[ChatMessage], shown: Sequence[Row], where: str
    ) -> list[int]:
        """Return the tokens of a conversation up to the start of the next answer, with the answers
        as text. Its pictures come from the rows that were shown, and are not read again."""
        template = self.whole.encoder.renderer.for_chat(opening).template
        turns: list[ChatMessage] = []
        has_calls = True  # the last answer has calls that can be read
        for turn in said:
            if turn.role == "assistant":
                turn = self._shown(turn, template, opening.tools)
                has_calls = bool(turn.tool_calls) or self.chat_format.begin_answer is None
            elif turn.role == "tool" and not has_calls:  # the template would leave it out
                turn = replace(turn, role="user")
            turns.append(turn)
        chat = replace(opening, where=where, turns=(*opening.turns, *turns))
        sample = self.whole.encode_chat(chat, prompt=True)
        image_grids, video_grids = (
            [tuple(grid) for row in shown for grid in _grids(row, name)]
            for name in ("image_grid_I3", "video_grid_I3")
        )
        assert list(sample.image_grids) == image_grids, (sample.image_grids, image_grids)
        assert list(sample.video_grids) == video_grids, (sample.video_grids, video_grids)
        return sample.ids_S.tolist()

    def _shown(
        self, turn: ChatMessage, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]
    ) -> ChatMessage:
        """Return an answer as the template shows it once others follow. A template that knows
        thoughts cuts them out then: those that the answer has not closed are cut out here."""
        text = str(turn.parts[-1])
        if template.shows_reasoning:
            text = self.chat_format.thoughts.drop_open("".join(map(str, turn.parts)))
        message = message_of(text, self.chat_format, tools)
        return message if template.shows_thoughts_of(message) else replace(message, reasoning="")

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
        """Parse messages of the environment after an answer."""
        chat = self.whole.parse({"messages": list(messages)}, where)
        assert isinstance(chat, Conversation)
        if any(turn.role == "assistant" for turn in chat.turns):
            raise DataError(
                ": answers are the model's, and earlier turns stay as they are",
                place=where,
                key="role",
                found="assistant",
                remedy="return only what is new",
            )
        return chat.turns

    def _tokens_before(
        self, stand_ins: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[int], bool]:
        """Return the tokens of the stand-ins, and whether the text that opens an answer, such as
        <think>, stays before it. Those after the end of the answer are left out: they would open
        another answer."""
        key = json.dumps([stand_ins, variables], sort_keys=True, default=str)
        if key not in self.before:
            asked, before = (
                self._row(each, variables, "the chat template").ids_S.tolist()
                for each in (stand_ins[:1], stand_ins)
            )
            decode = self.prompts.encoder.renderer.tokenizer.decode
            is_shown = decode(before).startswith(decode(asked))
            end = max(place for place, token in enumerate(before) if token in self.end_ids)
            self.before[key] = before[: end + 1], is_shown
        return self.before[key]

    def _row(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str
    ) -> Row:
        record = {**variables, "messages": list(messages)}
        sample = self.reader.encode(record, where, prompt=True)
        return self.reader.row(record, where, sample)


def _variables(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in (*VARIABLE_KEYS, "tools") if record.get(key) is not None}


def _grids(row: Row, name: str) -> list[list[int]]:
    grids = getattr(row, name)
    return [] if grids is None else grids.tolist()
