"""Hidden pictures: pictures and videos with replaced patches, to show how far answers depend on
what the model sees. Ids, grids and positions stay as they are.

Shapes: P patches, C values of a patch, 3 its channels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.row import GRID_OF, Row

BLACK_SHARE = 0.5  # probability of a black patch, as in VPPO (arXiv 2510.09285)

Pictured = TypeVar("Pictured", Row, MicroBatch)


def hide_pictures(pictured: Pictured, hide: Callable[[Tensor], Tensor]) -> Pictured:
    """Return a row or a micro-batch with each table of patches replaced by `hide` of it."""
    shown = {name: getattr(pictured, name) for name in GRID_OF}
    hidden: dict[str, Any] = {name: hide(each) for name, each in shown.items() if each is not None}
    return replace(pictured, **hidden)


def grey(pixels_PC: Tensor) -> Tensor:
    """Return patches of medium grey, which is 0 in floats."""
    return torch.full_like(pixels_PC, 128 if pixels_PC.dtype == torch.uint8 else 0)


def pixelated(pixels_PC: Tensor) -> Tensor:
    """Return patches that have the mean colour of the real ones."""
    values_P3F = pixels_PC.view(len(pixels_PC), 3, -1)
    mean_P31 = values_P3F.float().mean(2, keepdim=True)
    if pixels_PC.dtype == torch.uint8:
        mean_P31 = mean_P31.round()
    return mean_P31.to(pixels_PC.dtype).expand_as(values_P3F).reshape(pixels_PC.shape)


def black_patches(pixels_PC: Tensor, seed: int) -> Tensor:
    """Return the patches, of which random ones are black."""
    assert pixels_PC.dtype == torch.uint8, "the black of floats depends on their processor"
    generator = torch.Generator().manual_seed(seed)
    is_black_P = torch.rand(len(pixels_PC), generator=generator) < BLACK_SHARE
    return pixels_PC.masked_fill(is_black_P[:, None].to(pixels_PC.device), 0)
