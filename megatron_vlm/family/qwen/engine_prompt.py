"""Prompts of Qwen's models for vLLM: one placeholder for each picture and video.

For a video, vLLM also writes the time of each frame before its placeholders, from the times in the
request. These times are read from the prompt."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_vlm.errors import DataError
from megatron_vlm.family.engine_prompt import EnginePrompt, Folded
from megatron_vlm.family.spec import PlaceholderRun, Tokens

_TIME = re.compile(r"<(\d+)\.(\d) seconds>")
_FPS = 10.0  # frames are numbered in tenths of a second, like the times in prompts


def _fold(
    ids: list[int],
    runs: Sequence[PlaceholderRun],
    frames: Sequence[int],
    tokens: Tokens,
    decode: Callable[[list[int]], str],
) -> Folded:
    waiting, remaining, folded = iter(frames), iter(runs), Folded([], [])
    end = 0  # end of the part that is folded already
    for run in remaining:
        start, last = run.start, run
        if ids[start] == tokens.video_id:
            group = [run, *(next(remaining) for _ in range(next(waiting) - 1))]
            folded.times.append(list(_times(ids, group, end, decode)))
            start, last = _first_time(ids, group[0], end), group[-1]
        folded.ids.extend([*ids[end:start], ids[run.start]])
        end = last.start + last.height * last.width
        end += ids[run.start] == tokens.video_id  # the bracket after its last frame
    folded.ids.extend(ids[end:])
    return folded


def _first_time(ids: list[int], run: PlaceholderRun, min_frames: int) -> int:
    """Return the place where the time of a video's first frame begins, which is after the bracket
    that opens the whole video."""
    inner = run.start - 1
    places = (i for i in range(inner - 1, min_frames - 1, -1) if ids[i] == ids[inner])
    return next(places, inner) + 1


def _times(
    ids: list[int],
    group: Sequence[PlaceholderRun],
    min_frames: int,
    decode: Callable[[list[int]], str],
) -> Iterator[int]:
    start = _first_time(ids, group[0], min_frames)
    for run in group:
        text = decode(ids[start : max(start, run.start - 1)])
        if (time := _TIME.fullmatch(text)) is None:
            raise DataError(
                f"a frame of a video comes after {text!r}, and vLLM writes the time of each "
                "frame there, as <0.5 seconds>",
                place="the prompt",
                remedy="give the video in messages, or draw from our own sampler",
            )
        yield int(time[1]) * 10 + int(time[2])
        start = run.start + run.height * run.width + 1


def _video_facts(tenths: list[int], num_frames: int) -> dict[str, Any]:
    """Return vLLM's facts about a video, with the time of its temporal patch for each frame."""
    places = [place for place in tenths for _ in range(num_frames // len(tenths))]
    return {
        "fps": _FPS,
        "frames_indices": places,
        "total_num_frames": places[-1] + 1,
        "duration": (places[-1] + 1) / _FPS,
        "do_sample_frames": False,
    }


ENGINE_PROMPT = EnginePrompt(
    fold=_fold,
    video_facts=_video_facts,
    processor={"do_resize": False},
    names={
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    },
    tower="visual",
)
