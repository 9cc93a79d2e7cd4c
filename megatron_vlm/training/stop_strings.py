"""Strings at which an answer ends, and the text in which they are searched."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_vlm.data.tokens.growing_text import GrowingText, TextOf


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
    first token at which the text of the whole answer contains one."""

    text_of: TextOf
    strings: Sequence[str]
    growing: GrowingText = field(init=False)

    def __post_init__(self) -> None:
        self.longest = max(map(len, self.strings))
        self.growing = GrowingText(self.text_of)

    def found(self, ids: Sequence[int]) -> bool:
        """Return whether the answer contains a string, now that it has one more token."""
        begin = max(0, len(self.growing.settled) - self.longest)
        text = self.growing.advance(ids)
        return any(text.find(string, begin) >= 0 for string in self.strings)
