"""Which keys are read and which are refused: what a record says is never left out in silence."""

from collections.abc import Collection, Mapping
from typing import Any

from megatron_vlm.data.records.record import Image, Record, Video
from megatron_vlm.data.records.record_values import is_empty
from megatron_vlm.data.records.unknown_keys import (
    MEANT,
    Unknown,
    UnknownKeysError,
    looks_like_media,
    remedy,
    slip_of,
)
from megatron_vlm.errors import DataError

# Of a record: where it is from and what it is called. Nothing of it is ever learnt.
METADATA = frozenset(
    ("id", "idx", "uuid", "image_id", "video_id", "question_id", "conversation_id")
    + ("source", "data_source", "dataset", "_dataset_name", "split")
    + ("category", "kind", "language", "license")
)
_PREFERENCE = frozenset(
    ("chosen", "chosen_messages", "chosen_response", "kto_tag")
    + ("rejected", "rejected_messages", "rejected_response")
)
_AUDIO = frozenset({"audio", "audios"})


class Keys:
    """The keys that were met in one record and are neither read nor to be ignored. With `strict`,
    none of the record itself may be passed over either."""

    def __init__(self, where: str, ignored: Collection[str], strict: bool = False):
        self.where, self.ignored, self.strict = where, frozenset(ignored), strict
        self.unknown: dict[str, Unknown] = {}
        self.media: set[str] = set()  # of the unknown ones of the record itself
        self.passed: list[str] = []  # of the record itself, with a value that nothing is made of
        self.marked: list[str] = []  # texts of formats that have marks for images and videos

    def read(self, raw: Mapping[Any, Any], known: Collection[str], where: str) -> dict[str, Any]:
        """The keys that are read and have a value. Others that have one are remembered."""
        found = {}
        for key, value in raw.items():
            if value is None or key in self.ignored:
                continue
            if key in known:
                found[key] = value
            elif is_empty(value):
                continue
            elif where == self.where:
                self._remember(str(key), value, known)
            else:
                place = where.removeprefix(self.where).lstrip(": ")
                self.unknown.setdefault(str(key), Unknown(place))
        return found

    def _remember(self, key: str, value: Any, known: Collection[str]) -> None:
        """A key of the record itself that is not read."""
        is_media = key not in MEANT and looks_like_media(key, value)
        if is_media:
            self.media.add(key)
        near = "" if key in MEANT or is_media else slip_of(key, known)
        if key in MEANT or is_media or near or self.strict:
            self.unknown[key] = Unknown(near=near)
        else:
            self.passed.append(key)

    def record(self, raw: Mapping[Any, Any]) -> dict[str, Any]:
        """A record without what is empty, to be ignored, or metadata; refused if it is of a kind
        that this trainer cannot learn."""
        dropped = self.ignored | METADATA
        found = {k: v for k, v in raw.items() if v is not None and k not in dropped}
        given = {key for key, value in found.items() if not is_empty(value)}
        # Of other data, `label` is a class: a key like any other.
        marks = sorted(given & _PREFERENCE) or ["label"] * isinstance(found.get("label"), bool)
        if marks:
            raise DataError(
                f": this is preference data, by {_listed(marks)}: it says how good answers are, as "
                "for DPO or KTO, and training here is supervised and learns every answer",
                place=self.where,
                key=marks[0],
                remedy="make records of the good answers alone, as messages; or, if all the other "
                f"keys hold what is to be learnt, {remedy(marks, self.ignored)}",
            )
        if marks := sorted(given & _AUDIO):
            raise DataError(
                f": there is sound, by {_listed(marks)}, and Qwen3-VL takes no sound: the marks "
                "would be learnt as text",
                place=self.where,
                key=marks[0],
                remedy="leave such records out; or, if they make sense without the sound, "
                f"{remedy(marks, self.ignored)}",
            )
        return found

    def check(self, record: Record) -> None:
        """Refuse the record if it had keys that are neither read nor passed over."""
        if not self.unknown:
            return
        if not (record.media(Image) or record.media(Video)):
            for key in self.media:
                self.unknown[key] = Unknown(is_media=True)
        raise UnknownKeysError.of(self.where, self.unknown, self.ignored)


def _listed(names: list[str]) -> str:
    return " and ".join(map(repr, names))
