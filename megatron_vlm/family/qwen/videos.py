"""Qwen's videos as patches, value for value as Hugging Face's processor makes them.

Shapes: P patches, C values of a patch (3 channels x frames x side x side)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.images import check_aspect, resize_frame
from megatron_vlm.family.processor_files import read_processor
from megatron_vlm.family.qwen.chat import CHAT
from megatron_vlm.family.qwen.images import PatchSizes, smart_resize
from megatron_vlm.family.video_plan import VideoInfo, VideoOptions, VideoPlan

_BOUNDS = ("min_pixels", "max_pixels", "total_pixels")  # a record may set these
# Any other value than true would make other patches, and is refused.
_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames")
_FIXED = {"resample": 3, "num_frames": None, **dict.fromkeys(_ON, True)}


@dataclass(frozen=True)
class VideoSettings(PatchSizes):
    """The settings in video_preprocessor_config.json; the defaults are Hugging Face's."""

    limits: ClassVar[str] = "data.video.max_pixels or data.video.max_frames"
    min_pixels: int = 128 * 32 * 32  # in all resized frames of a video together
    max_pixels: int = 768 * 32 * 32
    fps: float = 2  # frames to take per second
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768  # limit per frame, with cap_pixels_per_frame
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    @classmethod
    def from_checkpoint(
        cls, folder: str | Path, chosen: Mapping[str, float | None] = MappingProxyType({})
    ) -> "VideoSettings":
        """Read the checkpoint's settings, from the files that Hugging Face reads, in its order.
        Values in `chosen` that are not None replace them."""
        path, raw = read_processor(folder, "video", "video_preprocessor_config.json")
        for key, needed in _FIXED.items():
            if raw.get(key, needed) != needed:
                raise ConfigError(
                    "is not supported", place=str(path), key=key, found=raw[key], allowed=(needed,)
                )
        values = {item.name: raw[item.name] for item in fields(cls) if item.name in raw}
        # Hugging Face reads the two bounds from size alone, and ignores other fields for them.
        size = raw.get("size") or {"shortest_edge": cls.min_pixels, "longest_edge": cls.max_pixels}
        values |= {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        values["cap_pixels_per_frame"] = bool(raw.get("cap_pixels_per_frame"))
        for key, value in values.items():
            if value is None:
                raise ConfigError(
                    f"has no value (size: {size})", place=str(path), key=key, allowed="a value"
                )
            values[key] = tuple(value) if isinstance(value, list) else value
        values |= {key: value for key, value in chosen.items() if value is not None}
        settings = cls(**values)
        settings._check(chosen, path)
        return settings

    def _check(self, chosen: Mapping[str, float | None], path: Path) -> None:
        """Refuse bounds that contradict each other. A minimum of frames above the maximum is no
        contradiction where the minimum is the checkpoint's: Hugging Face takes the maximum."""
        for name in ("pixels", "frames"):
            lower, upper = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if lower > upper and (name == "pixels" or chosen.get("min_frames")):
                raise ConfigError(
                    f"is above data.video.max_{name}={upper}",
                    key=f"data.video.min_{name}",
                    found=lower,
                    remedy=f"set both, since one that is null has the value in {path}",
                )

    def plan(
        self,
        info: VideoInfo,
        sample: bool = True,
        where: str = "the video",
        options: VideoOptions = VideoOptions(),
    ) -> VideoPlan:
        """Choose frames and their size. sample=False takes every frame, as Hugging Face does with
        do_sample_frames=False when it receives frames. `options` come from the record."""
        fps = info.rate(where)
        first, length = _clip(info, options, where)
        count = _count(length, fps, self, options, where) if sample else length
        span = self.temporal_patch_size
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
        height, width = _resized_size(count, info, self, options, where)
        grid = (len(timestamps), height // self.patch_size, width // self.patch_size)
        return VideoPlan(tuple(indices), timestamps, grid, height, width)

    def text(self, plan: VideoPlan) -> str:
        """Return the text for one video of the chat template, without the template's brackets
        around it: each temporal patch's time, then a placeholder in brackets."""
        frame = CHAT.marks.start + CHAT.marks.video + CHAT.marks.end
        return "".join(f"<{seconds:.1f} seconds>{frame}" for seconds in plan.timestamps)

    def patches(self, frames: Iterable[np.ndarray], plan: VideoPlan) -> np.ndarray:
        """Return the patches [P, C] of the plan's frames as bytes, in Hugging Face's order. If
        frames come one at a time, only the resized ones are kept in memory."""
        resized, shapes = [], set()
        for frame in frames:
            assert frame.dtype == np.uint8 and frame.ndim == 3, "RGB bytes [height, width, 3]"
            shapes.add(frame.shape)
            resized.append(resize_frame(frame, plan.height, plan.width))
        if len(resized) != len(plan.indices) or len(shapes) > 1:
            raise DataError(
                f"has {len(resized)} frames of shapes {sorted(shapes)}, and was planned with "
                f"{len(plan.indices)} frames",
                place="the video",
                remedy="give as many frames as planned, all of the same size",
            )
        (t, h, w), side, merge = plan.grid, self.patch_size, self.merge_size
        span = self.temporal_patch_size
        resized += resized[-1:] * (t * span - len(resized))
        shape = (t, span, 3, h // merge, merge, side, w // merge, merge, side)
        pixels = np.stack(resized).reshape(shape)
        # Patches that merge into one token are adjacent; in a patch, frames are inside channels.
        ordered = pixels.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return np.ascontiguousarray(ordered).reshape(t * h * w, -1)

    def table(self) -> Tensor:
        """Return [3, 256], the float for each byte of each colour. Hugging Face's video processor
        folds the rescaling into mean and std; its image processor does not, and rounds
        differently."""
        mean, std = (
            torch.tensor(values)[:, None] * (1.0 / self.rescale_factor)
            for values in (self.image_mean, self.image_std)
        )
        return (torch.arange(256, dtype=torch.float32) - mean) / std


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
