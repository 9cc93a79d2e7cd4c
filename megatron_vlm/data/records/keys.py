"""Access to the keys of a record: each one is read, passed over or refused. No content of a record
is left out in silence."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from megatron_vlm.data.records.record import Image, Record, Video
from megatron_vlm.data.records.record_values import is_empty
from megatron_vlm.data.records.unknown_keys import (
    MEANT,
    MEANT_TO_ASK,
    Unknown,
    UnknownKeysError,
    looks_like_media,
    misspelled_key,
    remedy,
)
from megatron_vlm.errors import DataError

# These keys hold the origin and the name of a record. Their values are never learnt.
METADATA = frozenset(
    ("id", "idx", "uuid", "image_id", "video_id", "question_id", "conversation_id")
    + ("source", "data_source", "dataset", "_dataset_name", "split")
    + ("category", "kind", "language", "license", "metadata", "parallel_tool_calls")
    # The group of a record's loss in ms-swift's log, and the sizes that LLaVA and InternVL note.
    + ("channel", "width", "height", "width_list", "height_list")
)
_PREFERENCE = frozenset(
    ("chosen", "chosen_messages", "chosen_response", "kto_tag")
    + ("rejected", "rejected_messages", "rejected_response")
)
# A list of all right answers to a record's question, by which an evaluation scores. It is not
# learnt: the record's own answer is.
REFERENCES = "answers"
_AUDIO = frozenset({"audio", "audios"})


def references_of(raw: Any) -> tuple[str, ...]:
    """Return all right answers that a record lists: `answers`, if that is a list of texts."""
    answers = raw.get(REFERENCES) if isinstance(raw, Mapping) else None
    is_listed = isinstance(answers, list | tuple) and all(isinstance(text, str) for text in answers)
    return tuple(answers or ()) if is_listed else ()


class Keys:
    """Reader of a record's keys, which collects those that are neither read nor to be ignored. With
    `strict`, no key of the record itself may be passed over."""

    def __init__(
        self, where: str, ignored: Collection[str], strict: bool = False, prompts_only: bool = False
    ):
        """Make a reader. With `prompts_only`, a reward gets the keys that are not read."""
        self.where, self.ignored, self.strict = where, frozenset(ignored), strict
        self.prompts_only = prompts_only
        self.needed: Collection[str] = ()  # further keys that may not be passed over
        self.unknown: dict[str, Unknown] = {}
        self.media: set[str] = set()  # unknown keys of the record itself
        self.passed: list[str] = []  # keys of the record itself whose values are not used
        self.media_parts: Counter[str] = Counter()  # parts so far that are images and videos
        self.marked: list[str] = []  # texts of formats that have marks for images and videos

    def read(self, raw: Mapping[Any, Any], known: Collection[str], where: str) -> dict[str, Any]:
        """Return the known keys that have a value, and remember the other keys that have one."""
        fields = {}
        for key, value in raw.items():
            if value is None or key in self.ignored:
                continue
            if key in known:
                fields[key] = value
            elif is_empty(value):
                continue
            elif where == self.where:
                self._remember(str(key), value, known)
            else:
                place = where.removeprefix(self.where).lstrip(": ")
                self.unknown.setdefault(str(key), Unknown(place))
        return fields

    def _remember(self, key: str, value: Any, known: Collection[str]) -> None:
        """Remember a key of the record itself that is not read."""
        if key == REFERENCES and references_of({key: value}):
            return
        is_meant = key in self.needed or key in (MEANT_TO_ASK if self.prompts_only else MEANT)
        is_media = key not in MEANT and looks_like_media(key, value)
        if is_media:
            self.media.add(key)
        near = "" if key in MEANT or is_media else misspelled_key(key, known)
        if is_meant or is_media or near or self.strict:
            self.unknown[key] = Unknown(near=near)
        elif not self.prompts_only:
            self.passed.append(key)

    def record(self, raw: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the record without nulls, ignored keys and metadata. Refuse a record of a kind
        that this trainer cannot learn."""
        dropped = self.ignored | METADATA
        fields = {k: v for k, v in raw.items() if v is not None and k not in dropped}
        filled = {key for key, value in fields.items() if not is_empty(value)}
        # In other data, `label` is a class: a key like any other.
        marks = sorted(filled & _PREFERENCE) or ["label"] * isinstance(fields.get("label"), bool)
        if marks and not self.prompts_only:
            raise DataError(
                f": this is preference data, by {_join_names(marks)}: it says how good answers "
                "are, and train.objective=sft learns every answer",
                place=self.where,
                key=marks[0],
                remedy="train with train.objective=dpo (kto for labels); or, if all the other keys "
                f"hold what is to be learnt, {remedy(marks, self.ignored)}",
            )
        if marks := sorted(filled & _AUDIO):
            raise DataError(
                f": there is sound, by {_join_names(marks)}, and the model takes no sound: the "
                "marks would be learnt as text",
                place=self.where,
                key=marks[0],
                remedy="leave such records out; or, if they make sense without the sound, "
                f"{remedy(marks, self.ignored)}",
            )
        return fields

    def check(self, record: Record) -> None:
        """Refuse the record if it had keys that are neither read nor passed over."""
        if not self.unknown:
            return
        if not (record.media(Image) or record.media(Video)):
            for key in self.media:
                self.unknown[key] = Unknown(is_media=True)
        raise UnknownKeysError.from_keys(self.where, self.unknown, self.ignored)


def _join_names(names: list[str]) -> str:
    return " and ".join(map(repr, names))
