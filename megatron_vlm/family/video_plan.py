"""A video before its frames are decoded: what its record asks for, its length and size, and the
plan of the frames that the model sees."""

import math
from dataclasses import dataclass

from megatron_vlm.errors import DataError

Grid = tuple[int, int, int]  # patches in time, height and width


@dataclass(frozen=True)
class VideoOptions:
    """Options of a record for one of its videos, named as there. None: as for all videos."""

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
class VideoInfo:
    """Facts about a video before frames are chosen."""

    num_frames: int
    fps: float | None
    height: int
    width: int

    def rate(self, where: str) -> float:
        """Return the frames per second, or Hugging Face's guess."""
        if self.fps is None:
            return 24
        if not 0 < self.fps < math.inf:
            allowed = "frames per second above 0, or none"
            raise DataError(place=where, key="fps", found=self.fps, allowed=allowed)
        return self.fps


@dataclass(frozen=True)
class VideoPlan:
    """The frames to take, their timestamps and size. The last temporal patch repeats the last."""

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]  # seconds, one for each temporal patch
    grid: Grid
    height: int  # pixels of a resized frame
    width: int
