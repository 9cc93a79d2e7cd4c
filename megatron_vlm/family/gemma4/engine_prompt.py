"""Prompts of Gemma 4 for vLLM: one placeholder for each picture and video, without the marks around
it, which vLLM writes itself.

Shapes: F frames, P patches, C values of a patch, 2 the axes x, y."""

import re
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.family.engine_prompt import Decode, EnginePrompt
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.video_plan import Grid

_TIME = re.compile(r" ?(\d\d+):(\d\d) ")
_LONGEST = 16  # tokens of the time before a video's first frame, at most


def _video_start(ids: list[int], first_frame: int, min_start: int, decode: Decode) -> int:
    last = first_frame - 1  # the first frame's mark
    shortest = range(last - 1, max(min_start, last - _LONGEST) - 1, -1)
    return next((i for i in shortest if _TIME.fullmatch(decode(ids[i:last]))), last)


def _unfold(patches_FPC: Tensor, places: list[int], merge: int) -> tuple[Grid, Tensor]:
    """Return the grid and the patches as the tower's first product reads them, those of a token
    adjacent. The processor pads them to the same number, at places of -1."""
    patches_FPC = patches_FPC.view(-1, *patches_FPC.shape[-2:])
    places_FP2 = torch.tensor(places).view(*patches_FPC.shape[:2], 2)
    width, height = (places_FP2[0].amax(0) + 1).tolist()
    by_token = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    order, frames = by_token.transpose(1, 2).flatten(), []
    for patches_PC, (x_P, y_P) in zip(patches_FPC, places_FP2.transpose(1, 2), strict=True):
        is_real_P = x_P >= 0
        rows = (y_P * width + x_P)[is_real_P].argsort()
        frames.append(patches_PC[is_real_P][rows][order])
    return (len(frames), height, width), 2 * (torch.cat(frames) - 0.5)


def _args(images: ImageReader) -> dict[str, Any]:
    # vLLM plans its memory with this field, and not with the budget of the processor.
    return {"hf_overrides": {"vision_config": {"default_output_length": images.most_tokens}}}


ENGINE_PROMPT = EnginePrompt(
    video_start=_video_start,
    time=_TIME,
    time_example="'00:01 '",
    unit=60,
    fps=1.0,
    marks=(CHAT.marks.start, CHAT.marks.end),
    processor={"do_resize": False},
    names={
        "image": ("pixel_values", "pixel_position_ids"),
        "video": ("pixel_values_videos", "pixel_position_ids_videos"),
    },
    tower="vision_tower",
    unfold=_unfold,
    args=_args,
    fault_on_cpu="vLLM's attention on a CPU hides the later tokens of a picture from its earlier "
    "ones, which Gemma 4 shows them: without an error, it would draw from another model",
    fault_of_adapters="in layers whose values are their keys, vLLM adapts the keys alone",
)
