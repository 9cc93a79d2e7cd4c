"""What a record is, whatever file it came from: a chat of turns, or tokens with images between.

`formats.py` makes these from raw dicts; nothing behind it knows about formats.
"""

from dataclasses import dataclass
from typing import Any

import PIL.Image

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Image:
    """A picture that nobody has opened yet: a path or URL, the bytes of a file, or a PIL image."""

    source: str | bytes | PIL.Image.Image

    @property
    def name(self) -> str:
        """For messages: never the bytes."""
        if isinstance(self.source, str):
            return self.source if len(self.source) <= 120 else self.source[:100] + "..."
        return "an image given as " + ("bytes" if isinstance(self.source, bytes) else "PIL image")


@dataclass(frozen=True)
class Video:
    """A video file, or its frames already taken out."""

    source: str | tuple[Image, ...]
    fps: float | None = None  # of the frames given

    @property
    def name(self) -> str:
        return (
            self.source if isinstance(self.source, str) else f"a video of {len(self.source)} frames"
        )


Part = str | Image | Video


@dataclass(frozen=True)
class Turn:
    """One message. `trained` is the record's own word on it, None where it says nothing."""

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    trained: bool | None = None


@dataclass(frozen=True)
class Chat:
    """Turns that the tokenizer's chat template renders."""

    where: str  # file and line, for messages
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def media(self, kind: type) -> list[Any]:
        """All images, or all videos, in the order in which the model sees them."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, kind)]


@dataclass(frozen=True)
class ImageChunk:
    """A picture among tokens, with the number of tokens its maker counted on."""

    image: Image
    expected_tokens: int | None


@dataclass(frozen=True)
class Chunks:
    """Tokens that somebody else encoded, with images between, and a mask of what is trained."""

    where: str
    chunks: tuple[tuple[int, ...] | ImageChunk, ...]
    mask: tuple[bool, ...] | None

    def media(self, kind: type) -> list[Any]:
        """As of a chat; chunk lists have no videos."""
        images = [chunk.image for chunk in self.chunks if isinstance(chunk, ImageChunk)]
        return images if kind is Image else []


Record = Chat | Chunks
