"""Strings at which an answer ends, and the text in which they are searched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TextOf = Callable[[Sequence[int]], str]

# This many characters at the beginning of a tail may differ from those of the whole answer: the
# first bytes of a character may be in earlier tokens, and a decoder may drop a leading space.
SEAM = 8
WINDOW = 16  # tokens of a tail, plus one for each character of the longest string


@dataclass(frozen=True)
class Texts:
    """Decoders of ids into text."""

    plain: TextOf  # without special tokens
    shown: TextOf | None = None  # with special tokens
    special: tuple[str, ...] = ()  # texts of the special tokens

    def of(self, string: str) -> TextOf:
        """Return the decoder for the search of a string. If a string contains a special token, it
        can only be found in text that shows special tokens."""
        if self.shown is None or not any(token in string for token in self.special):
            return self.plain
        return self.shown

    def searches(self, strings: Sequence[str]) -> list["StopSearch"]:
        """Return searches that find these strings in an answer."""
        strings_of: dict[TextOf, list[str]] = {}
        for string in strings:
            strings_of.setdefault(self.of(string), []).append(string)
        return [StopSearch(text_of, group) for text_of, group in strings_of.items()]


@dataclass
class StopSearch:
    """A search for strings in an answer that grows by one token at a time. It finds a string at the
    first token at which the text of the whole answer contains one.

    Only a tail of the answer is decoded. The text of a token may depend on those before it. So a
    tail begins only where its text was the same as the end of all decoded text, with room for the
    longest string, for an incomplete character, and for the seam. Otherwise more is decoded.
    """

    text_of: TextOf
    strings: Sequence[str]
    start: int = 0  # first token of the tail
    window: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = max(map(len, self.strings))
        self.window = WINDOW + self.longest

    def found(self, ids: Sequence[int]) -> bool:
        """Return whether the answer contains a string, now that it has one more token."""
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
        # Later tokens may still change the last character, and complete a string that began before.
        if len(tail) >= self.longest + 2 * SEAM and text[SEAM:].endswith(tail[SEAM:]):
            self.start = start
        else:
            self.window *= 2
