"""Qwen's pictures as patches, bit for bit as Hugging Face's processor makes them.

Shapes: P patches, C values of a patch (3 colours x frames x side x side)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.images import MAX_ASPECT
from megatron_vlm.family.processor_files import read_processor
from megatron_vlm.family.video_plan import Grid

# These fields must be true: otherwise patches would be no table look-up of resized RGB bytes.
_NEEDED = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_OWN_NAMES = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "resample")
_BOUNDS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class PatchSizes:
    """Sizes of patches, which pictures and videos of a checkpoint share."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2

    @property
    def token_side(self) -> int:
        """The side in pixels of the square that becomes a token."""
        return self.patch_size * self.merge_size

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of a picture, or of one frame of a video."""
        return grid[1] * grid[2] // self.merge_size**2

    def pictures(self, patches_PC: np.ndarray, grid: Grid) -> np.ndarray:
        """Return pictures [temporal patches, frames in each, H, W, 3], before they were patches."""
        (t, h, w), side, merge = grid, self.patch_size, self.merge_size
        split = patches_PC.reshape(t, h // merge, w // merge, merge, merge, 3, -1, side, side)
        pixels = split.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
        return np.ascontiguousarray(pixels).reshape(t, pixels.shape[1], h * side, w * side, 3)

    def pixel_values(self, patches_PC: Tensor, table: Tensor) -> Tensor:
        """Return pixel_values [P, width] in fp32 from patches as bytes, on their device. The single
        frame of a still picture is repeated in time; a video's patches have all frames already.

        Shapes here: F bytes of a channel of a patch, R repetitions of them."""
        bytes_P3F = patches_PC.view(len(patches_PC), 3, -1)
        repeats = self.temporal_patch_size * self.patch_size**2 // bytes_P3F.shape[2]
        pixels_P3RF = table.new_empty(len(patches_PC), 3, repeats, bytes_P3F.shape[2])
        for channel in range(3):
            places = bytes_P3F[:, channel].flatten().int()
            values_PF = table[channel].index_select(0, places).view(len(patches_PC), -1)
            pixels_P3RF[:, channel] = values_PF[:, None]
        return pixels_P3RF.flatten(1)


@dataclass(frozen=True)
class ImageSettings(PatchSizes):
    """The settings of the checkpoint's image processor."""

    limits: ClassVar[str] = "data.max_pixels"
    max_aspect: ClassVar[float] = MAX_ASPECT
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = 3  # bicubic

    @staticmethod
    def from_checkpoint(
        folder: str | Path, chosen: Mapping[str, Any] = MappingProxyType({})
    ) -> "ImageSettings":
        """Read the checkpoint's settings; the bounds in `chosen` replace its own."""
        path, raw = read_processor(folder, "image", "preprocessor_config.json")
        raw = {key: value for key, value in raw.items() if value is not None}
        for key in _NEEDED:
            if raw.get(key, True) is not True:
                raise ConfigError(
                    "is not supported", place=str(path), key=key, found=raw[key], allowed=(True,)
                )
        raw |= {key: chosen[key] for key in _BOUNDS if chosen.get(key)}
        size = raw.get("size", {})
        settings = ImageSettings(
            **{key: raw[key] for key in _OWN_NAMES if key in raw},
            min_pixels=raw.get("min_pixels") or size.get("shortest_edge") or 65536,
            max_pixels=raw.get("max_pixels") or size.get("longest_edge") or 2**24,
            mean=tuple(raw.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(raw.get("image_std", (0.5, 0.5, 0.5))),
        )
        if settings.min_pixels > settings.max_pixels:
            raise ConfigError(
                f"is above data.max_pixels={settings.max_pixels}",
                key="data.min_pixels",
                found=settings.min_pixels,
                remedy=f"set both, since one that is not set has the value in {path}",
            )
        return settings

    def with_bounds(
        self, min_pixels: int | None, max_pixels: int | None, where: str
    ) -> "ImageSettings":
        """Return the settings of an image whose record bounds its pixels."""
        if min_pixels is None and max_pixels is None:
            return self
        lower, upper = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if lower > upper:
            raise DataError(
                f"is above max_pixels={upper}",
                place=where,
                key="min_pixels",
                found=lower,
                remedy="change min_pixels or max_pixels beside the image, or data.min_pixels or "
                "data.max_pixels",
            )
        return replace(self, min_pixels=lower, max_pixels=upper)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of a picture."""
        return self.max_pixels // self.token_side**2

    def limit_of(self, tokens: int) -> str:
        """Return the setting with which a picture has at most so many tokens."""
        return f"data.max_pixels={tokens * self.token_side**2}"

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which the picture is resized."""
        return smart_resize(height, width, self.token_side, self.min_pixels, self.max_pixels)

    def grid(self, height: int, width: int) -> Grid:
        """Return the image_grid_thw of a picture of this size."""
        new_h, new_w = self.resized_size(height, width)
        return (1, new_h // self.patch_size, new_w // self.patch_size)

    def patches(self, image: PIL.Image.Image) -> np.ndarray:
        """Return the patches [P, C] of an RGB picture as bytes, of a single frame."""
        height, width = self.resized_size(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), resample=self.resample)
        patch, merge = self.patch_size, self.merge_size
        pixels = np.asarray(image).reshape(
            height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3
        )
        # Patches that merge into one token are adjacent.
        ordered = pixels.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(ordered).reshape(-1, 3 * patch * patch)

    def table(self) -> Tensor:
        """Return [3, 256], the float for each byte of each colour. It is computed in numpy, with
        Hugging Face's order of operations and precisions, to get the same bits."""
        rescaled = (np.arange(256).astype(np.float64) * self.rescale_factor).astype(np.float32)
        mean_3, std_3 = (
            np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std)
        )
        return torch.from_numpy((rescaled - mean_3) / std_3)


def smart_resize(
    height: int,
    width: int,
    side: int,
    min_pixels: int,
    max_pixels: int,
    count: int = 1,
    span: int = 1,
) -> tuple[int, int]:
    """Return the new height and width as Hugging Face's smart_resize does: multiples of a token's
    side, all `count` frames within bounds; a patch spans `span` frames in time."""
    new_h, new_w = round(height / side) * side, round(width / side) * side
    # The rounded count of frames decides whether to resize; the true one, by how much.
    total = round(count / span) * span * new_h * new_w
    if total > max_pixels:
        shrink = math.sqrt(count * height * width / max_pixels)
        new_h = max(side, math.floor(height / shrink / side) * side)
        new_w = max(side, math.floor(width / shrink / side) * side)
    elif total < min_pixels:
        grow = math.sqrt(min_pixels / (count * height * width))
        new_h = math.ceil(height * grow / side) * side
        new_w = math.ceil(width * grow / side) * side
    return new_h, new_w
