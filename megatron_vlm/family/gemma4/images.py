"""Pictures of Gemma 4 as patches, bit for bit as Hugging Face's processor makes them where
torchvision is installed. Its other processor, for Pillow, rounds differently.

Every picture is resized to as many tokens as the checkpoint's budget allows, so small ones are
enlarged and `min_pixels` has no meaning.

Shapes: P patches, C values of a patch (side x side x 3 colours)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from megatron_vlm.errors import ConfigError, DataError, MegatronVLMError
from megatron_vlm.family.images import resize_frame
from megatron_vlm.family.processor_files import read_processor
from megatron_vlm.family.video_plan import Grid

LARGEST_PIXEL = 1.01  # with room for what rounding adds to 1
BUDGETS = (70, 140, 280, 560, 1120)  # tokens of a picture that Hugging Face allows
_ON = ("do_resize", "do_rescale", "do_convert_rgb")
_FIXED: dict[str, Any] = {**dict.fromkeys(_ON, True), "do_normalize": False}
_FIXED |= {"resample": 3, "rescale_factor": 1 / 255}
_OWN_NAMES = ("patch_size", "max_soft_tokens", "pooling_kernel_size")
_SAME_TOKENS = "which gives every picture the same number of tokens"


def refuse_given(
    kind: type[MegatronVLMError], settings: Mapping[str, Any], why: str, **fields: str
) -> None:
    """Refuse the first of these settings that is not None. `fields`: place and remedy."""
    for key, value in settings.items():
        if value is not None:
            raise kind(f"has no meaning for Gemma 4, {why}", key=key, found=value, **fields)


@dataclass(frozen=True)
class Gemma4Images:
    """The settings of the checkpoint's image processor."""

    patch_size: int = 16
    max_soft_tokens: int = 280
    pooling_kernel_size: int = 3
    limits: ClassVar[str] = "max_soft_tokens in its processor_config.json"
    max_aspect: ClassVar[float] = math.inf  # a long picture becomes one row of tokens

    @staticmethod
    def from_checkpoint(
        folder: str | Path, chosen: Mapping[str, Any] = MappingProxyType({})
    ) -> "Gemma4Images":
        """Read the checkpoint's settings. `chosen` may not bound the pixels of pictures."""
        path, raw = read_fixed(folder, "image", "preprocessor_config.json", _FIXED)
        bounds = {f"data.{key}": chosen.get(key) or None for key in ("min_pixels", "max_pixels")}
        remedy = f"leave it out, and set max_soft_tokens in {path} to one of {BUDGETS}"
        refuse_given(ConfigError, bounds, _SAME_TOKENS, remedy=remedy)
        return Gemma4Images(**{key: raw[key] for key in _OWN_NAMES if raw.get(key)})

    @property
    def token_side(self) -> int:
        """The side in pixels of the square that becomes a token."""
        return self.patch_size * self.pooling_kernel_size

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of a picture."""
        return self.max_soft_tokens

    def limit_of(self, tokens: int) -> str:
        """Return the setting with which a picture has at most so many tokens."""
        fitting = [budget for budget in BUDGETS if budget <= tokens]
        return f"max_soft_tokens={max(fitting, default=BUDGETS[0])} in its processor_config.json"

    def with_bounds(
        self, min_pixels: int | None, max_pixels: int | None, where: str
    ) -> "Gemma4Images":
        """Return these settings; a record may not bound its pixels."""
        bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        refuse_given(DataError, bounds, _SAME_TOKENS, place=where, remedy="leave it out")
        return self

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of a picture, or of one frame of a video."""
        return grid[1] * grid[2] // self.pooling_kernel_size**2

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which a picture is resized: the largest multiples of a
        token's side that keep the ratio and fit the budget."""
        side, tokens = self.token_side, self.max_soft_tokens
        pixels = tokens * self.pooling_kernel_size**2 * self.patch_size**2
        factor = math.sqrt(pixels / (height * width))
        new_h = math.floor(factor * height / side) * side
        new_w = math.floor(factor * width / side) * side
        if new_h == 0:
            return side, min(math.floor(width / height), tokens) * side
        if new_w == 0:
            return min(math.floor(height / width), tokens) * side, side
        return new_h, new_w

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of a picture of this size."""
        new_h, new_w = self.resized_size(height, width)
        return (1, new_h // self.patch_size, new_w // self.patch_size)

    def patches(self, image: PIL.Image.Image) -> np.ndarray:
        """Return the patches [P, C] of an RGB picture as bytes."""
        size = self.resized_size(image.height, image.width)
        return self.split(resize_frame(np.asarray(image), *size).transpose(1, 2, 0))

    def split(self, pixels_HW3: np.ndarray) -> np.ndarray:
        """Return the patches [P, C] of a resized picture. The patches of one token are adjacent,
        and so are the values of a colour in a patch."""
        side, merge = self.patch_size, self.pooling_kernel_size
        height, width, _ = pixels_HW3.shape
        shape = (height // side // merge, merge, side, width // side // merge, merge, side, 3)
        ordered = pixels_HW3.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(ordered).reshape(-1, 3 * side * side)

    def pictures(self, patches_PC: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the pictures [frames, 1, H, W, 3] that became these patches."""
        (t, h, w), side, merge = grid, self.patch_size, self.pooling_kernel_size
        split = patches_PC.reshape(t, h // merge, w // merge, merge, merge, 3, side, side)
        pixels = split.transpose(0, 1, 3, 6, 2, 4, 7, 5)
        return np.ascontiguousarray(pixels).reshape(t, 1, h * side, w * side, 3)

    def table(self) -> Tensor:
        """Return [3, 256], the float for each byte of each colour: Hugging Face rescales bytes, and
        its tower then spreads them from -1 to 1."""
        return spread(torch.arange(256, dtype=torch.float32) * (1 / 255))

    def pixel_values(self, patches_PC: Tensor, table: Tensor) -> Tensor:
        """Return the floats that the tower reads, in which the colours of a pixel are adjacent. All
        colours share a table."""
        values = table[0].index_select(0, patches_PC.flatten().int())
        return values.view(len(patches_PC), 3, -1).transpose(1, 2).flatten(1)


def unpad(values_NLC: Tensor, xy_NL2: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """Return the patches [P, C] that the tower reads, and the grids [N, 3], of what Hugging Face's
    processor returns: numbers from 0 to 1, row by row, padded to L patches at positions of -1."""
    patches, grids = [], []
    for values_LC, xy_L2 in zip(values_NLC, xy_NL2.cpu(), strict=True):
        width, height = (xy_L2.max(0).values + 1).tolist()
        places = torch.arange(height * width)
        real_P2 = xy_L2[xy_L2[:, 0] >= 0]
        is_whole = torch.equal(real_P2[:, 1] * width + real_P2[:, 0], places)
        if height % merge or width % merge or not is_whole:
            raise DataError("has patches that are not those of a whole picture", key="position_ids")
        blocks = places.view(height // merge, merge, width // merge, merge)
        patches.append(2 * (values_LC[blocks.transpose(1, 2).flatten()] - 0.5))
        grids.append((1, height, width))
    return torch.cat(patches), torch.tensor(grids)


def spread(rescaled: Tensor) -> Tensor:
    """Return the table [3, 256] of bytes that are rescaled to numbers from 0 to 1."""
    return (2 * (rescaled - 0.5)).expand(3, -1).contiguous()


def read_fixed(
    folder: str | Path, kind: str, name: str, fixed: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Read the settings of a processor, of which some must have these values if they are there, and
    the budget one that Hugging Face allows."""
    path, raw = read_processor(folder, kind, name)
    needed = {key: (value,) for key, value in fixed.items()} | {"max_soft_tokens": BUDGETS}
    for key, allowed in needed.items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise ConfigError(
                "is not supported", place=str(path), key=key, found=raw[key], allowed=allowed
            )
    return path, raw
