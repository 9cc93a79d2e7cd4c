"""Boxes and points become text as Qwen3-VL reads and writes it: thousandths of a picture's sides.

They relate to the picture as it is decoded, so after it is turned as its EXIF tag says. Resizing it
to whole patches stretches each side as a whole, and changes no thousandth.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_vlm.data.records.boxes import MARKS, REF
from megatron_vlm.data.records.record import Box, Conversation, Record
from megatron_vlm.errors import DataError

Size = tuple[int, int]  # height and width of a picture in pixels
_MOST = 1e9  # of what is drawn
_FLAT_JSON = re.compile(r"\{[^{}]*_2d[^{}]*\}")


@dataclass(frozen=True)
class Outline:
    """A box, or with two numbers a point, to be drawn on a picture: thousandths of its sides."""

    label: str
    numbers: tuple[float, ...]

    @property
    def text(self) -> str:
        """For lists: a dog [221, 423, 569, 886]"""
        return f"{self.label} {list(self.numbers)}".strip()


def grounded(chat: Conversation, sizes: Sequence[Size]) -> Conversation:
    """The chat with texts in place of the marks `<ref-object>` and `<bbox>`. `sizes` are those of
    its pictures."""
    if chat.objects is None:
        return chat
    refs = iter(chat.objects.refs)
    boxes = iter([str(list(numbers)) for numbers in _placed(chat, sizes)])

    def fill(text: str) -> str:
        return MARKS.sub(lambda mark: next(refs if mark[0] == REF else boxes), text)

    turns = tuple(
        replace(  # in the order that the template shows them in
            turn,
            reasoning=fill(turn.reasoning),
            parts=tuple(fill(part) if isinstance(part, str) else part for part in turn.parts),
        )
        for turn in chat.turns
    )
    return replace(chat, turns=turns, objects=None)


def thousandths(box: Box, size: Size, where: str, key: str) -> tuple[int, ...]:
    """Compute the coordinates in Qwen3-VL's form. Up to a pixel outside is taken as the edge."""
    height, width = size
    ends = {"real": (width, height), "norm1": (1, 1), "norm1000": (1000, 1000)}[box.unit]
    found = []
    for number, end, pixels in zip(
        box.numbers, itertools.cycle(ends), itertools.cycle((width, height)), strict=False
    ):
        if not -end / pixels <= number <= end + end / pixels:
            raise DataError(
                f"with bbox_type={box.unit} is outside image {box.image} of {width} x {height} "
                "pixels",
                place=where,
                key=key,
                found=list(box.numbers),
                remedy="correct the box, its image_id or the bbox_type. Boxes relate to the "
                "picture as it is shown: turned by its EXIF tag, unless "
                "data.exif_orientation=false",
            )
        found.append(round(min(max(number, 0), end) / end * 1000))
    whole = all(number == int(number) for number in box.numbers)
    if box.unit == "real" and max(box.numbers) <= 1 and not (len(box.numbers) == 2 and whole):
        raise DataError(
            f"is within the first pixel of image {box.image}",
            place=where,
            key=key,
            found=list(box.numbers),
            remedy="if these are parts of the picture's sides, give bbox_type: norm1",
        )
    return tuple(found)


def outlines_of(record: Record, sizes: Sequence[Size], images: int) -> list[list[Outline]]:
    """What to draw on each of the record's images: the boxes of its `objects`, or else those that
    its texts hold as JSON, in the form of Qwen's cookbook, if it has a single image."""
    found: list[list[Outline]] = [[] for _ in range(images)]
    if not isinstance(record, Conversation):
        return found
    written = list(_written(grounded(record, sizes)))
    if record.objects is None:
        if images == 1:
            found[0] += written
        return found
    refs, boxes = record.objects.refs, record.objects.boxes
    labels = {outline.numbers: outline.label for outline in written}
    for place, (box, numbers) in enumerate(zip(boxes, _placed(record, sizes), strict=True)):
        # References and boxes are separate lists; as many of both are pairs.
        named = refs[place] if len(refs) == len(boxes) else refs[0] if len(refs) == 1 else ""
        found[box.image].append(Outline(labels.get(numbers) or named, numbers))
    return found


def _placed(chat: Conversation, sizes: Sequence[Size]) -> list[tuple[int, ...]]:
    assert chat.objects is not None
    return [
        thousandths(box, sizes[box.image], f"{chat.where}: objects", f"bbox[{place}]")
        for place, box in enumerate(chat.objects.boxes)
    ]


def _written(chat: Conversation) -> Iterator[Outline]:
    """Boxes and points that the texts hold: {"bbox_2d": [...], "label": ...}, "point_2d"."""
    for part in itertools.chain.from_iterable(turn.parts for turn in chat.turns):
        for match in _FLAT_JSON.finditer(part) if isinstance(part, str) else ():
            try:
                value: Any = json.loads(match[0])
            except (ValueError, RecursionError):
                continue
            label = value.get("label")
            for name, count in (("bbox_2d", 4), ("point_2d", 2)):
                numbers = value.get(name)
                if not isinstance(numbers, list) or len(numbers) != count:
                    continue
                if all(type(n) in (int, float) and -_MOST <= n <= _MOST for n in numbers):
                    yield Outline(label if isinstance(label, str) else "", tuple(numbers))
