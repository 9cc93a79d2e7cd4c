"""Pictures and videos of a row, from what Hugging Face's processor of the model returns."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.errors import DataError
from megatron_vlm.family import families, read_config
from megatron_vlm.family.spec import Tokens


def make_visuals(checkpoint: str, processed: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the pixels and grids of a `Row`, by the names of its fields, from the tensors that the
    checkpoint's own processor returned for the pictures and videos of the row."""
    config = read_config(checkpoint)
    family, visuals = families()[config.model_type], dict[str, Tensor]()
    merge = family.sizes_of(config).tokens.merge
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if (pixels := processed.get(name)) is None:
            continue
        key = f"{kind}_position_ids" if family.unpad else f"{kind}_grid_thw"
        grid, place = processed.get(key), "the processor's output"
        if not (isinstance(pixels, Tensor) and isinstance(grid, Tensor)):
            remedy = "give all that this checkpoint's processor returns with return_tensors='pt'"
            raise DataError(f"and {name} must be tensors", place=place, key=key, remedy=remedy)
        if family.unpad:
            # Newer versions of transformers put the frames of all videos in a row, and count them.
            each = [pixels.shape[1] if pixels.dim() == 4 else 1] * len(pixels)
            frames = torch.as_tensor(processed.get(f"num_frames_per_{kind}", each))
            pixels, grid = family.unpad(pixels.flatten(0, -3), grid.flatten(0, -3), merge)
            grid = torch.stack([frames, *grid[frames.cumsum(0) - 1, 1:].unbind(1)], 1)
        visuals |= {f"{name}_PC": pixels, f"{kind}_grid_I3": grid}
    return visuals


def pixel_fault(pixels: Tensor | None, grid_I3: Tensor | None, tokens: Tokens) -> str | None:
    """Return what cannot be right about patches and their grids, or None."""
    expected, count = 0, 0 if pixels is None else len(pixels)
    if grid_I3 is not None:
        side = torch.tensor([1, tokens.merge, tokens.merge])
        if grid_I3.shape[1:] != side.shape or bool(((grid_I3 < 1) | (grid_I3 % side > 0)).any()):
            return f"has a grid that is no [n, 3] of squares of {side[1]} x {side[1]} patches"
        expected = int(grid_I3.prod(-1).sum())
    if expected != count:
        return f"has {count} patches but its grid needs {expected}"
    if pixels is None or not count or (pixels.dtype == torch.uint8 and pixels.dim() == 2):
        return None
    if pixels.dim() != 2 or not pixels.is_floating_point():
        return f"is {pixels.dtype} {list(pixels.shape)}, neither bytes nor floats [patches, values]"
    if not pixels.shape[1]:  # a rank behind stage 0 gets the number of patches alone
        return None
    if pixels.shape[1] != (needed := tokens.patch_values or pixels.shape[1]):
        return f"has patches of {pixels.shape[1]} values, and the tower reads {needed}"
    largest = float(pixels.abs().max())
    return None if largest <= tokens.largest_pixel else f"has {largest:.4g}, which no picture has"
