"""Conversion of a video to Qwen3-VL's patches, value for value those of Hugging Face's processor.

Shapes: P patches, C values of a patch (3 channels x frames x side x side)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron_vlm.data.media.images import smart_resize
from megatron_vlm.data.media.media import check_aspect
from megatron_vlm.data.media.processor_settings import VideoSettings
from megatron_vlm.data.records.record import VideoOptions
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import VisionMarks

_BOUNDS = ("min_pixels", "max_pixels", "total_pixels")  # a record may set these


@dataclass(frozen=True)
class VideoInfo:
    """Facts about a video before frames are chosen. Without fps, 24 is assumed."""

    num_frames: int
    fps: float | None
    height: int
    width: int


@dataclass(frozen=True)
class VideoPlan:
    """The frames to take, their timestamps and size. The last temporal patch repeats the last."""

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]  # seconds, one for each temporal patch
    grid_thw: tuple[int, int, int]
    height: int  # pixels of a resized frame
    width: int


def plan_video(
    info: VideoInfo,
    settings: VideoSettings,
    sample: bool = True,
    where: str = "the video",
    options: VideoOptions = VideoOptions(),
) -> VideoPlan:
    """Choose frames and their size. sample=False takes every frame, as Hugging Face does with
    do_sample_frames=False when it receives frames. `options` are those of the record."""
    if info.fps is not None and not 0 < info.fps < math.inf:
        raise DataError(
            place=where, key="fps", found=info.fps, allowed="frames per second above 0, or none"
        )
    fps = 24 if info.fps is None else info.fps  # Hugging Face's guess
    first, length = _clip(info, options, where)
    count = _count(length, fps, settings, options, where) if sample else length
    span = settings.temporal_patch_size
    if count < span:
        raise DataError(
            f": {count} of {length} frames are taken, but a patch spans {span} in time",
            place=where,
            remedy="drop the video, or give its frame as an image",
        )
    indices = (first + np.linspace(0, length - 1, count).round().astype(int)).tolist()
    times = list(options.times or [index / fps for index in indices])
    times += times[-1:] * (-count % span)
    # A timestamp is midway between the first and the last frame of its temporal patch.
    timestamps = tuple((times[i] + times[i + span - 1]) / 2 for i in range(0, len(times), span))
    height, width = _resized_size(count, info, settings, options, where)
    grid = (len(timestamps), height // settings.patch_size, width // settings.patch_size)
    return VideoPlan(tuple(indices), timestamps, grid, height, width)


def _clip(info: VideoInfo, options: VideoOptions, where: str) -> tuple[int, int]:
    """Return the first frame between video_start and video_end, and the number of frames there."""
    start, end = options.video_start, options.video_end
    if start is None and end is None:
        return 0, info.num_frames
    if info.fps is None:
        raise DataError(
            "is in seconds, and the file has no frame rate",
            place=where,
            key="video_end" if start is None else "video_start",
            found=end if start is None else start,
            remedy="re-encode the file",
        )
    first = math.ceil((start or 0) * info.fps)
    last = info.num_frames - 1 if end is None else math.floor(end * info.fps)
    length = min(last, info.num_frames - 1) - first + 1
    if length < 1:
        raise DataError(
            f": the video of {info.num_frames / info.fps:g} seconds has no frame from there to "
            f"video_end={'the end' if end is None else f'{end:g}'}",
            place=where,
            key="video_start",
            found=start or 0,
            remedy="correct them",
        )
    return first, length


def _count(
    length: int, fps: float, settings: VideoSettings, options: VideoOptions, where: str
) -> int:
    """Return the number of frames to take, as Hugging Face's video processor chooses it."""
    if options.nframes is not None:
        if options.nframes > length:
            raise DataError(
                f": there are {length} frames",
                place=where,
                key="nframes",
                found=options.nframes,
                allowed=f"at most {length}",
            )
        return options.nframes
    min_count, max_count = (
        options.min_frames or settings.min_frames,
        options.max_frames or settings.max_frames,
    )
    if min_count > max_count and options.min_frames:
        raise DataError(
            f"is above the maximum of {max_count}",
            place=where,
            key="min_frames",
            found=min_count,
            remedy="lower it, or raise max_frames beside it or data.video.max_frames",
        )
    target = int(min(length / fps * (options.fps or settings.fps), length))
    return min(max(target, min_count), max_count, length)


