"""Videos of Gemma 4 as patches, value for value as Hugging Face's processor makes them: 32 frames,
each a picture of its own with a small budget of tokens.

Shapes: P patches, C values of a patch (side x side x 3 colours)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.gemma4.images import Gemma4Images, read_fixed, refuse_given, spread
from megatron_vlm.family.images import resize_frame
from megatron_vlm.family.video_plan import VideoInfo, VideoOptions, VideoPlan

_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames")
_FIXED: dict[str, Any] = {**dict.fromkeys(_ON, True), "resample": 3, "rescale_factor": 1 / 255}
_FIXED |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
_OWN_NAMES = ("patch_size", "max_soft_tokens", "pooling_kernel_size", "num_frames")


@dataclass(frozen=True)
class Gemma4Videos(Gemma4Images):
    """The settings of the checkpoint's video processor."""

    max_soft_tokens: int = 70  # in a frame
    num_frames: int = 32
    temporal_patch_size: ClassVar[int] = 1
    limits: ClassVar[str] = "num_frames or max_soft_tokens in its processor_config.json"

    @staticmethod
    def from_checkpoint(
        folder: str | Path, chosen: Mapping[str, float | None] = MappingProxyType({})
    ) -> "Gemma4Videos":
        """Read the checkpoint's settings. `chosen` may not bound pixels or frames."""
        path, raw = read_fixed(folder, "video", "video_preprocessor_config.json", _FIXED)
        settings = {f"data.video.{key}": value for key, value in chosen.items()}
        why = "which takes the same number of frames and tokens of every video"
        remedy = f"leave it out, and set num_frames or max_soft_tokens in {path}"
        refuse_given(ConfigError, settings, why, remedy=remedy)
        return Gemma4Videos(**{key: raw[key] for key in _OWN_NAMES if raw.get(key)})

    def plan(
        self,
        info: VideoInfo,
        sample: bool = True,
        where: str = "the video",
        options: VideoOptions = VideoOptions(),
    ) -> VideoPlan:
        """Choose frames, and the size of each. A record may set the number of frames (nframes), or
        how many to take in a second (fps)."""
        others = {k: v for k, v in vars(options).items() if k not in ("nframes", "fps", "times")}
        why = "where nframes and fps choose the frames"
        refuse_given(DataError, others, why, place=where, remedy="leave it out")
        fps = info.rate(where)
        count, length = info.num_frames, info.num_frames
        if sample:
            count = options.nframes or self.num_frames
            if options.fps is not None and options.nframes is None:
                count = int(length / fps * options.fps)
        if not 1 <= count <= length:
            raise DataError(
                f": {count} of {length} frames would be taken",
                place=where,
                remedy=f"set nframes of the video to a number from 1 to {length}",
            )
        indices = tuple(torch.arange(0, length, length / count).int().tolist())
        times = options.times or tuple(index / fps for index in indices)
        height, width = self.resized_size(info.height, info.width)
        grid = (len(indices), height // self.patch_size, width // self.patch_size)
        return VideoPlan(indices, tuple(times), grid, height, width)

    def text(self, plan: VideoPlan) -> str:
        """Return the text in the place of the template's mark: each frame's time in minutes and
        seconds, then a placeholder in brackets."""
        frame = CHAT.marks.start + CHAT.marks.video + CHAT.marks.end
        times = (divmod(int(seconds), 60) for seconds in plan.timestamps)
        return " ".join(f"{minutes:02d}:{seconds:02d} {frame}" for minutes, seconds in times)

    def patches(self, frames: Iterable[np.ndarray], plan: VideoPlan) -> np.ndarray:  # type: ignore[override]
        """Return the patches [P, C] of the plan's frames as bytes."""
        size = plan.height, plan.width
        resized = [self.split(resize_frame(each, *size).transpose(1, 2, 0)) for each in frames]
        if len(resized) != len(plan.indices):
            raise DataError(
                f"has {len(resized)} frames, and was planned with {len(plan.indices)}",
                place="the video",
                remedy="give as many frames as planned",
            )
        return np.concatenate(resized)

    def table(self) -> Tensor:
        """Return [3, 256], the float for each byte of each colour. Hugging Face's video processor
        divides, where its image processor multiplies."""
        return spread(torch.arange(256, dtype=torch.float32) / 255)
