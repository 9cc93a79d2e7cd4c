"""Parts of the pictures and videos of a row, as the turns of a conversation show them. Rows share
the tensors of the parts that they have in common.

Shapes: P patches, C values of a patch, I images or videos, 3 the axes time, height, width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import JoinedPixels, Row

GRID_OF = {"pixel_values_PC": "image_grid_I3", "pixel_values_videos_PC": "video_grid_I3"}
Part = tuple[Tensor, Tensor]  # pixels [P, C] and grids [I, 3]


def parts_of(row: Row, name: str) -> Sequence[Part]:
    """Return the pixels of this field and their grids, in the parts that other rows may have."""
    pixels_PC, grid_I3 = getattr(row, name), getattr(row, GRID_OF[name])
    if pixels_PC is None or grid_I3 is None or not len(pixels_PC):
        return []
    for joined in row.joined:
        if joined.pixels_PC is pixels_PC:  # pixels that took their place have no such parts
            return joined.parts
    return [(pixels_PC, grid_I3)]


def join_parts(parts: Mapping[str, Sequence[Part]]) -> dict[str, Any]:
    """Return the visual fields of a Row with these parts of each field with pixels, in order."""
    visuals: dict[str, Any] = {}
    joined = []
    for name, own_parts in parts.items():
        if own_parts:
            pixels, grids = zip(*own_parts, strict=True)
            is_one = len(own_parts) == 1
            visuals[name] = pixels[0] if is_one else torch.cat(pixels)
            visuals[GRID_OF[name]] = grids[0] if is_one else torch.cat(grids)
            joined += [] if is_one else [JoinedPixels(visuals[name], tuple(own_parts))]
    return {**visuals, "joined": tuple(joined)}
