"""Objects of a record, which remember the keys that were read. Each of the other keys is passed
over or refused. No content of a record is left out in silence."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_vlm.data.records.keys import (
    AUDIO_KEYS,
    MEANT,
    MEANT_TO_ASK,
    METADATA,
    PREFERENCE_KEYS,
    REFERENCES,
    Unknown,
    UnknownKeysError,
    looks_like_media,
    misspelled_key,
    references_of,
    remedy,
    unknown_keys_problem,
)
from megatron_vlm.data.records.record import (
    Image,
    Record,
    Video,
    dicts,
    is_empty,
    require_object,
    single_value,
)
from megatron_vlm.errors import DataError


class Fields:
    """The keys of an object that have a value and are not ignored, and which of them were read."""

    def __init__(self, raw: Mapping[Any, Any], ignored: Collection[str], place: str = ""):
        self.values = {k: v for k, v in raw.items() if v is not None and k not in ignored}
        self.place = place  # in the record
        self.taken: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def take(self, *names: str) -> Any:
        """Return the value at one of these keys, which all mean the same; None without one."""
        self.taken.update(names)
        return single_value(self.values, names)

    def take_first(self, *names: str) -> Any:
        """Return the value at the first of these keys that is there; None without one."""
        return next(iter(self.take_all(*names).values()), None)

    def take_all(self, *names: str) -> dict[str, Any]:
        """Return those of these keys that are there. They may also be keys without effect."""
        self.taken.update(names)
        return {name: self.values[name] for name in names if name in self.values}

    def dicts(self, name: str) -> list[dict[str, Any]]:
        """Return the list of objects at this key; an empty one without it."""
        return dicts(self.take(name) or (), name)

    def left(self) -> dict[str, Any]:
        """Return what has content and was not read."""
        values = self.values.items()
        return {str(k): v for k, v in values if k not in self.taken and not is_empty(v)}


class Keys:
    """Reader of a record's objects, which finds the keys that are neither read nor to be ignored.
    With `strict`, no key of the record itself may be passed over."""

    def __init__(
        self, ignored: Collection[str] = (), strict: bool = False, prompts_only: bool = False
    ):
        """Make a reader. With `prompts_only`, a reward gets the keys that are not read."""
        self.ignored, self.strict, self.prompts_only = frozenset(ignored), strict, prompts_only
        self.needed: Collection[str] = ()  # further keys that may not be passed over
        self.passed: list[str] = []  # keys of the record itself whose values are not used
        self.media_parts: Counter[str] = Counter()  # parts so far that are images and videos
        self.marked: list[str] = []  # texts of formats that have marks for images and videos
        self._opened: list[Fields] = []  # without the record itself
        self._path: list[str] = []

    @contextmanager
    def record_at(self, where: str) -> Iterator[None]:
        """Give the errors of a block their place: this one, and the path inside the record."""
        try:
            yield
        except DataError as error:
            path = ", ".join(self._path)
            raise error.within(": ".join(filter(None, (where, path)))) from error

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Read what is at a place of the record. An error leaves the path as it is."""
        self._path.append(place)
        yield
        self._path.pop()

    def open(self, raw: Any) -> Fields:
        """Return the keys of an object inside the record."""
        fields = Fields(require_object(raw), self.ignored, ", ".join(self._path))
        self._opened.append(fields)
        return fields

    def record(self, raw: Mapping[Any, Any]) -> Fields:
        """Return the record without nulls, ignored keys and metadata; refuse untrainable kinds."""
        fields = Fields(raw, self.ignored | METADATA)
        filled = fields.left().keys()
        # In other data, `label` is a class: a key like any other.
        is_label = isinstance(fields.values.get("label"), bool)
        marks = sorted(filled & PREFERENCE_KEYS) or ["label"] * is_label
        if marks and not self.prompts_only:
            raise DataError(
                f": this is preference data, by {_join_names(marks)}: it says how good answers "
                "are, and train.objective=sft learns every answer",
                key=marks[0],
                remedy="train with train.objective=dpo (kto for labels); or, if all the other keys "
                f"hold what is to be learnt, {remedy(marks, self.ignored)}",
            )
        if marks := sorted(filled & AUDIO_KEYS):
            raise DataError(
                f": there is sound, by {_join_names(marks)}, and the model takes no sound: the "
                "marks would be learnt as text",
                key=marks[0],
                remedy="leave such records out; or, if they make sense without the sound, "
                f"{remedy(marks, self.ignored)}",
            )
        return fields

    def check_record(self, fields: Fields, record: Record) -> None:
        """Refuse a record with keys that are neither read nor passed over."""
        has_media = bool(record.media(Image) or record.media(Video))
        unknown = dict[str, Unknown]()
        for key, value in fields.left().items():
            if key == REFERENCES and references_of({key: value}):
                continue
            is_meant = key in self.needed or key in (MEANT_TO_ASK if self.prompts_only else MEANT)
            is_media = key not in MEANT and looks_like_media(key, value)
            near = "" if key in MEANT or is_media else misspelled_key(key, fields.taken)
            if is_media and not has_media:
                unknown[key] = Unknown(is_media=True)
            elif is_meant or is_media or near or self.strict:
                unknown[key] = Unknown(near=near)
            elif not self.prompts_only:
                self.passed.append(key)
        self.check_opened(unknown)

    def check_opened(self, unknown: Mapping[str, Unknown] | None = None) -> None:
        """Refuse these keys, and those of the objects so far that were not read."""
        all_unknown = dict(unknown or {})
        for fields in self._opened:
            for key in fields.left():
                all_unknown.setdefault(key, Unknown(fields.place))
        if all_unknown:
            self._path.clear()  # the problem names the place of each
            problem = unknown_keys_problem(all_unknown, self.ignored)
            raise UnknownKeysError(**problem, keys=all_unknown)


def _join_names(names: list[str]) -> str:
    return " and ".join(map(repr, names))
