"""Rows as transformers' Gemma 4 takes them.

Shapes: S tokens of a row, P patches, C values of a patch, I images, 2 the axes x, y."""

from inspect import signature

import torch
from torch import Tensor
from transformers import Gemma4ForConditionalGeneration, PretrainedConfig

from megatron_vlm.data.tokens.row import Row


def _positions(height: int, width: int, merge: int) -> Tensor:
    """Return (x, y) of each patch, those of one token adjacent."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    blocks = torch.stack([x, y], -1).reshape(height // merge, merge, width // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def _padded(patches_PC: Tensor, grid_I3: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """Return what transformers reads: images and frames row by row, from 0 to 1, padded to more
    patches than any has, with positions of -1 there."""
    frames = [(h, w) for t, h, w in grid_I3.tolist() for _ in range(t)]
    longest = max(h * w for h, w in frames) + merge**2
    values = patches_PC.new_zeros(len(frames), longest, patches_PC.shape[1])
    places = torch.full((len(frames), longest, 2), -1)
    start = 0
    for number, (h, w) in enumerate(frames):
        positions = _positions(h, w, merge)
        order = (positions[:, 1] * w + positions[:, 0]).argsort()
        values[number, : h * w] = patches_PC[start : start + h * w][order] / 2 + 0.5
        places[number, : h * w] = positions[order]
        start += h * w
    return values, places


def inputs_of(config: PretrainedConfig, row: Row) -> dict[str, Tensor]:
    """Return one row as transformers takes it."""
    types_S = torch.zeros_like(row.ids_S)
    types_S[row.ids_S == config.image_token_id] = 1
    types_S[row.ids_S == config.video_token_id] = 2
    merge = config.vision_config.pooling_kernel_size
    given = dict(input_ids=row.ids_S[None], mm_token_type_ids=types_S[None])
    if row.pixel_values_PC is not None:
        padded = _padded(row.pixel_values_PC, row.image_grid_I3, merge)
        given["pixel_values"], given["image_position_ids"] = padded
    if row.pixel_values_videos_PC is not None:
        frames = int(row.video_grid_I3[0, 0])
        values, places = _padded(row.pixel_values_videos_PC, row.video_grid_I3, merge)
        if "num_frames_per_video" in signature(Gemma4ForConditionalGeneration.forward).parameters:
            given["num_frames_per_video"] = row.video_grid_I3[:, 0]
        else:  # transformers before 5.24
            values, places = (each.unflatten(0, (-1, frames)) for each in (values, places))
        given["pixel_values_videos"], given["video_position_ids"] = values, places
    return given
