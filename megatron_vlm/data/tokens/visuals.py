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
        if (where := processed.get(key)) is None:
            remedy = "give all that the processor of this checkpoint returned, as tensors"
            raise DataError("is missing", place="the processor's output", key=key, remedy=remedy)
        if family.unpad:
            counts = [pixels.shape[1]] * len(pixels) if pixels.dim() == 4 else [1] * len(pixels)
            counts = torch.as_tensor(processed.get(f"num_frames_per_{kind}", counts)).tolist()
            pixels, where = pixels.flatten(0, -3), where.flatten(0, -3)
            pixels, frames_N3 = family.unpad(pixels, where, merge)
            firsts = torch.tensor([0, *counts]).cumsum(0)[:-1]
            where = frames_N3[firsts]
            where[:, 0] = torch.tensor(counts)
        visuals |= {f"{name}_PC": pixels, f"{kind}_grid_I3": where}
    return visuals


def pixel_fault(pixels: Tensor | None, grid_I3: Tensor | None, tokens: Tokens) -> str | None:
    """Return what cannot be right about patches and their grids, or None."""
    merge, expected = tokens.merge, 0
    if grid_I3 is not None:
        is_table = grid_I3.dim() == 2 and grid_I3.shape[1] == 3 and bool((grid_I3 > 0).all())
        if not is_table or bool((grid_I3[:, 1:] % merge).any()):
            return f"has a grid that is no [n, 3] of squares of {merge} x {merge} patches"
        expected = int(grid_I3.prod(-1).sum())
    if expected != (num_patches := 0 if pixels is None else len(pixels)):
        return f"has {num_patches} patches but its grid needs {expected}"
    if not num_patches or pixels is None:
        return None
    if pixels.dim() != 2 or not (pixels.dtype == torch.uint8 or pixels.is_floating_point()):
        return f"is {pixels.dtype} {list(pixels.shape)}, neither bytes nor floats [patches, values]"
    if pixels.dtype == torch.uint8:
        return None
    if pixels.shape[1] != (needed := tokens.patch_values or pixels.shape[1]):
        return f"has patches of {pixels.shape[1]} values, and the tower reads {needed}"
    if not (largest := float(pixels.abs().max())) <= tokens.largest_pixel:
        return f"has values up to {largest:.4g}, which no picture has"
    return None
