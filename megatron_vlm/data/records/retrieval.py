"""Rows of records with a query and documents: a chat of each, or a reranker's prompt of the query
with each document. `retrieval_formats.py` finds them in a raw record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_vlm.config.objective_configs import JUDGE, PAIR_MARKS, RetrievalForm
from megatron_vlm.data.records.record import (
    ChatMessage,
    Conversation,
    Part,
    Record,
    is_empty,
    require_record,
)
from megatron_vlm.data.records.retrieval_formats import (
    RETRIEVAL_REMEDY,
    RetrievalItem,
    item_as_chat,
    read_items,
)
from megatron_vlm.errors import DataError

Parse = Callable[[Mapping[str, Any], str], Record]


def parse_retrieval(
    raw: Any, parse: Parse, form: RetrievalForm, ignored: Sequence[str] = ()
) -> list[tuple[Record, bool]]:
    """Parse a record with a query and documents. `parse` parses a record of one chat. Return the
    chat of each row, and of each whether its document is a negative. The chats are the query, its
    positive and the negatives; with form.answers, each is the query with one document."""
    found = read_items(require_record(raw, ignored), form)
    items = (found.query, *found.positives, *found.negatives)
    # Keys that are not read are judged as in any other record.
    first, *documents = (
        _chat(item, found.rest if item is found.query else {}, parse) for item in items
    )
    flags = [False] * len(found.positives) + [True] * len(found.negatives)
    _check_different(first, documents, items, form)
    if form.answers is not None:
        return [
            (_pair(first, document, form), is_negative)
            for document, is_negative in zip(documents, flags, strict=True)
        ]
    rows = [_instructed(chat, form.instruction) for chat in (first, *documents)]
    return list(zip(rows, (False, *flags), strict=True))


def _chat(item: RetrievalItem, rest: Mapping[str, Any], parse: Parse) -> Conversation:
    """Return a query or document as a chat."""
    if is_empty(item.value) or (isinstance(item.value, str) and not item.value.strip()):
        raise DataError(
            "is empty", key=item.key, remedy="leave the record out, or set data.max_errors=100"
        )
    chat = parse({**rest, **item_as_chat(item), **item.pictures}, item.key)
    assert isinstance(chat, Conversation)
    last = chat.turns[-1]
    if not any(turn.parts for turn in chat.turns if turn.role != "system"):
        raise DataError("is empty", key=item.key)
    if last.role not in ("user", "assistant") or chat.tools:
        raise DataError(
            f": its last message is of role {last.role}, and a query or document is one of a user",
            key=item.key,
            remedy=RETRIEVAL_REMEDY,
        )
    return chat


def _check_different(
    query: Conversation,
    documents: Sequence[Conversation],
    items: Sequence[RetrievalItem],
    form: RetrievalForm,
) -> None:
    """Refuse a document that is the query, if one space has both, or a positive and a negative."""
    seen = [(items[0].key, _spoken(query))] if form.answers is None else []
    for item, document in zip(items[1:], documents, strict=True):
        said = _spoken(document)
        same = next((key for key, other in seen if other == said), None)
        if same is not None and not (same.startswith("neg") and item.key.startswith("neg")):
            raise DataError(
                f"and {same} are the same: nothing can be learnt from them",
                key=item.key,
                remedy="leave the record out, or set data.max_errors=100",
            )
        seen.append((item.key, said))


def _spoken(chat: Conversation) -> list[tuple[Part, ...]]:
    return [turn.parts for turn in chat.turns if turn.role != "system"]


def _instructed(chat: Conversation, instruction: str) -> Conversation:
    """Return the chat with a system message: its own, or else the instruction. A document in the
    words of the assistant is one of a user."""
    turns = chat.turns
    if turns[0].role != "system" and instruction:
        turns = (ChatMessage("system", (instruction,)), *turns)
    if [turn.role for turn in turns if turn.role != "system"] == ["assistant"]:
        turns = (*turns[:-1], replace(turns[-1], role="user"))
    return replace(chat, turns=turns)


def _pair(query: Conversation, document: Conversation, form: RetrievalForm) -> Conversation:
    """Return the prompt that asks whether a document answers a query with its instruction."""
    first = query.turns[0]
    instruction = form.instruction
    if first.role == "system":
        instruction = "".join(part for part in first.parts if isinstance(part, str))
    before_instruction, before_query, before_document = PAIR_MARKS
    parts = (
        before_instruction + instruction,
        before_query,
        *_only_parts(query),
        before_document,
        *_only_parts(document),
    )
    turns = (ChatMessage("system", (JUDGE,)), ChatMessage("user", parts))
    return replace(document, turns=turns)


def _only_parts(chat: Conversation) -> tuple[Part, ...]:
    """Return the parts of the only message of a query or document."""
    turns = [turn for turn in chat.turns if turn.role != "system"]
    if len(turns) != 1:
        raise DataError(
            f": there are {len(turns)} messages, and the prompt of a reranker has one for the "
            "query and one for the document",
            place=chat.where,
            key="messages",
            remedy="join their texts",
        )
    return turns[0].parts
