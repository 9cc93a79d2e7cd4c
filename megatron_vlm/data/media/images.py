"""From a picture to Qwen3-VL's patches, bit for bit what Hugging Face's processor gives.

Patches stay bytes: rescaling and normalising map each of 256 values of a channel to one float, so
a table does it, on the device, after the patches have travelled at a quarter (with the frame that
a still image repeats in time, an eighth) of the size.

Shapes: P patches, C values of a patch (3 channels x frames x side x side).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError

# The fields that must be on, for patches to be a table look-up of resized RGB bytes.
_NEEDED = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class ImageSettings:
    """What preprocessor_config.json says."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = 3  # bicubic

    @staticmethod
    def from_checkpoint(
        folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> "ImageSettings":
        """The checkpoint's own settings; the two bounds may be given instead."""
        path = Path(folder) / "preprocessor_config.json"
        if not path.is_file():
            raise ConfigError(f"no {path}: the checkpoint's image processor settings are needed")
        raw: dict[str, Any] = json.loads(path.read_text())
        for key in _NEEDED:
            if raw.get(key, True) is not True:
                raise ConfigError(f"{path}: {key} is {raw[key]}; only true is supported")
        size = raw.get("size") or {}
        found = ImageSettings(
            **{
                key: raw[key]
                for key in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor")
                if key in raw
            },
            min_pixels=min_pixels or raw.get("min_pixels") or size.get("shortest_edge", 65536),
            max_pixels=max_pixels or raw.get("max_pixels") or size.get("longest_edge", 16777216),
            mean=tuple(raw.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(raw.get("image_std", (0.5, 0.5, 0.5))),
            resample=raw.get("resample", 3),
        )
        if found.min_pixels > found.max_pixels:
            raise ConfigError(
                f"data.min_pixels={found.min_pixels} is above data.max_pixels={found.max_pixels}"
            )
        return found

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Hugging Face's smart_resize: multiples of a visual token's side, area within bounds."""
        side = self.patch_size * self.merge_size
        new_h, new_w = round(height / side) * side, round(width / side) * side
        if new_h * new_w > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_h = max(side, math.floor(height / shrink / side) * side)
            new_w = max(side, math.floor(width / shrink / side) * side)
        elif new_h * new_w < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_h = math.ceil(height * grow / side) * side
            new_w = math.ceil(width * grow / side) * side
        return new_h, new_w

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """image_grid_thw of a picture of this size."""
        new_h, new_w = self.resized(height, width)
        return (1, new_h // self.patch_size, new_w // self.patch_size)


def image_patches(image: PIL.Image.Image, settings: ImageSettings) -> np.ndarray:
    """Patches [P, C] of an RGB picture as bytes, one frame."""
    height, width = settings.resized(image.height, image.width)
    if (width, height) != image.size:
        image = image.resize((width, height), resample=settings.resample)
    patch, merge = settings.patch_size, settings.merge_size
    pixels = np.asarray(image).reshape(
        height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3
    )
    # Patches that merge into one token stand together.
    ordered = pixels.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, 3 * patch * patch)


def normalisation_table(mean: Sequence[float], std: Sequence[float], rescale: float) -> Tensor:
    """[3, 256]: what each byte of each channel becomes. In numpy, with Hugging Face's own order of
    operations and precisions, for the same bits."""
    rescaled = (np.arange(256).astype(np.float64) * rescale).astype(np.float32)
    mean_3, std_3 = (np.array(values, dtype=np.float32)[:, None] for values in (mean, std))
    return torch.from_numpy((rescaled - mean_3) / std_3)


def expand_patches(patches_PC: Tensor, table: Tensor, width: int) -> Tensor:
    """pixel_values [P, width] in fp32 from patches as bytes, on their device. The one frame of a
    still picture is repeated in time; a video's patches have all frames already.

    Shapes here: F bytes of a channel of a patch, R times that they are repeated."""
    bytes_P3F = patches_PC.view(len(patches_PC), 3, -1)
    repeats = width // patches_PC.shape[1]
    pixels_P3RF = table.new_empty(len(patches_PC), 3, repeats, bytes_P3F.shape[2])
    for channel in range(3):
        places = bytes_P3F[:, channel].flatten().int()
        values_PF = table[channel].index_select(0, places).view(len(patches_PC), -1)
        pixels_P3RF[:, channel] = values_PF[:, None]
    return pixels_P3RF.flatten(1)
