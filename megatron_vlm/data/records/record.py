"""Record: a chat of turns, or tokens with images between, whatever file it came from.

`formats.py` makes them from raw dicts; the code after it knows nothing about formats.
"""

from dataclasses import dataclass
from typing import Any

import PIL.Image


@dataclass(frozen=True)
class Image:
    """An image that is not opened yet: a path or URL, the bytes of a file, or a PIL image."""

    source: str | bytes | PIL.Image.Image
    min_pixels: int | None = None  # of the resized image; None: as for all images
    max_pixels: int | None = None

    @property
    def name(self) -> str:
        """A short name for messages."""
        if isinstance(self.source, str):
            return self.source if len(self.source) <= 120 else self.source[:100] + "..."
        return "an image given as " + ("bytes" if isinstance(self.source, bytes) else "PIL image")


@dataclass(frozen=True)
class VideoOptions:
    """What a record says about one of its videos, in the names that it uses; None: as for all."""

    fps: float | None = None  # of a file: frames to take of a second; of a list: frames in one
    nframes: int | None = None  # frames to take, instead of fps
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None  # of each resized frame
    max_pixels: int | None = None
    total_pixels: int | None = None  # of all temporal patches, which have the pixels of a frame
    video_start: float | None = None  # seconds: only frames from here
    video_end: float | None = None  # to here are taken
    times: tuple[float, ...] | None = None  # of each frame of a list, in seconds


@dataclass(frozen=True)
class Video:
    """A video file, or a list of frames."""

    source: str | tuple[Image, ...]
    options: VideoOptions = VideoOptions()

    @property
    def name(self) -> str:
        """A short name for messages."""
        source = self.source
        return source if isinstance(source, str) else f"a video of {len(source)} frames"


Part = str | Image | Video


@dataclass(frozen=True)
class ChatMessage:
    """One message. `weight` is what the record says about its loss, None if it says nothing."""

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    weight: float | None = None  # 0: it is not trained
    reasoning: str = ""  # what an assistant thinks before it answers


@dataclass(frozen=True)
class Box:
    """[x1, y1, x2, y2] of a box, or [x, y] of a point, on an image of the chat."""

    numbers: tuple[float, ...]
    unit: str  # real: pixels; norm1, norm1000: parts or thousandths of the picture's sides
    image: int  # its number among the images of the chat


@dataclass(frozen=True)
class Objects:
    """What the marks `<ref-object>` and `<bbox>` in the texts stand for, in the order of each."""

    refs: tuple[str, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Conversation:
    """Turns that the tokenizer's chat template renders."""

    where: str  # file and line, for messages
    turns: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    objects: Objects | None = None  # None: the marks, if any, are plain text

    def media(self, kind: type) -> list[Any]:
        """All images, or all videos, in the order that the model sees them in."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, kind)]


@dataclass(frozen=True)
class ImageChunk:
    """An image among tokens, and the number of tokens that its maker expects it to take."""

    image: Image
    expected_tokens: int | None


@dataclass(frozen=True)
class EncodedRecord:
    """Tokens that were encoded elsewhere, with images between, and the weight of each."""

    where: str
    chunks: tuple[tuple[int, ...] | ImageChunk, ...]
    mask: tuple[float, ...] | None  # 0: not trained; None: all of them are

    def media(self, kind: type) -> list[Any]:
        """All images, in order; chunk lists have no videos."""
        images = [chunk.image for chunk in self.chunks if isinstance(chunk, ImageChunk)]
        return images if kind is Image else []


Record = Conversation | EncodedRecord
