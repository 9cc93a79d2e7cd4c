"""Keys of a record: each is read, ignored by a rule, or refused, so that nothing is dropped
silently. Objects remember which of their keys were read."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import PIL.Image

from megatron_vlm.data.records.record import (
    IMAGE_OPTIONS,
    VIDEO_OPTIONS,
    Image,
    Record,
    Video,
    dicts,
    is_empty,
    require_object,
    single_value,
)
from megatron_vlm.errors import DataError

# These keys have a meaning in some format, here or elsewhere, that changes what is learnt.
MEANT = frozenset(
    ("messages", "conversations", "conversation", "prompt", "completion", "instruction", "output")
    + ("input", "inputs", "outputs", "history", "query", "response", "responses", "system")
    + ("system_prompt", "chunks", "model_input", "loss_fn_inputs", "logprobs", "advantages")
    + ("advantage", "weight", "weights", "loss_weight", "loss_weights", "loss_mask", "mask")
    + ("loss", "train", "trainable", "input_ids", "labels", "attention_mask", "position_ids")
    + ("pixel_values", "image_grid_thw", "tools", "tool_calls", "tool_choice", "functions")
    + ("function_call", "documents", "objects", "image", "images", "video", "videos")
    + ("reasoning", "reasoning_content", "thinking", "enable_thinking")
    + ("chat_template", "chat_template_kwargs", "template_kwargs", "image_root")
    + (*IMAGE_OPTIONS, *VIDEO_OPTIONS)
)
# Beside a prompt for reinforcement learning, these would be another prompt. All other keys are for
# the reward.
MEANT_TO_ASK = frozenset({"messages", "conversations", "conversation", "chunks", "model_input"})
_MEDIA_NAME = re.compile(
    r"([a-z0-9]+_)*(image|img|picture|pic|photo|video|frame|clip|audio|sound)s?"
    r"(_?(path|file|name|url|uri|link|bytes|data|base64|b64|list|content|\d)s?)*|file_?names?"
)
_FILE_NAME = re.compile(r"(media|file|path|url|uri|src)s?(_?(file|path|name|url|uri)s?)?")
_MEDIA_FILE = re.compile(
    r".*\.(png|jpe?g|webp|gif|bmp|tiff?|avif|mp4|m4v|avi|mov|mkv|webm|wav|mp3|flac|ogg)",
    re.I | re.S,
)
_MAX_SHOWN = 20
_LONGEST = 80  # letters; longer names are not examined
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
# These keys hold the origin and the name of a record. Their values are never learnt.
METADATA = frozenset(
    ("id", "idx", "uuid", "image_id", "video_id", "question_id", "conversation_id")
    + ("source", "data_source", "dataset", "_dataset_name", "split")
    + ("category", "kind", "language", "license", "metadata", "parallel_tool_calls")
    # The group of a record's loss in ms-swift's log, and the sizes that LLaVA and InternVL note.
    + ("channel", "width", "height", "width_list", "height_list")
)
PREFERENCE_KEYS = frozenset(
    ("chosen", "chosen_messages", "chosen_response", "kto_tag")
    + ("rejected", "rejected_messages", "rejected_response")
)
# A list of all right answers to a record's question, by which an evaluation scores. It is not
# learnt: the record's own answer is.
REFERENCES = "answers"
AUDIO_KEYS = frozenset({"audio", "audios"})


@dataclass(frozen=True)
class Unknown:
    """The reason why a key is refused."""

    place: str = ""  # place of its first occurrence in the record
    near: str = ""  # the known key that was most likely meant
    is_media: bool = False  # it looks like pictures or videos, and the record has no others


class UnknownKeysError(DataError):
    """Error about keys of a record that are neither read nor passed over, by name in `keys`."""

    def __init__(
        self, problem: str = "", *, keys: Mapping[str, Unknown] | None = None, **fields: Any
    ) -> None:
        super().__init__(problem, **fields)
        self.keys = dict(keys or {})

    def within(self, place: str) -> Self:
        error = super().within(place)
        error.keys = self.keys
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {"keys": self.keys}


def unknown_keys_problem(
    keys: Mapping[str, Unknown], ignored: Collection[str], counts: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the fields of an error about these keys, with the setting that ignores them where that
    may be right. `counts`: the number of records that have each key."""
    shown = {
        name: _describe_key(name, why, (counts or {}).get(name, "")) for name, why in keys.items()
    }
    media = [name for name, why in keys.items() if why.is_media]
    problems, remedies = [], []
    if media:
        one = len(media) == 1
        problems.append(
            f"{_list_names(shown[name] for name in media)} look{'s' * one} like pictures, videos "
            "or sound, and the record has no others"
        )
        remedies.append(
            f"name {'it' if one else 'them'} image, images, video or videos, so that they are seen"
        )
    if others := [name for name in keys if name not in media]:
        problems.append(
            f"the meaning of {_list_names(shown[name] for name in others)} is not known, or not "
            "supported here"
        )
        remedies.append(f"see docs/data.md. If training may ignore it, {remedy(others, ignored)}")
    problem = f": {'; '.join(problems)}"
    return {"problem": problem, "remedy": "; ".join(remedies)}


