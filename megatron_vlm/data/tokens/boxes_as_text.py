"""Boxes and points as text that models read and write: thousandths of the sides of the decoded
picture, upright as its EXIF tag says. Resizing to whole patches changes no thousandth. Qwen3-VL
writes x before y, Gemma 4 y before x (`y_first`)."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_vlm.data.records.boxes import BOX_MARKS, REF
from megatron_vlm.data.records.record import Box, Conversation, Image, Record
from megatron_vlm.errors import DataError

Size = tuple[int, int]  # height and width of a picture in pixels
_MAX_COORDINATE = 1e9  # largest coordinate that is drawn
_FLAT_JSON = re.compile(r"\{[^{}]*_2d[^{}]*\}")
_PART = r"\s*(?:0?\.\d+|0|1(?:\.0*)?)\s*"  # part of the side of a picture
_BOX_OF_PARTS = re.compile(rf"[\[(]{_PART}(?:,{_PART}){{3}}[\])]")


@dataclass(frozen=True)
class Outline:
    """A box, or a point if it has two numbers: thousandths of the sides of a picture."""

    label: str
    numbers: tuple[float, ...]

    @property
    def text(self) -> str:
        """Text for lists, such as: a dog [221, 423, 569, 886]"""
        return f"{self.label} {list(self.numbers)}".strip()


def write_boxes_as_text(
    chat: Conversation, sizes: Sequence[Size], y_first: bool = False
) -> Conversation:
    """Return the chat with texts for `<ref-object>` and `<bbox>`; `sizes` has all pictures."""
    if chat.objects is None:
        return chat
    refs = iter(chat.objects.refs)
    order = _exchange_axes if y_first else tuple
    boxes = iter([str(list(order(numbers))) for numbers in _scaled_boxes(chat, sizes)])

    def fill(text: str) -> str:
        return BOX_MARKS.sub(lambda mark: next(refs if mark[0] == REF else boxes), text)

    turns = tuple(
        replace(  # The template shows the fields in this order.
            turn,
            reasoning=fill(turn.reasoning),
            parts=tuple(fill(part) if isinstance(part, str) else part for part in turn.parts),
        )
        for turn in chat.turns
    )
    return replace(chat, turns=turns, objects=None)


def thousandths(box: Box, size: Size, where: str, key: str) -> tuple[int, ...]:
    """Convert coordinates to thousandths. Up to a pixel outside counts as the edge."""
    height, width = size
    ends = {"real": (width, height), "norm1": (1, 1), "norm1000": (1000, 1000)}[box.unit]
    coordinates = []
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
        coordinates.append(round(min(max(number, 0), end) / end * 1000))
    is_whole = all(number == int(number) for number in box.numbers)
    if box.unit == "real" and max(box.numbers) <= 1 and not (len(box.numbers) == 2 and is_whole):
        raise DataError(
            f"is within the first pixel of image {box.image}",
            place=where,
            key=key,
            found=list(box.numbers),
            remedy="if these are parts of the picture's sides, give bbox_type: norm1",
        )
    return tuple(coordinates)


def outlines_of(
    record: Record, sizes: Sequence[Size], images: int, y_first: bool = False
) -> list[list[Outline]]:
    """Return the outlines to draw on each of the record's images, x before y: the boxes of its
    `objects` or, for a single image, those that its texts hold as JSON, as models write them."""
    outlines: list[list[Outline]] = [[] for _ in range(images)]
    if not isinstance(record, Conversation):
        return outlines
    written = write_boxes_as_text(record, sizes, y_first)
    texts = [part for turn in written.turns for part in turn.parts if isinstance(part, str)]
    text_outlines = [outline for text in texts for outline in outlines_in_text(text)]
    if y_first:
        text_outlines = [Outline(o.label, _exchange_axes(o.numbers)) for o in text_outlines]
    if record.objects is None:
        if images == 1:
            outlines[0] += text_outlines
        return outlines
    refs, boxes = record.objects.refs, record.objects.boxes
    labels = {outline.numbers: outline.label for outline in text_outlines}
    for place, (box, numbers) in enumerate(zip(boxes, _scaled_boxes(record, sizes), strict=True)):
        # References and boxes are separate lists. They are pairs if both have the same length.
        name = refs[place] if len(refs) == len(boxes) else refs[0] if len(refs) == 1 else ""
        outlines[box.image].append(Outline(labels.get(numbers) or name, numbers))
    return outlines


def _exchange_axes(numbers: Sequence[float]) -> tuple[float, ...]:
    """Return a box or a point with its axes in the other order."""
    return (*numbers[1::-1], *numbers[:1:-1])


def _scaled_boxes(chat: Conversation, sizes: Sequence[Size]) -> list[tuple[int, ...]]:
    assert chat.objects is not None
    return [
        thousandths(box, sizes[box.image], f"{chat.where}: objects", f"bbox[{place}]")
        for place, box in enumerate(chat.objects.boxes)
    ]


def box_of_parts(record: Record) -> str | None:
    """Return the first box in a record's texts whose numbers are parts of the picture's sides."""
    if not isinstance(record, Conversation) or not record.media(Image):
        return None
    texts = [part for turn in record.turns for part in turn.parts if isinstance(part, str)]
    found = (match[0] for text in texts for match in _BOX_OF_PARTS.finditer(text))
    return next((box for box in found if "." in box), None)


def outlines_in_text(text: str) -> Iterator[Outline]:
    """Yield the boxes and points of a text: {"bbox_2d": [...], "label": ...} as of Qwen, "box_2d"
    as of Gemma, or "point_2d"."""
    for match in _FLAT_JSON.finditer(text):
        try:
            value: Any = json.loads(match[0])
        except (ValueError, RecursionError):
            continue
        label = value.get("label")
        for name, count in (("bbox_2d", 4), ("box_2d", 4), ("point_2d", 2)):
            numbers = value.get(name)
            if not isinstance(numbers, list) or len(numbers) != count:
                continue
            if all(
                type(n) in (int, float) and -_MAX_COORDINATE <= n <= _MAX_COORDINATE
                for n in numbers
            ):
                yield Outline(label if isinstance(label, str) else "", tuple(numbers))
