"""Grounding: the boxes and points of a record, in ms-swift's form.

`objects` holds what the marks `<ref-object>` and `<bbox>` in the texts stand for, each kind in the
order of its marks. They become text in `encode/grounding.py`, where the pictures' sizes are known.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vlm.data.read.keys import Keys
from megatron_vlm.data.read.records import Box, Image, Objects, Turn
from megatron_vlm.data.read.values import is_empty, is_list, kind_of, parse_text, text_of
from megatron_vlm.errors import DataError

REF, BOX = "<ref-object>", "<bbox>"
MARKS = re.compile(f"{REF}|{BOX}")
# What coordinates count: pixels, parts of the picture's sides, or thousandths of them.
UNITS = ("real", "norm1", "norm1000")
_MOST = 1e9  # no picture has so many pixels


def parse_objects(value: Any, turns: Sequence[Turn], keys: Keys) -> Objects | None:
    """What a record's `objects` says; as many marks as it fills must be in the turns' texts."""
    where = f"{keys.where}: objects"
    value = parse_text(value, where) if isinstance(value, str) and value else value
    if is_empty(value) and not isinstance(value, Mapping):
        return None
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where} must be an object with the lists 'ref' and 'bbox', but this is "
            f"{kind_of(value)}; see docs/data.md"
        )
    given = keys.read(value, {"ref", "bbox", "bbox_type", "image_id"}, where)
    if not given:
        return None
    refs, boxes = (_list(given.get(name, ()), f"{where}: {name}") for name in ("ref", "bbox"))
    unit = given.get("bbox_type", "real")
    if unit not in UNITS:
        got = repr(unit[:80]) if isinstance(unit, str) else kind_of(unit)
        raise DataError(f"{where}: bbox_type is {got}; known: {', '.join(UNITS)}")
    pictures = sum(isinstance(part, Image) for turn in turns for part in turn.parts)
    images = _images(given.get("image_id"), len(boxes), pictures, where)
    found = Objects(
        tuple(text_of(ref, f"ref {i}", where) for i, ref in enumerate(refs)),
        tuple(
            Box(_coordinates(box, f"{where}: bbox {i}"), unit, image)
            for i, (box, image) in enumerate(zip(boxes, images, strict=True))
        ),
    )
    _check_marks(found, turns, keys.where)
    return found


def _list(value: Any, where: str) -> Sequence[Any]:
    if not is_list(value):
        raise DataError(f"{where} must be a list, but this is {kind_of(value)}")
    return value


def _images(value: Any, boxes: int, pictures: int, where: str) -> Sequence[int]:
    """For each box the number of its image: 0 unless the record says otherwise."""
    given = [0] * boxes if is_empty(value) else _list(value, f"{where}: image_id")
    if len(given) != boxes:
        raise DataError(
            f"{where}: image_id has {len(given)} entries for {boxes} boxes; give the number of "
            "its image for each box, or leave image_id out if all are of the first"
        )
    if boxes and not pictures:
        raise DataError(
            f"{where}: there are {boxes} boxes and no images, and boxes are of images alone, not "
            "of videos; give images, or write the coordinates into the text"
        )
    for place, image in enumerate(given):
        if type(image) is not int or not 0 <= image < pictures:
            got = image if type(image) is int and abs(image) <= _MOST else kind_of(image)
            raise DataError(
                f"{where}: image_id {place} is {got}, and the record has images 0 to "
                f"{pictures - 1}; give the number of the image that the box is of"
            )
    return given


def _coordinates(value: Any, where: str) -> tuple[float, ...]:
    if not is_list(value) or len(value) not in (2, 4):
        got = f"a list of {len(value)}" if is_list(value) else kind_of(value)
        raise DataError(f"{where} is {got}; give [x1, y1, x2, y2], or [x, y] for a point")
    for number in value:
        if type(number) not in (int, float) or not -_MOST <= number <= _MOST:
            got = f"{number}" if type(number) is float else kind_of(number)
            raise DataError(
                f"{where} has a coordinate that is {got}; give numbers of at most {_MOST:g}"
            )
    if len(value) == 4 and (value[0] > value[2] or value[1] > value[3]):
        raise DataError(
            f"{where} is {list(value)}: its second corner must not be left of the first or above "
            "it; give [x1, y1, x2, y2], not a width and a height"
        )
    return tuple(value)


def _check_marks(objects: Objects, turns: Sequence[Turn], where: str) -> None:
    counts: Counter[str] = Counter()
    for number, turn in enumerate(turns):
        if _has_mark(turn.tool_calls):
            raise DataError(
                f"{where}: message {number}: a tool call has a mark {REF} or {BOX}, and marks are "
                "replaced in texts alone; write the coordinates themselves, 0 to 1000"
            )
        for text in (turn.reasoning, *(part for part in turn.parts if isinstance(part, str))):
            counts.update(MARKS.findall(text))
    for mark, name, given in ((REF, "ref", objects.refs), (BOX, "bbox", objects.boxes)):
        if counts[mark] != len(given):
            raise DataError(
                f"{where}: the texts have {counts[mark]} {mark} marks, but objects has "
                f"{len(given)} in {name!r}; give one for each mark"
            )


def _has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return MARKS.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_mark(part) for pair in value.items() for part in pair)
    return is_list(value) and any(map(_has_mark, value))
