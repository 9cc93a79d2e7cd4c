"""Which keys are read and which are refused: what a record says is never left out in silence."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from megatron_vlm.data.read.values import is_empty
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
_MOST_SHOWN = 20
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


class Keys:
    """The keys that were met in one record and are neither read nor to be ignored."""

    def __init__(self, where: str, ignored: Collection[str]):
        self.where, self.ignored = where, frozenset(ignored)
        self.unknown: dict[str, str] = {}  # with the place of the first

    def read(self, raw: Mapping[Any, Any], known: Collection[str], where: str) -> dict[str, Any]:
        """The keys that are read and have a value. Others that have one are remembered."""
        found = {}
        for key, value in raw.items():
            if value is None or key in self.ignored:
                continue
            if key in known:
                found[key] = value
            elif not is_empty(value):
                self.unknown.setdefault(str(key), where.removeprefix(self.where).lstrip(": "))
        return found

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
                f"{self.where}: this is preference data, by {_listed(marks)}: it says how good "
                "answers are, as for DPO or KTO, and training here is supervised and learns "
                "every answer. Make records of the good answers alone, as messages; or, if all "
                f"the other keys hold what is to be learnt, {self._remedy(marks)}"
            )
        if marks := sorted(given & _AUDIO):
            raise DataError(
                f"{self.where}: there is sound, by {_listed(marks)}, and Qwen3-VL hears none: its "
                "marks would be learnt as text. Leave such records out; or, if they make sense "
                f"without, {self._remedy(marks)}"
            )
        return found

    def check(self) -> None:
        """Refuse the record if it had other keys than those that are read."""
        if not self.unknown:
            return
        places = [
            f"{key[:80]!r}" + (f" ({place})" if place else "")
            for key, place in self.unknown.items()
        ]
        more = len(places) - _MOST_SHOWN
        shown = ", ".join(places[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise DataError(
            f"{self.where}: the meaning of {shown} is not known here, or not carried out; see "
            f"docs/data.md. If training may ignore it, {self._remedy(list(self.unknown))}"
        )

    def _remedy(self, names: list[str]) -> str:
        names = sorted({*self.ignored, *names})[:_MOST_SHOWN]
        spelled = [name if _PLAIN.fullmatch(name) else repr(name[:80]) for name in names]
        return f"set data.ignore_keys=[{','.join(spelled)}]"


def _listed(names: list[str]) -> str:
    return " and ".join(map(repr, names))
