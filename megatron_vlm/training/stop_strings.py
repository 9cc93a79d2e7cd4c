"""Strings at which an answer ends, and the text that they are looked for in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TextOf = Callable[[Sequence[int]], str]

# Characters at the beginning of a tail that may differ from those of the whole answer: a character
# whose first bytes are in the tokens before, or a space that a decoder leaves out at a beginning.
SEAM = 8
WINDOW = 16  # tokens of a tail, beside as many as the longest string has characters


@dataclass(frozen=True)
class Texts:
    """What ids say."""

    plain: TextOf  # without special tokens
    shown: TextOf | None = None  # with them
    special: tuple[str, ...] = ()  # their texts

    def of(self, string: str) -> TextOf:
        """Where a string is looked for: one that has a special token in it is found only where
        those are shown."""
        if self.shown is None or not any(token in string for token in self.special):
            return self.plain
        return self.shown

    def searches(self, strings: Sequence[str]) -> list["StopSearch"]:
        """What finds these strings in an answer."""
        found: dict[TextOf, list[str]] = {}
        for string in strings:
            found.setdefault(self.of(string), []).append(string)
        return [StopSearch(text_of, of_it) for text_of, of_it in found.items()]


@dataclass
class StopSearch:
    """Looks for strings in an answer that grows by a token at a time, and finds them at the token
    at which the text of the whole answer has one first.

    Only a tail of the answer is decoded. What a token says may depend on those before it, so a tail
    begins only where its text was seen to be the end of the text of all that is decoded, with room
    for the longest string, for a character that is not complete, and for the seam. Where no tail is
    such, more is decoded, at worst the whole answer.
    """

    text_of: TextOf
    strings: Sequence[str]
    start: int = 0  # the first token of the tail
    window: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = max(map(len, self.strings))
        self.window = WINDOW + self.longest

    def found(self, ids: Sequence[int]) -> bool:
        """Whether there is one, now that the answer has one more token."""
        text = self.text_of(ids[self.start :])
        seam = SEAM if self.start else 0
        if any(text.find(string, seam) >= 0 for string in self.strings):
            return True
        if len(ids) - self.start >= 2 * self.window:
            self._shorten(ids, text)
        return False

    def _shorten(self, ids: Sequence[int], text: str) -> None:
        start = len(ids) - self.window
        tail = self.text_of(ids[start:])
        # What comes may still change the last character, and complete a string that began before.
        if len(tail) >= self.longest + 2 * SEAM and text[SEAM:].endswith(tail[SEAM:]):
            self.start = start
        else:
            self.window *= 2
