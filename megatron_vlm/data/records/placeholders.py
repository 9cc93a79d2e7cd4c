"""Places in the chat for the images and videos that a record has in columns of their own."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_vlm.data.records.record import ChatMessage, Image, Part, Record, Video
from megatron_vlm.errors import DataError

MARKS = re.compile(r"(<image>|<video>)")
_ANY_MARK = re.compile(r"<(image|video|audio)>")
# These parts have no source: the record's `images` or `videos` column has it.
AWAITED_IMAGE, AWAITED_VIDEO = Image(""), Video("")


def place_media(
    turns: list[ChatMessage], images: list[Image], videos: list[Video], where: str
) -> list[ChatMessage]:
    """Put the columns' images and videos in the places of `<image>` marks and of parts without a
    source. If there are no such places, put them at the start of the first user turn, as TRL
    does."""
    waiting: dict[str, list[Any]] = {"image": images, "video": videos}
    if images or videos:
        turns = [replace(turn, parts=_split_marks(turn.parts, waiting)) for turn in turns]
    for kind, awaited in (("image", AWAITED_IMAGE), ("video", AWAITED_VIDEO)):
        column = waiting[kind]
        places = sum(part == awaited for turn in turns for part in turn.parts)
        present = any(isinstance(part, type(awaited)) for turn in turns for part in turn.parts)
        if column and not present:
            turns = _prepend(turns, column, kind, where)
        elif places != len(column):
            raise DataError(
                f": there are {places} {kind} places (<{kind}> marks, or parts without a source) "
                f"but {len(column)} {kind}s",
                place=where,
                key=f"{kind}s",
                remedy="give one for each place",
            )
        source = iter(column)
        turns = [
            replace(turn, parts=tuple(next(source) if p == awaited else p for p in turn.parts))
            for turn in turns
        ]
    return turns


def _split_marks(parts: Sequence[Part], waiting: Mapping[str, list[Any]]) -> tuple[Part, ...]:
    """Split `a <image> b` into text, an awaited image, and text. A line break after a mark is
    dropped."""
    new_parts: list[Part] = []
    for part in parts:
        if not isinstance(part, str):
            new_parts.append(part)
            continue
        pieces = MARKS.split(part)
        for index, piece in enumerate(pieces):
            if index % 2 and waiting[piece[1:-1]]:
                new_parts.append(AWAITED_IMAGE if piece == "<image>" else AWAITED_VIDEO)
            elif piece:
                is_after_mark = index and not index % 2 and waiting[pieces[index - 1][1:-1]]
                piece = piece.removeprefix("\n") if is_after_mark else piece
                new_parts += [piece] if piece else []
    return tuple(new_parts)


def _prepend(
    turns: list[ChatMessage], media: list[Any], kind: str, where: str
) -> list[ChatMessage]:
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise DataError(
            f": there are {kind}s but no user message to put them in", place=where, key=f"{kind}s"
        )
    turns[first] = replace(turns[first], parts=(*media, *turns[first].parts))
    return turns


def check_lone_marks(texts: Iterable[str], record: Record) -> None:
    """Refuse marks in these texts whose kind of media the record does not have: they would be
    learnt as text. A mark with a closing tag in the same text is HTML."""
    marks = Counter(
        kind for text in texts for kind in _ANY_MARK.findall(text) if f"</{kind}>" not in text
    )
    media = {"image": record.media(Image), "video": record.media(Video), "audio": []}
    for kind, count in marks.items():
        if media[kind]:
            continue
        remedy = "leave such records out" if kind == "audio" else f"give its {kind}s, one for each"
        raise DataError(
            f"has {count} <{kind}> mark{'s' * (count > 1)} and no {kind}, and marks would be "
            "learnt as text",
            place=record.where,
            remedy=f"{remedy}. If texts mean the word itself, give them as parts, "
            '{"type": "text", "text": ...}, or set data.lone_marks=text',
        )
