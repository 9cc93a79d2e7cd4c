"""Rows as requests to vLLM, with the contents that the trainer sees.

Shapes: P patches, C values of a patch, S tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.media.images import ImageSettings
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.placeholder_grids import GridQueue
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample_views import unpatch
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import PlaceholderRun, Tokens


@dataclass(frozen=True)
class Request:
    """A request to an engine: the fields of its `sample`, and the pixels of the pictures, then of
    the videos."""

    fields: dict[str, Any]
    pixels: list[bytes]


class Prompts:
    """A converter of rows to requests, for one model."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.tokens = read_sizes(settings.folder).tokens
        self.images = ImageSettings.from_checkpoint(settings.folder)
        self.folding = Folding(settings.folder, self.tokens)

    def request(self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]) -> Request:
        """Make a request. Refuse a prompt that the engine would truncate, or would not see as the
        trainer does."""
        self._check(prompt, settings)
        if bad_seeds := [seed for seed in seeds if not 0 <= seed < 2**63]:
            raise ConfigError(
                place="sample",
                key="seed",
                found=bad_seeds[0],
                allowed="a number from 0 to 2**63 - 1",
            )
        ids = prompt.ids_S.tolist()
        queue = GridQueue(prompt.image_grid_I3, prompt.video_grid_I3, self.tokens)
        runs = queue.runs_of(prompt.ids_S, "the prompt")
        queue.check_used_up("the prompt")
        folded = self.folding.fold(ids, runs, prompt.video_grid_I3)
        pictures, videos = seen_by_trainer(prompt, self.images), seen_videos(prompt, self.images)
        pairs = zip(videos, folded.tenths, strict=True)
        fields = {
            "prompt": folded.ids,
            "expected": ids,
            "pictures": [picture.shape[:2] for picture in pictures],
            "videos": [{"shape": video.shape[:3], "tenths": tenths} for video, tenths in pairs],
            "settings": asdict(settings),
            "never": self.tokens.placeholders,
            "seeds": list(seeds),
        }
        return Request(fields, [pixels.tobytes() for pixels in (*pictures, *videos)])

    def _check(self, prompt: Row, settings: SamplingSettings) -> None:
        for pixels in (prompt.pixel_values_PC, prompt.pixel_values_videos_PC):
            if pixels is not None and pixels.dtype != torch.uint8:
                raise DataError(
                    "cannot be sent to an engine as pictures",
                    place="the prompt",
                    key="pixels",
                    found=str(pixels.dtype),
                    remedy="give rows with bytes, as RowMaker makes them",
                )
        prompt.check_pixels("the prompt")
        self._check_count(prompt.image_grid_I3, "pictures", self.settings.pictures)
        self._check_count(prompt.video_grid_I3, "videos", self.settings.videos)
        length, max_len = len(prompt.ids_S), self.settings.max_len
        if length + settings.max_tokens > max_len:
            raise ConfigError(
                f"is less than its {length} tokens and max_tokens={settings.max_tokens} together",
                place="the prompt",
                key="max_len",
                found=max_len,
                remedy="raise `max_len` of the engine's settings (engine.max_len), ask for "
                "fewer tokens, or shorten the prompt",
            )

    def _check_count(self, grid_I3: Tensor | None, name: str, max_count: int) -> None:
        count = 0 if grid_I3 is None else len(grid_I3)
        if count > max_count:
            raise ConfigError(
                f"is more than the {max_count} that the engine was started for",
                place="the prompt",
                key=name,
                found=count,
                remedy=f"raise `{name}` of its settings (engine.{name})",
            )


def seen_by_trainer(row: Row, settings: ImageSettings) -> list[np.ndarray]:
    """Return the pictures of a row [height, width, 3] as the trainer sees them: resized, and put
    back together from patches."""
    return [frames[0, 0] for frames in _put_back(row.pixel_values_PC, row.image_grid_I3, settings)]


def seen_videos(row: Row, settings: ImageSettings) -> list[np.ndarray]:
    """Return the videos of a row [frames, height, width, 3] in the same way, with the frames that
    were sampled."""
    videos = _put_back(row.pixel_values_videos_PC, row.video_grid_I3, settings)
    return [frames.reshape(-1, *frames.shape[2:]) for frames in videos]


def _put_back(
    pixels_PC: Tensor | None, grid_I3: Tensor | None, settings: ImageSettings
) -> list[np.ndarray]:
    """Return [temporal patches, frames of one, height, width, 3] of each picture or video. The
    model's weights fix the size of a patch, so pictures and videos have the same."""
    if grid_I3 is None:
        return []
    assert pixels_PC is not None and pixels_PC.dtype == torch.uint8
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_I3]
    parts = pixels_PC.split([t * h * w for t, h, w in grids])
    side, merge = settings.patch_size, settings.merge_size
    return [unpatch(p.numpy(), grid, side, merge) for p, grid in zip(parts, grids, strict=True)]


# A folded prompt has one placeholder for each picture and video, which vLLM replaces with all of
# the placeholders.
#
# For a video, vLLM also writes the time of each frame before its placeholders, from the times in
# the request. These times are read from the prompt.

_TIME = re.compile(r"<(\d+)\.(\d) seconds>")


@dataclass(frozen=True)
class Folded:
    """A folded prompt, and for each video the time of each temporal patch in tenths of a second."""

    ids: list[int]
    tenths: list[list[int]]


class Folding:
    """A converter of prompts to folded ones, for one model. The tokenizer is read at the first
    video."""

    def __init__(self, folder: str, tokens: Tokens):
        self.path, self.tokens = folder, tokens

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.path)

    def fold(
        self, ids: list[int], runs: Sequence[PlaceholderRun], video_grid_I3: Tensor | None
    ) -> Folded:
        """Fold a prompt. `runs` are all placeholders of the prompt in order, with a run for each
        temporal patch."""
        frames = iter([] if video_grid_I3 is None else video_grid_I3[:, 0].tolist())
        remaining, folded = iter(runs), Folded([], [])
        end = 0  # end of the part that is folded already
        for run in remaining:
            start, last = run.start, run
            if ids[start] == self.tokens.video_id:
                group = [run, *(next(remaining) for _ in range(next(frames) - 1))]
                folded.tenths.append(list(self._times(ids, group, end)))
                start, last = self._first_time(ids, group[0], end), group[-1]
            folded.ids.extend([*ids[end:start], ids[run.start]])
            end = last.start + last.height * last.width
            end += ids[run.start] == self.tokens.video_id  # the bracket after its last frame
        folded.ids.extend(ids[end:])
        return folded

    @staticmethod
    def _first_time(ids: list[int], run: PlaceholderRun, min_frames: int) -> int:
        """Return the place where the time of a video's first frame begins, which is after the
        bracket that opens the whole video."""
        inner = run.start - 1
        places = (i for i in range(inner - 1, min_frames - 1, -1) if ids[i] == ids[inner])
        return next(places, inner) + 1

    def _times(
        self, ids: list[int], group: Sequence[PlaceholderRun], min_frames: int
    ) -> Iterator[int]:
        start = self._first_time(ids, group[0], min_frames)
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