def remedy(names: Iterable[str], ignored: Collection[str]) -> str:
    """Return the setting that ignores these keys, too, as if they were absent."""
    ignorable = sorted({*ignored, *names})[:_MAX_SHOWN]
    spelled = [name if _PLAIN.fullmatch(name) else repr(name[:80]) for name in ignorable]
    return f"set data.ignore_keys=[{','.join(spelled)}]"


def looks_like_media(key: str, value: Any) -> bool:
    """Return whether an unread key most likely holds or names pictures, videos or sound."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, bytes | PIL.Image.Image):
        return True
    if isinstance(first, Mapping):
        return bool(first.get("bytes"))
    if isinstance(first, bool | int | float):
        return False
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower() if len(key) <= _LONGEST else ""
    is_file = isinstance(first, str) and _MEDIA_FILE.fullmatch(first[-80:]) is not None
    return bool(_MEDIA_NAME.fullmatch(name) or (is_file and _FILE_NAME.fullmatch(name)))


def misspelled_key(key: str, known: Iterable[str]) -> str:
    """Return the known key that differs from this one by one or two letters, or ""."""
    return _nearest_key(key, frozenset(known)) if len(key) <= _LONGEST else ""


@lru_cache(maxsize=4096)  # the records of a file have the same keys
def _nearest_key(key: str, known: frozenset[str]) -> str:
    max_distance = 2 if len(key) > 5 else 1
    near = {other: _distance(key.lower(), other) for other in sorted(known)}
    nearest = min(near, key=lambda other: (near[other], abs(len(other) - len(key))), default="")
    return nearest if nearest and near[nearest] <= max_distance else ""


def _distance(one: str, other: str) -> int:
    """Count the letters that are added, left out, exchanged, or swapped with their neighbour."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        older, before, row = before, row, [i + 1]
        for j, same in enumerate(other):
            cost = min(before[j] + (letter != same), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == same:
                cost = min(cost, older[j - 1] + 1)
            row.append(cost)
    return row[-1]


def _describe_key(name: str, why: Unknown, count: str) -> str:
    more = [why.place, why.near and f"most likely {why.near!r}", count]
    details = "; ".join(filter(None, more))
    return f"{name[:80]!r}" + (f" ({details})" if details else "")


def _list_names(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def references_of(raw: Any) -> tuple[str, ...]:
    """Return all right answers that a record lists: `answers`, if that is a list of texts."""
    answers = raw.get(REFERENCES) if isinstance(raw, Mapping) else None
    is_listed = isinstance(answers, list | tuple) and all(isinstance(text, str) for text in answers)
    return tuple(answers or ()) if is_listed else ()


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
        present = [name for name in names if name in self.values]
        return single_value(self.values, present) if present else None

    def take_first(self, *names: str) -> Any:
        """Return the value at the first of these keys that is there; None without one."""
        return next(iter(self.take_all(*names).values()), None)

    def take_all(self, *names: str) -> dict[str, Any]:
        """Return the keys present, with their values. They may also be keys without effect."""
        self.taken.update(names)
        return {name: self.values[name] for name in names if name in self.values}

    def dicts(self, name: str) -> list[dict[str, Any]]:
        """Return the list of objects at this key; an empty one without it."""
        value = self.take(name)
        return dicts(value, name) if value else []

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
        self.unused_keys: list[str] = []  # keys of the record itself whose values are not used
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
                self.unused_keys.append(key)
        self.check_opened(unknown)

    def check_opened(self, unknown: Mapping[str, Unknown] | None = None) -> None:
        """Refuse these keys, and all unread keys of the objects so far."""
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
