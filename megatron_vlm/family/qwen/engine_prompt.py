"""Prompts of Qwen's models for vLLM: one placeholder for each picture and video."""

import re

from megatron_vlm.family.engine_prompt import Decode, EnginePrompt


def _video_start(ids: list[int], first_frame: int, min_start: int, _: Decode) -> int:
    """Return the place of the time, which is after the bracket that opens the whole video."""
    inner = first_frame - 1
    places = (i for i in range(inner - 1, min_start - 1, -1) if ids[i] == ids[inner])
    return next(places, inner) + 1


ENGINE_PROMPT = EnginePrompt(
    video_start=_video_start,
    time=re.compile(r"<(\d+)\.(\d) seconds>"),
    time_example="<0.5 seconds>",
    unit=10,
    fps=10.0,  # frames are numbered in tenths of a second, like the times in prompts
    processor={"do_resize": False},
    names={
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    },
    tower="visual",
)
