"""Text of tokens that follow one another, such as those of an answer that is being drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TextOf = Callable[[Sequence[int]], str]

# This many characters at the beginning of a tail may differ from those of the whole answer: the
# first bytes of a character may be in earlier tokens, and a decoder may drop a leading space.
SEAM = 8
WINDOW = 16  # tokens of a tail


@dataclass
class GrowingText:
    """The text of an answer that grows.

    Only a tail of the answer is decoded. The text of a token may depend on those before it. So a
    tail begins only where its text was the same as the end of all decoded text, with room for an
    incomplete character and for the seam. Otherwise more is decoded.
    """

    text_of: TextOf
    settled: str = field(default="", init=False)  # text before the tail, without its seam
    start: int = field(default=0, init=False)  # first token of the tail
    window: int = field(default=WINDOW, init=False)

    def advance(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, now that it has more tokens."""
        tail = self.text_of(ids[self.start :])
        text = self.settled + (tail[SEAM:] if self.start else tail)
        if len(ids) - self.start >= 2 * self.window:
            self._settle(ids, text)
        return text

    def _settle(self, ids: Sequence[int], text: str) -> None:
        start = len(ids) - self.window
        shown = self.text_of(ids[start:])[SEAM:]
        # Later tokens may still change the last character.
        if len(shown) >= SEAM and text.endswith(shown):
            self.settled, self.start = text[: len(text) - len(shown)], start
            self.window = WINDOW
        else:
            self.window *= 2
