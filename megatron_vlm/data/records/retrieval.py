"""Retrieval records: a query with documents, of which some answer it.

The formats are sentence-transformers' (`anchor`, `positive`, `negative_1`), ms-swift's (`messages`,
`positive_messages`, `negative_messages`), and for rerankers also documents with labels. A query or
document is a text, an object with a text and pictures, a list of parts, or a list of messages.
`formats.py` parses each as a chat of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import PIL.Image

from megatron_vlm.config.retrieval_config import JUDGE, PAIR_MARKS, RetrievalForm
from megatron_vlm.data.records.record import ChatMessage, Conversation, Part, Record
from megatron_vlm.data.records.record_values import is_empty, is_list, kind_of
from megatron_vlm.errors import DataError

Parse = Callable[[Mapping[str, Any], str], Record]

MAX_DOCUMENTS = 1000  # documents of one record, which is trained as a whole
_QUERIES = ("anchor", "query", "messages")
_DOCUMENTS = ("document", "passage")
_NEGATIVE = re.compile(r"negative(_(\d+))?")
_LABELS = ("label", "labels", "score", "scores")
_PICTURES = ("image", "images", "video", "videos")
_OBJECT = frozenset({"text", "instruction", *_PICTURES})
_REMEDY = "see docs/embeddings.md for the formats"


@dataclass(frozen=True)
class _Item:
    """A query or document of a raw record: the key that it has there, and its value."""

    key: str
    value: Any
    pictures: Mapping[str, Any]  # columns of pictures that belong to it


def parse_retrieval(
    raw: Any, where: str, parse: Parse, form: RetrievalForm, ignored: Sequence[str] = ()
) -> list[tuple[Record, bool]]:
    """Parse a record with a query and documents. `parse` parses a record of one chat. Return the
    chat of each row, and of each whether its document is a negative. The chats are the query, its
    positive and the negatives; with form.answers, each is the query with one document."""
    if not isinstance(raw, Mapping):
        raise DataError(f": a record must be a JSON object, not {kind_of(raw)}", place=where)
    raw = {key: value for key, value in raw.items() if value is not None and key not in ignored}
    query, rest = _query(raw, where)
    positives, rest = _positives(rest, where)
    negatives, rest = _negatives(rest, where)
    if form.answers is not None:
        labelled, rest = _labelled(rest, where)
        positives += [item for item, is_relevant in labelled if is_relevant]
        negatives += [item for item, is_relevant in labelled if not is_relevant]
    elif names := [name for name in _LABELS if name in rest]:
        raise DataError(
            f"has no place in train.objective=embed, which learns that {query.key} and its "
            "positive belong together",
            place=where,
            key=names[0],
            remedy="give pairs that belong together alone, or set train.objective=rerank",
        )
    _check_numbers(positives, negatives, form, where)
    negatives = negatives[: form.hard_negatives]
    # Keys that are not read are judged as in any other record.
    first, *documents = (
        _chat(item, rest if item is query else {}, where, parse)
        for item in (query, *positives, *negatives)
    )
    flags = [False] * len(positives) + [True] * len(negatives)
    _check_different(first, documents, (query, *positives, *negatives), form, where)
    if form.answers is not None:
        return [
            (_pair(first, document, form), is_negative)
            for document, is_negative in zip(documents, flags, strict=True)
        ]
    rows = [_instructed(chat, form.instruction) for chat in (first, *documents)]
    return list(zip(rows, (False, *flags), strict=True))


def _query(raw: dict[str, Any], where: str) -> tuple[_Item, dict[str, Any]]:
    """Return the query, and the other keys of the record."""
    names = [name for name in _QUERIES if name in raw]
    if len(names) != 1:
        raise DataError(
            f"and {names[1]} both have a value" if names else "is missing",
            place=where,
            key=names[0] if names else "anchor",
            remedy=f"give one of them; {_REMEDY}" if names else _REMEDY,
        )
    [name] = names
    columns = {key: value for key, value in raw.items() if key in _PICTURES}
    if columns and name != "messages":
        raise DataError(
            f": it does not tell whether its pictures are those of {name} or of a document",
            place=where,
            key=next(iter(columns)),
            remedy=f'give them with their text: {{"text": ..., "{next(iter(columns))}": ...}}',
        )
    rest = {key: value for key, value in raw.items() if key != name and key not in columns}
    return _Item(name, raw[name], columns), rest


def _positives(raw: dict[str, Any], where: str) -> tuple[list[_Item], dict[str, Any]]:
    items = [_Item("positive", raw["positive"], {})] if "positive" in raw else []
    listed, rest = _listed(raw, "positive", where)
    rest.pop("positive", None)
    return items + listed, rest


def _negatives(raw: dict[str, Any], where: str) -> tuple[list[_Item], dict[str, Any]]:
    """Return negative, negative_1 and so on in the order of their numbers, then lists of them."""
    numbered = [(int(match[2] or 0), key) for key in raw if (match := _NEGATIVE.fullmatch(key))]
    items = [_Item(key, raw[key], {}) for _, key in sorted(numbered)]
    listed, rest = _listed(raw, "negative", where)
    return items + listed, {k: v for k, v in rest.items() if not _NEGATIVE.fullmatch(k)}


def _listed(raw: dict[str, Any], kind: str, where: str) -> tuple[list[_Item], dict[str, Any]]:
    """Return the entries of ms-swift's lists of messages, with their pictures, and of a list such
    as `negatives`."""
    rest, items = dict(raw), list[_Item]()
    for key in (f"{kind}s", f"{kind}_messages"):
        if is_empty(values := rest.pop(key, None)):
            continue
        if not is_list(values):
            raise DataError(f"must be a list, not {kind_of(values)}", place=where, key=key)
        if key.endswith("_messages") and not all(map(is_list, values)):
            raise DataError(
                "must be a list with a list of messages for each document", place=where, key=key
            )
        columns = dict[str, Any]()
        for name in _PICTURES if key.endswith("_messages") else ():
            if is_empty(column := rest.pop(f"{kind}_{name}", None)):
                continue
            if not is_list(column) or len(column) != len(values):
                raise DataError(
                    f"must be a list with a list for each of the {len(values)} documents of {key}",
                    place=where,
                    key=f"{kind}_{name}",
                )
            columns[name] = column
        items += [
            _Item(f"{key}[{n}]", value, {name: column[n] for name, column in columns.items()})
            for n, value in enumerate(values)
        ]
    return items, rest


def _labelled(raw: dict[str, Any], where: str) -> tuple[list[tuple[_Item, bool]], dict[str, Any]]:
    """Return the documents that have labels, each with its own."""
    rest = dict(raw)
    names = [name for name in (*_DOCUMENTS, *(f"{name}s" for name in _DOCUMENTS)) if name in rest]
    labels = [name for name in ("label", "labels") if name in rest]
    if not names and not labels:
        return [], rest
    if len(names) != 1 or len(labels) != 1:
        raise DataError(
            f"belongs to one of {' or '.join(_DOCUMENTS)}, and the record has "
            f"{' and '.join(names) or 'none'}"
            if labels
            else "is missing: it says whether the document is relevant",
            place=where,
            key=labels[0] if labels else "label",
            remedy=_REMEDY,
        )
    values, flags = rest.pop(names[0]), rest.pop(labels[0])
    if not names[0].endswith("s"):
        values, flags = [values], [flags]
    if not is_list(values) or not is_list(flags) or len(values) != len(flags):
        raise DataError(
            f"must be a list with a label for each of {names[0]}", place=where, key=labels[0]
        )
    for flag in flags:
        if flag not in (0, 1) or not isinstance(flag, bool | int | float):
            raise DataError(
                place=where, key=labels[0], found=flag, allowed="1 (or true) or 0 (or false)"
            )
    items = [_Item(f"{names[0]}[{n}]", value, {}) for n, value in enumerate(values)]
    return list(zip(items, map(bool, flags), strict=True)), rest


def _check_numbers(
    positives: Sequence[_Item], negatives: Sequence[_Item], form: RetrievalForm, where: str
) -> None:
    """Refuse a record with too few or too many documents."""
    if form.needs_positive and not positives:
        raise DataError("is missing", place=where, key="positive", remedy=_REMEDY)
    if form.answers is None and len(positives) > 1:
        raise DataError(
            f"and {positives[0].key} are two positives, and train.objective=embed learns one for "
            "each query",
            place=where,
            key=positives[1].key,
            remedy="make a record of each",
        )
    if not positives and not negatives:
        raise DataError("is missing: there is no document", place=where, key="document")
    needed = form.hard_negatives
    if form.answers is not None and form.needs_positive:  # a list of one positive has no loss
        needed = max(needed or 0, 1)
    if needed and len(negatives) < needed:
        raise DataError(
            f"is missing: the record has {len(negatives)} negatives, and {needed} are needed",
            place=where,
            key="negative" if not negatives else f"negative_{len(negatives)}",
            remedy="leave the record out, lower hard_negatives, or set data.on_error=skip",
        )
    if len(positives) + len(negatives[: form.hard_negatives]) > MAX_DOCUMENTS:
        raise DataError(
            f": the record has more than {MAX_DOCUMENTS} documents",
            place=where,
            key=negatives[-1].key,
            remedy="set hard_negatives to take fewer",
        )


def _chat(item: _Item, rest: Mapping[str, Any], where: str, parse: Parse) -> Conversation:
    """Return a query or document as a chat."""
    place = f"{where}: {item.key}"
    if is_empty(item.value) or (isinstance(item.value, str) and not item.value.strip()):
        raise DataError(
            "is empty",
            place=where,
            key=item.key,
            remedy="leave the record out, or set data.on_error=skip",
        )
    chat = parse({**rest, **_as_chat(item, where), **item.pictures}, place)
    assert isinstance(chat, Conversation)
    last = chat.turns[-1]
    if not any(turn.parts for turn in chat.turns if turn.role != "system"):
        raise DataError("is empty", place=where, key=item.key)
    if last.role not in ("user", "assistant") or chat.tools:
        raise DataError(
            f": its last message is of role {last.role}, and a query or document is one of a user",
            place=where,
            key=item.key,
            remedy=_REMEDY,
        )
    return replace(chat, where=place)


def _as_chat(item: _Item, where: str) -> dict[str, Any]:
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
                place=where,
                key=item.key,
                remedy=f"give {', '.join(sorted(_OBJECT))}",
            )
        return _object_as_chat(value)
    if not is_list(value) or not all(isinstance(part, Mapping) for part in value):
        raise DataError(
            "must be a text, an object with text and image, a list of parts or a list of messages",
            place=where,
            key=item.key,
            remedy=f"several documents are a list with a key of its own: positives or negatives; "
            f"{_REMEDY}",
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


def _check_different(
    query: Conversation,
    documents: Sequence[Conversation],
    items: Sequence[_Item],
    form: RetrievalForm,
    where: str,
) -> None:
    """Refuse a document that is the query itself where both have one space, and a negative that is
    a positive."""
    seen = [(items[0].key, _spoken(query))] if form.answers is None else []
    for item, document in zip(items[1:], documents, strict=True):
        said = _spoken(document)
        same = next((key for key, other in seen if other == said), None)
        if same is not None and not (same.startswith("neg") and item.key.startswith("neg")):
            raise DataError(
                f"and {same} are the same: nothing can be learnt from them",
                place=where,
                key=item.key,
                remedy="leave the record out, or set data.on_error=skip",
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
    """Return the prompt that asks whether a document answers a query. A system message of the query
    is its instruction."""
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
