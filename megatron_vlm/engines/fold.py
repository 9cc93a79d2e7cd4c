"""A prompt with one placeholder for each picture and video, which vLLM puts all others in place of.

Of a video, vLLM also writes the time of each frame before its placeholders, from what it is told
of them. The times in the prompt are those to tell it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import PlaceholderRun, Tokens

_TIME = re.compile(r"<(\d+)\.(\d) seconds>")


@dataclass(frozen=True)
class Folded:
    """The prompt, and for each video the time of each temporal patch, in tenths of a second."""

    ids: list[int]
    tenths: list[list[int]]


class Folding:
    """Folds the prompts of one model; its tokenizer is read at the first video."""

    def __init__(self, folder: str, tokens: Tokens):
        self.path, self.tokens = folder, tokens

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.path)

    def fold(
        self, ids: list[int], runs: Sequence[PlaceholderRun], video_grid_I3: Tensor | None
    ) -> Folded:
        """`runs` are all placeholders of the prompt, in order: a run for each temporal patch."""
        frames = iter([] if video_grid_I3 is None else video_grid_I3[:, 0].tolist())
        left, folded = iter(runs), Folded([], [])
        end = 0  # of what is folded already
        for run in left:
            start, last = run.start, run
            if ids[start] == self.tokens.video_id:
                group = [run, *(next(left) for _ in range(next(frames) - 1))]
                folded.tenths.append(list(self._times(ids, group, end)))
                start, last = self._first_time(ids, group[0], end), group[-1]
            folded.ids.extend([*ids[end:start], ids[run.start]])
            end = last.start + last.height * last.width
            end += ids[run.start] == self.tokens.video_id  # the bracket behind its last frame
        folded.ids.extend(ids[end:])
        return folded

    @staticmethod
    def _first_time(ids: list[int], run: PlaceholderRun, least: int) -> int:
        """Where the time of a video's first frame begins: behind the bracket around all of it."""
        inner = run.start - 1
        places = (i for i in range(inner - 1, least - 1, -1) if ids[i] == ids[inner])
        return next(places, inner) + 1

    def _times(self, ids: list[int], group: Sequence[PlaceholderRun], least: int) -> Iterator[int]:
        start = self._first_time(ids, group[0], least)
        for run in group:
            text = str(self._tokenizer.decode(ids[start : max(start, run.start - 1)]))
            if (time := _TIME.fullmatch(text)) is None:
                raise DataError(
                    f"a frame of a video comes after {text!r}, and vLLM writes the time of each "
                    "frame there, as <0.5 seconds>",
                    place="the prompt",
                    remedy="give the video in messages, or draw from our own sampler",
                )
            yield int(time[1]) * 10 + int(time[2])
            start = run.start + run.height * run.width + 1
