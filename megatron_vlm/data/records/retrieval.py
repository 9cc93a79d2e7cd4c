"""Records with a query and documents: sentence-transformers' (`anchor`, `positive`, `negative_1`),
ms-swift's (`messages`, `positive_messages`, `negative_messages`), and for rerankers also documents
with labels. A query or document is a text, an object with a text and pictures, a list of parts, or
a list of messages. Rows are a chat of each, or a reranker's prompt of the query with each document.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import PIL.Image

from megatron_vlm.config.objective_configs import JUDGE, PAIR_MARKS, RetrievalForm
from megatron_vlm.data.records.record import (
    ChatMessage,
    Conversation,
    Part,
    Record,
    is_empty,
    is_list,
    require_list,
    require_record,
)
from megatron_vlm.errors import DataError

MAX_DOCUMENTS = 1000  # documents of one record, which is trained as a whole
RETRIEVAL_REMEDY = "see docs/embeddings.md for the formats"
_QUERIES = ("anchor", "query", "messages")
_DOCUMENTS = ("document", "passage")
_NEGATIVE = re.compile(r"negative(_\d+)?")
_LABELS = ("label", "labels", "score", "scores")
_PICTURES = ("image", "images", "video", "videos")
_OBJECT = frozenset({"text", "instruction", *_PICTURES})


@dataclass(frozen=True)
class RetrievalItem:
    """A query or document of a raw record: the key that it has there, and its value."""

    key: str
    value: Any
    pictures: Mapping[str, Any]  # columns of pictures that belong to it


@dataclass(frozen=True)
class RetrievalItems:
    """The query and the documents of a raw record, and its other keys."""

    query: RetrievalItem
    positives: Sequence[RetrievalItem]
    negatives: Sequence[RetrievalItem]
    rest: Mapping[str, Any]


def read_items(raw: Mapping[str, Any], form: RetrievalForm) -> RetrievalItems:
    """Find the query and the documents of a raw record, as many of them as the form takes."""
    rest = dict(raw)  # each function below takes its keys out of it
    query = _take_query(rest)
    positives = [RetrievalItem("positive", rest.pop("positive"), {})] if "positive" in rest else []
    positives += _take_lists(rest, "positive")
    names = sorted(filter(_NEGATIVE.fullmatch, rest), key=lambda key: (len(key), key))  # by number
    negatives = [RetrievalItem(key, rest.pop(key), {}) for key in names]
    negatives += _take_lists(rest, "negative")
    if form.answers is not None:
        labelled = _take_labelled(rest)
        positives += [item for item, is_relevant in labelled if is_relevant]
        negatives += [item for item, is_relevant in labelled if not is_relevant]
    elif names := [name for name in _LABELS if name in rest]:
        raise DataError(
            f"has no place in train.objective=embed, which learns that {query.key} and its "
            "positive belong together",
            key=names[0],
            remedy="give pairs that belong together alone, or set train.objective=rerank",
        )
    _check_numbers(positives, negatives, form)
    return RetrievalItems(query, positives, negatives[: form.hard_negatives], rest)


def _take_query(rest: dict[str, Any]) -> RetrievalItem:
    names = [name for name in _QUERIES if name in rest]
    if len(names) != 1:
        raise DataError(
            f"and {names[1]} both have a value" if names else "is missing",
            key=names[0] if names else "anchor",
            remedy=f"give one of them; {RETRIEVAL_REMEDY}" if names else RETRIEVAL_REMEDY,
        )
    [name] = names
    columns = {key: rest.pop(key) for key in [*rest] if key in _PICTURES}
    if columns and name != "messages":
        raise DataError(
            f": it does not tell whether its pictures are those of {name} or of a document",
            key=next(iter(columns)),
            remedy=f'give them with their text: {{"text": ..., "{next(iter(columns))}": ...}}',
        )
    return RetrievalItem(name, rest.pop(name), columns)


def _take_lists(rest: dict[str, Any], kind: str) -> list[RetrievalItem]:
    """Take the entries of ms-swift's lists of messages, with their pictures, and of `negatives`."""
    items = list[RetrievalItem]()
    for key in (f"{kind}s", f"{kind}_messages"):
        if is_empty(values := rest.pop(key, None)):
            continue
        if not all(map(is_list, require_list(values, key))) and key.endswith("_messages"):
            raise DataError("must be a list with a list of messages for each document", key=key)
        columns = dict[str, Any]()
        for name in _PICTURES if key.endswith("_messages") else ():
            if is_empty(column := rest.pop(f"{kind}_{name}", None)):
                continue
            if not is_list(column) or len(column) != len(values):
                raise DataError(
                    f"must be a list with a list for each of the {len(values)} documents of {key}",
                    key=f"{kind}_{name}",
                )
            columns[name] = column
        for n, value in enumerate(values):
            pictures = {name: column[n] for name, column in columns.items()}
            items.append(RetrievalItem(f"{key}[{n}]", value, pictures))
    return items