def _bounds(
    count: int, settings: VideoSettings, options: VideoOptions, where: str
) -> tuple[int, int]:
    """Return the bounds of the pixels of all frames together; a record's own are per frame."""
    side = settings.patch_size * settings.merge_size
    upper, lower, floor = settings.max_pixels, settings.min_pixels, settings.min_pixels
    if options.total_pixels is not None:
        upper = options.total_pixels * settings.temporal_patch_size
    if options.min_pixels is not None:
        lower, floor = options.min_pixels * count, options.min_pixels
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * side * side, upper // count)
        upper = max(share, int(floor * 1.05)) * count
    if options.max_pixels is not None:
        upper = min(upper, options.max_pixels * count)
    if lower > upper and (options.min_pixels or options.max_pixels or options.total_pixels):
        raise DataError(
            f": the {count} frames have a minimum of {lower} pixels together, above the maximum "
            f"of {upper}",
            place=where,
            key=next(key for key in _BOUNDS if getattr(options, key)),
            found=next(value for key in _BOUNDS if (value := getattr(options, key))),
            remedy="change min_pixels, max_pixels or total_pixels beside the video, or "
            "data.video.min_pixels or data.video.max_pixels",
        )
    return lower, upper


def _resized_size(
    count: int, info: VideoInfo, settings: VideoSettings, options: VideoOptions, where: str
) -> tuple[int, int]:
    """Return the size of the resized frames, as Hugging Face's video processor chooses it."""
    side = settings.patch_size * settings.merge_size
    height, width = info.height, info.width
    lower, upper = _bounds(count, settings, options, where)
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect(height, width, where, f"{info.width} x {info.height}")
    span = settings.temporal_patch_size
    return smart_resize(height, width, side, lower, upper, count, span)


def video_text(plan: VideoPlan, merge_size: int, marks: VisionMarks) -> str:
    """Return the text for one video of the chat template, without the template's brackets around
    it: each temporal patch's time, then its placeholders in brackets."""
    _, height, width = plan.grid_thw
    frame = marks.start + marks.video * (height * width // merge_size**2) + marks.end
    return "".join(f"<{seconds:.1f} seconds>{frame}" for seconds in plan.timestamps)


def video_patches(
    frames: Iterable[np.ndarray], plan: VideoPlan, settings: VideoSettings
) -> np.ndarray:
    """Return the patches [P, C] of the plan's frames as bytes, in Hugging Face's order of patches
    and values. If frames come one at a time, only the resized ones are kept in memory."""
    resized, shapes = [], set()
    for frame in frames:
        assert frame.dtype == np.uint8 and frame.ndim == 3, "RGB bytes [height, width, 3]"
        shapes.add(frame.shape)
        resized.append(_resize(frame, plan.height, plan.width))
    if len(resized) != len(plan.indices) or len(shapes) > 1:
        raise DataError(
            f"has {len(resized)} frames of shapes {sorted(shapes)}, and was planned with "
            f"{len(plan.indices)} frames",
            place="the video",
            remedy="give as many frames as planned, all of the same size",
        )
    t, h, w = plan.grid_thw
    side, merge, span = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    resized += resized[-1:] * (t * span - len(resized))
    pixels = np.stack(resized).reshape(t, span, 3, h // merge, merge, side, w // merge, merge, side)
    # Patches that merge into one token are adjacent; within a patch, frames are inside channels.
    ordered = pixels.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(ordered).reshape(t * h * w, -1)


def _resize(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize a frame to [3, height, width] bytes, by the same call that torchvision's resize makes
    for uint8 on a CPU. Its kernel rounds between two passes: floats would give other bytes."""
    pixels = torch.tensor(frame).permute(2, 0, 1)[None]  # a copy: frames may be read-only
    if pixels.shape[2:] != (height, width):
        pixels = F.interpolate(
            pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True
        )
    return pixels[0].numpy()
