"""Records: a chat of turns, or tokens with images in between, from a file of any format.

`formats.py` makes them from raw dicts. The code after it knows nothing about formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import PIL.Image


@dataclass(frozen=True)
class Image:
    """An image that is not opened yet: a path or URL, the bytes of a file, or a PIL image."""

    source: str | bytes | PIL.Image.Image
    min_pixels: int | None = None  # in the resized image; None: as for all images
    max_pixels: int | None = None

    @property
    def name(self) -> str:
        """A short name for messages."""
        if isinstance(self.source, str):
            return self.source if len(self.source) <= 120 else self.source[:100] + "..."
        return "an image given as " + ("bytes" if isinstance(self.source, bytes) else "PIL image")


@dataclass(frozen=True)
class VideoOptions:
    """Options that a record sets for one of its videos, named as in the record. None: as for all
    videos."""

    fps: float | None = None  # file: frames to take per second; list: frames per second
    nframes: int | None = None  # frames to take, instead of fps
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None  # in each resized frame
    max_pixels: int | None = None
    total_pixels: int | None = None  # in all temporal patches, each with a frame's pixels
    video_start: float | None = None  # seconds; earlier frames are not taken
    video_end: float | None = None  # seconds; later frames are not taken
    times: tuple[float, ...] | None = None  # seconds, for each frame of a list


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
    """A message of a chat. `weight` is the weight of its loss; None if the record does not give
    one."""

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    weight: float | None = None  # 0: not trained
    reasoning: str = ""  # an assistant's thoughts before its answer


@dataclass(frozen=True)
class Box:
    """A box [x1, y1, x2, y2] or a point [x, y] on an image of the chat."""

    numbers: tuple[float, ...]
    unit: str  # real: pixels; norm1, norm1000: parts or thousandths of the picture's sides
    image: int  # number among the images of the chat


@dataclass(frozen=True)
class Objects:
    """Values of the marks `<ref-object>` and `<bbox>` in the texts, in the order of each kind."""

    refs: tuple[str, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Conversation:
    """Turns that the tokenizer's chat template renders."""

    where: str  # file and line, for messages
    turns: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    objects: Objects | None = None  # None: the marks, if any, are plain text
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template

    def media(self, kind: type) -> list[Any]:
        """Return all images, or all videos, in the order in which the model sees them."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, kind)]


@dataclass(frozen=True)
class ImageChunk:
    """An image among tokens, and the number of tokens that its maker expects it to take."""

    image: Image
    expected_tokens: int | None


@dataclass(frozen=True)
class EncodedRecord:
    """Tokens that were encoded elsewhere, with images in between, and the weight of each token."""

    where: str
    chunks: tuple[tuple[int, ...] | ImageChunk, ...]
    mask: tuple[float, ...] | None  # 0: not trained; None: all are trained

    def media(self, kind: type) -> list[Any]:
        """Return all images, in order; chunk lists have no videos."""
        images = [chunk.image for chunk in self.chunks if isinstance(chunk, ImageChunk)]
        return images if kind is Image else []


Record = Conversation | EncodedRecord