def _take_labelled(rest: dict[str, Any]) -> list[tuple[RetrievalItem, bool]]:
    """Take the documents that have labels, each with its own."""
    names = [name for name in (*_DOCUMENTS, *(f"{name}s" for name in _DOCUMENTS)) if name in rest]
    labels = [name for name in ("label", "labels") if name in rest]
    if not names and not labels:
        return []
    if len(names) != 1 or len(labels) != 1:
        raise DataError(
            f"belongs to one of {' or '.join(_DOCUMENTS)}, and the record has "
            f"{' and '.join(names) or 'none'}"
            if labels
            else "is missing: it says whether the document is relevant",
            key=labels[0] if labels else "label",
            remedy=RETRIEVAL_REMEDY,
        )
    values, flags = rest.pop(names[0]), rest.pop(labels[0])
    if not names[0].endswith("s"):
        values, flags = [values], [flags]
    if not is_list(values) or not is_list(flags) or len(values) != len(flags):
        raise DataError(f"must be a list with a label for each of {names[0]}", key=labels[0])
    for flag in flags:
        if flag not in (0, 1) or not isinstance(flag, bool | int | float):
            raise DataError(key=labels[0], found=flag, allowed="1 (or true) or 0 (or false)")
    items = [RetrievalItem(f"{names[0]}[{n}]", value, {}) for n, value in enumerate(values)]
    return list(zip(items, map(bool, flags), strict=True))


def _check_numbers(
    positives: Sequence[RetrievalItem], negatives: Sequence[RetrievalItem], form: RetrievalForm
) -> None:
    """Refuse a record with too few or too many documents."""
    if form.needs_positive and not positives:
        raise DataError("is missing", key="positive", remedy=RETRIEVAL_REMEDY)
    if form.answers is None and len(positives) > 1:
        raise DataError(
            f"and {positives[0].key} are two positives, and train.objective=embed learns one for "
            "each query",
            key=positives[1].key,
            remedy="make a record of each",
        )
    if not positives and not negatives:
        raise DataError("is missing: there is no document", key="document")
    needed = form.hard_negatives
    if form.answers is not None and form.needs_positive:  # a list of one positive has no loss
        needed = max(needed or 0, 1)
    if needed and len(negatives) < needed:
        raise DataError(
            f"is missing: the record has {len(negatives)} negatives, and {needed} are needed",
            key="negative" if not negatives else f"negative_{len(negatives)}",
            remedy="leave the record out, lower hard_negatives, or set data.max_errors=100",
        )
    if len(positives) + len(negatives[: form.hard_negatives]) > MAX_DOCUMENTS:
        raise DataError(
            f": the record has more than {MAX_DOCUMENTS} documents",
            key=negatives[-1].key,
            remedy="set hard_negatives to take fewer",
        )


def item_as_chat(item: RetrievalItem) -> dict[str, Any]:
    """Return a value in the form of a record with messages."""
    value = item.value
    if isinstance(value, PIL.Image.Image) or (
        isinstance(value, Mapping) and {*value} <= {"bytes", "path"}
    ):
        value = {"image": value}
    if isinstance(value, str):
        return {"messages": [{"role": "user", "content": value}]}
    if isinstance(value, Mapping):
        if unknown := sorted({*map(str, value)} - _OBJECT):
            raise DataError(
                f"has the key {unknown[0]!r}, which is not known here",
                key=item.key,
                remedy=f"give {', '.join(sorted(_OBJECT))}",
            )
        return _object_as_chat(value)
    if not is_list(value) or not all(isinstance(part, Mapping) for part in value):
        raise DataError(
            "must be a text, an object with text and image, a list of parts or a list of messages",
            key=item.key,
            remedy=f"several documents are a list with a key of its own: positives or negatives; "
            f"{RETRIEVAL_REMEDY}",
        )
    is_chat = any("role" in part or "from" in part for part in value)
    return {"messages": list(value) if is_chat else [{"role": "user", "content": list(value)}]}


def _object_as_chat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with a text and pictures as a record. Pictures without marks in the text
    come before it, as Qwen's models have them."""
    columns = {name: value[name] for name in _PICTURES if not is_empty(value.get(name))}
    content: Any = value.get("text")
    if is_empty(content):
        counts = {
            name: len(column) if is_list(column) and name in ("images", "videos") else 1
            for name, column in columns.items()
        }
        content = [
            {"type": name.removesuffix("s")} for name, count in counts.items() for _ in range(count)
        ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if not is_empty(value.get("instruction")):
        messages.insert(0, {"role": "system", "content": value["instruction"]})
    return {"messages": messages, **columns}


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
