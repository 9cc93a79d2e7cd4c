"""Prompts of Gemma 4 for vLLM: one placeholder for each picture and video, without the marks around
it.

vLLM writes the marks itself, and before each frame of a video its time, from the times in the
request. These times are read from the prompt.

Shapes: F frames, P patches, C values of a patch, 2 the axes x, y."""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.errors import DataError
from megatron_vlm.family.engine_prompt import EnginePrompt, Folded
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.spec import PlaceholderRun, Tokens
from megatron_vlm.family.video_plan import Grid

_TIME = re.compile(r" ?(\d\d+):(\d\d) ")
_LONGEST = 16  # tokens of the time before a video's first frame, at most

Decode = Callable[[list[int]], str]


def _fold(
    ids: list[int],
    runs: Sequence[PlaceholderRun],
    frames: Sequence[int],
    tokens: Tokens,
    decode: Decode,
) -> Folded:
    waiting, remaining, folded = iter(frames), iter(runs), Folded([], [])
    end = 0  # end of the part that is folded already
    for run in remaining:
        start, group = run.start - 1, [run]
        if ids[run.start] == tokens.video_id:
            group += islice(remaining, next(waiting) - 1)
            start, times = _times(ids, group, end, decode)
            folded.times.append(times)
        for each in group:
            _check_marks(ids, each, end, decode)
        folded.ids.extend([*ids[end:start], ids[run.start]])
        end = _end(group[-1])
    folded.ids.extend(ids[end:])
    return folded


def _end(run: PlaceholderRun) -> int:
    """Return the place after the mark that ends a picture."""
    return run.start + run.height * run.width + 1


def _check_marks(ids: list[int], run: PlaceholderRun, min_start: int, decode: Decode) -> None:
    first, last = run.start - 1, _end(run) - 1
    found = decode(ids[first : first + 1] if first >= min_start else []), decode(ids[last:][:1])
    if found != (CHAT.marks.start, CHAT.marks.end):
        raise DataError(
            f"has a picture between {found[0]!r} and {found[1]!r}, and vLLM writes "
            f"{CHAT.marks.start} and {CHAT.marks.end} there",
            place="the prompt",
            remedy="give the picture in messages, or draw from our own sampler",
        )


def _times(
    ids: list[int], group: Sequence[PlaceholderRun], min_start: int, decode: Decode
) -> tuple[int, list[int]]:
    """Return the place where the text of a video begins, and the times of its frames in seconds."""
    last = group[0].start - 1  # the first frame's mark
    shortest = range(last - 1, max(min_start, last - _LONGEST) - 1, -1)
    begins = (i for i in shortest if _TIME.fullmatch(decode(ids[i:last])))
    start = next(begins, last)
    starts = [start, *map(_end, group[:-1])]
    return start, [
        _seconds(decode(ids[begin : max(begin, run.start - 1)]))
        for begin, run in zip(starts, group, strict=True)
    ]


def _seconds(text: str) -> int:
    if (time := _TIME.fullmatch(text)) is None:
        raise DataError(
            f"a frame of a video comes after {text!r}, and vLLM writes the time of each frame "
            "there, as '00:01 '",
            place="the prompt",
            remedy="give the video in messages, or draw from our own sampler",
        )
    return int(time[1]) * 60 + int(time[2])


def _video_facts(seconds: list[int], num_frames: int) -> dict[str, Any]:
    """Return vLLM's facts about a video, which has a frame in each second of these."""
    assert len(seconds) == num_frames
    return {
        "fps": 1.0,
        "frames_indices": seconds,
        "total_num_frames": seconds[-1] + 1,
        "duration": float(seconds[-1] + 1),
        "do_sample_frames": False,
    }


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
    fold=_fold,
    video_facts=_video_facts,
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
