"""The prompts of a model family for vLLM, whose processors replace a placeholder of a picture or a
video by all of its tokens. Before each frame of a video, vLLM writes its time, from the times in
the request. These times are read from the prompt.

Shapes: P patches, C values of a patch."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from megatron_vlm.errors import DataError
from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.spec import PlaceholderRun, Tokens
from megatron_vlm.family.video_plan import Grid

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Folded:
    """A prompt as vLLM takes it, and for each video the time of each temporal patch, in
    seconds times `fps`."""

    ids: list[int]
    times: list[list[int]]


def _as_processed(patches_PC: Tensor, grid: list[int], merge: int) -> tuple[Grid, Tensor]:
    t, h, w = grid
    return (t, h, w), patches_PC


@dataclass(frozen=True)
class EnginePrompt:
    """Prompts of a family for vLLM's processors, and what these return."""

    # Returns the place where the text before a video's first frame begins, from the place of the
    # frame's placeholders and the first place where it may be.
    video_start: Callable[[list[int], int, int, Decode], int]
    time: re.Pattern[str]  # text before a frame: two numbers, of which the first counts `unit`
    time_example: str
    unit: int
    fps: float  # times in a second
    processor: Mapping[str, Any]  # options with which pictures stay as the trainer resized them
    # For an image and a video, the names of the patches and of the grid, as the processor has them.
    names: Mapping[str, tuple[str, str]]
    tower: str  # name of the tower in vLLM's model
    # The grid and the patches [P, C] of our rows from those that vLLM's processor returns, and the
    # side of the square of patches that becomes a token.
    unfold: Callable[[Tensor, list[int], int], tuple[Grid, Tensor]] = _as_processed
    # More EngineArgs, from the checkpoint's own settings for pictures.
    args: Callable[[ImageReader], dict[str, Any]] = lambda images: {}
    fault_on_cpu: str | None = None  # why vLLM on a CPU may get no pictures; None: it may
    fault_of_adapters: str | None = None  # why vLLM's own server may get none; our engines may
    # The marks around an image, if vLLM writes these by itself.
    marks: tuple[str, str] | None = None

    def fold(
        self,
        ids: list[int],
        runs: Sequence[PlaceholderRun],
        frames: Sequence[int],
        tokens: Tokens,
        decode: Decode,
    ) -> Folded:
        """Fold ids with these runs of placeholders, in order, with a run for each frame that a
        token sees. `frames` are the numbers of such frames of each video."""
        waiting, remaining, folded = iter(frames), iter(runs), Folded([], [])
        end = 0  # end of the part that is folded already
        for run in remaining:
            group, outside = [run], int(self.marks is not None)  # tokens around an image
            start = run.start - outside
            if ids[run.start] == tokens.video_id:
                group, outside = [run, *islice(remaining, next(waiting) - 1)], 1
                start = self.video_start(ids, run.start, end, decode)
                folded.times.append([*self._times(ids, group, start, decode)])
            for each in group:
                self._check_marks(ids, each, end, decode)
            folded.ids.extend([*ids[end:start], ids[run.start]])
            end = _end(group[-1]) + outside
        folded.ids.extend(ids[end:])
        return folded

    def _times(
        self, ids: list[int], group: Sequence[PlaceholderRun], start: int, decode: Decode
    ) -> Iterator[int]:
        for run in group:
            text = decode(ids[start : max(start, run.start - 1)])
            if (time := self.time.fullmatch(text)) is None:
                raise DataError(
                    f"a frame of a video comes after {text!r}, and vLLM writes the time of each "
                    f"frame there, as {self.time_example}",
                    place="the prompt",
                    remedy="give the video in messages, or draw from our own sampler",
                )
            yield int(time[1]) * self.unit + int(time[2])
            start = _end(run) + 1

    def _check_marks(
        self, ids: list[int], run: PlaceholderRun, min_start: int, decode: Decode
    ) -> None:
        if self.marks is None:
            return
        first, last = run.start - 1, _end(run)
        found = decode(ids[first : first + 1] if first >= min_start else []), decode(ids[last:][:1])
        if found != self.marks:
            raise DataError(
                f"has a picture between {found[0]!r} and {found[1]!r}, and vLLM writes "
                f"{self.marks[0]} and {self.marks[1]} there",
                place="the prompt",
                remedy="give the picture in messages, or draw from our own sampler",
            )

    def video_facts(self, times: list[int], num_frames: int) -> dict[str, Any]:
        """Return vLLM's facts about a video, with the time of its temporal patch for each frame."""
        places = [place for place in times for _ in range(num_frames // len(times))]
        return {
            "fps": self.fps,
            "frames_indices": places,
            "total_num_frames": places[-1] + 1,
            "duration": (places[-1] + 1) / self.fps,
            "do_sample_frames": False,
        }


def _end(run: PlaceholderRun) -> int:
    return run.start + run.height * run.width
