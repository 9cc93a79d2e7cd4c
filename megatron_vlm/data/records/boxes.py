"""Grounding: the boxes and points of a record, in ms-swift's form, as `objects`: values for the
marks `<ref-object>` and `<bbox>` in the texts. `data/tokens/boxes_as_text.py` turns them into text,
since the sizes of the pictures are known there."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vlm.data.records.keys import Fields, Keys
from megatron_vlm.data.records.record import (
    Box,
    ChatMessage,
    Image,
    Objects,
    is_empty,
    is_list,
    kind_of,
    parse_text,
    require_list,
    text_of,
)
from megatron_vlm.errors import DataError

REF, BOX = "<ref-object>", "<bbox>"
BOX_MARKS = re.compile(f"{REF}|{BOX}")
# Coordinates count pixels, parts of the picture's sides, or thousandths of them.
UNITS = ("real", "norm1", "norm1000")
_MAX_COORDINATE = 1e9  # more pixels than any picture has


def parse_objects(value: Any, turns: Sequence[ChatMessage], keys: Keys) -> Objects | None:
    """Parse a record's `objects`, which must have a value for each mark in the turns' texts."""
    if isinstance(value, str) and value:
        value = parse_text(value, "objects")
    if is_empty(value) and not isinstance(value, Mapping):
        return None
    if is_list(value):
        value = _from_list(value, turns, keys)
    if not isinstance(value, Mapping):
        raise DataError(
            f"must be an object with the lists 'ref' and 'bbox', not {kind_of(value)}",
            key="objects",
            remedy="see docs/data.md",
        )
    with keys.at("objects"):
        objects = _read_lists(keys.open(value), turns)
    if objects is not None:
        _check_marks(objects, turns)
    return objects


def _read_lists(fields: Fields, turns: Sequence[ChatMessage]) -> Objects | None:
    given = fields.take_all("ref", "bbox", "bbox_type", "image_id")
    if not given:
        return None
    refs, boxes = (require_list(given.get(name, ()), name) for name in ("ref", "bbox"))
    unit = given.get("bbox_type", "real")
    if unit not in UNITS:
        raise DataError(key="bbox_type", found=unit, allowed=UNITS)
    pictures = sum(isinstance(part, Image) for turn in turns for part in turn.parts)
    images = _images(given.get("image_id"), len(boxes), pictures)
    return Objects(
        tuple(text_of(ref, f"ref[{i}]") for i, ref in enumerate(refs)),
        tuple(
            Box(_coordinates(box, f"bbox[{i}]"), unit, image)
            for i, (box, image) in enumerate(zip(boxes, images, strict=True))
        ),
    )


def _from_list(value: Sequence[Any], turns: Sequence[ChatMessage], keys: Keys) -> dict[str, Any]:
    """Convert ms-swift's older list of objects, each with its `caption` and `bbox`, into the lists
    of today. Where the texts have no marks of one kind, its values are notes."""
    texts = [text for turn in turns for text in _texts(turn)]
    items = []
    for number, item in enumerate(value):
        with keys.at(f"objects[{number}]"):
            fields = keys.open(item)
            items.append(fields.take_all("caption", "bbox", "bbox_type", "image"))
            unit = items[-1].setdefault("bbox_type", "real")
            if not isinstance(unit, str):
                raise DataError(key="bbox_type", found=unit, allowed=UNITS)
    units = {item["bbox_type"].replace("norm_", "norm") for item in items}
    if len(units) > 1:
        raise DataError(
            f"differs between the objects: {', '.join(sorted(units))}",
            place="objects",
            key="bbox_type",
            remedy="give all boxes of a record in one unit",
        )
    has_refs, has_boxes = (any(mark in text for text in texts) for mark in (REF, BOX))
    return {
        "ref": [item.get("caption") for item in items] if has_refs else [],
        "bbox": [item.get("bbox") for item in items] if has_boxes else [],
        "bbox_type": units.pop(),
        "image_id": [item.get("image", 0) for item in items] if has_boxes else [],
    }


def _texts(turn: ChatMessage) -> list[str]:
    """Return the texts in which marks are filled, in their order."""
    return [turn.reasoning, *(part for part in turn.parts if isinstance(part, str))]


def _images(value: Any, boxes: int, pictures: int) -> Sequence[int]:
    """Return the number of each box's image: 0 unless the record has another number."""
    numbers = [0] * boxes if is_empty(value) else require_list(value, "image_id")
    if len(numbers) != boxes:
        raise DataError(
            f"has {len(numbers)} entries for {boxes} boxes",
            key="image_id",
            remedy="give the number of its image for each box, or leave image_id out if all boxes "
            "are of the first",
        )
    if boxes and not pictures:
        raise DataError(
            f": there are {boxes} boxes and no images, and boxes belong to images, not to videos",
            key="bbox",
            remedy="give images, or write the coordinates into the text",
        )
    for place, image in enumerate(numbers):
        if type(image) is not int or not 0 <= image < pictures:
            raise DataError(
                f": the record has images 0 to {pictures - 1}",
                key=f"image_id[{place}]",
                found=image,
                allowed=range(pictures),
                remedy="give the number of the image that the box is of",
            )
    return numbers


def _coordinates(value: Any, key: str) -> tuple[float, ...]:
    if not is_list(value) or len(value) not in (2, 4):
        actual = f"a list of {len(value)}" if is_list(value) else kind_of(value)
        raise DataError(f"is {actual}", key=key, allowed="[x1, y1, x2, y2], or [x, y] for a point")
    for number in value:
        if type(number) not in (int, float) or not -_MAX_COORDINATE <= number <= _MAX_COORDINATE:
            actual = f"{number}" if type(number) is float else kind_of(number)
            raise DataError(
                f"has a coordinate that is {actual}",
                key=key,
                allowed=f"numbers of at most {_MAX_COORDINATE:g}",
            )
    if len(value) == 4 and (value[0] > value[2] or value[1] > value[3]):
        raise DataError(
            ": the second corner must not be left of the first or above it",
            key=key,
            found=list(value),
            allowed="[x1, y1, x2, y2], not a width and a height",
        )
    return tuple(value)


def _check_marks(objects: Objects, turns: Sequence[ChatMessage]) -> None:
    counts: Counter[str] = Counter()
    for number, turn in enumerate(turns):
        if _has_mark(turn.tool_calls):
            raise DataError(
                f"has a mark {REF} or {BOX}, and marks are replaced in texts alone",
                place=f"message {number}",
                key="tool_calls",
                remedy="write the coordinates themselves, 0 to 1000",
            )
        for text in _texts(turn):
            counts.update(BOX_MARKS.findall(text))
    for mark, name, values in ((REF, "ref", objects.refs), (BOX, "bbox", objects.boxes)):
        if counts[mark] != len(values):
            raise DataError(
                f"has {len(values)} values for the {counts[mark]} {mark} marks of the texts",
                place="objects",
                key=name,
                remedy="give one for each mark",
            )


def _has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return BOX_MARKS.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_mark(part) for pair in value.items() for part in pair)
    return is_list(value) and any(map(_has_mark, value))
