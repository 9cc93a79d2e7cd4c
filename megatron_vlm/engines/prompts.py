"""A row as an engine takes it: what the trainer sees, put the way that vLLM asks for.

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
from megatron_vlm.data.tokens.mrope_positions import GridQueue
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample_views import unpatch
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.vllm_process import EngineSettings
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import PlaceholderRun, Tokens
from megatron_vlm.training.completions import SamplingSettings


@dataclass(frozen=True)
class Request:
    """What an engine is asked: the fields of its `sample`, and the pixels of the pictures, then of
    the videos."""

    fields: dict[str, Any]
    pixels: list[bytes]


class Prompts:
    """Makes requests of rows for one model."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.tokens = read_sizes(settings.folder).tokens
        self.images = ImageSettings.from_checkpoint(settings.folder)
        self.folding = Folding(settings.folder, self.tokens)

    def request(self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]) -> Request:
        """Refuses what the engine would not see as the trainer does, or would cut."""
        self._check(prompt, settings)
        if wrong := [seed for seed in seeds if not 0 <= seed < 2**63]:
            raise ConfigError(
                place="sample", key="seed", found=wrong[0], allowed="a number from 0 to 2**63 - 1"
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
            "never": [self.tokens.image_id, self.tokens.video_id],
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
        length, most = len(prompt.ids_S), self.settings.max_len
        if length + settings.max_tokens > most:
            raise ConfigError(
                f"is less than its {length} tokens and max_tokens={settings.max_tokens} together",
                place="the prompt",
                key="max_len",
                found=most,
                remedy="raise `max_len` of the engine's settings (rl.engine_max_len), ask for "
                "fewer tokens, or shorten the prompt",
            )

    def _check_count(self, grid_I3: Tensor | None, name: str, most: int) -> None:
        count = 0 if grid_I3 is None else len(grid_I3)
        if count > most:
            raise ConfigError(
                f"is more than the {most} that the engine was started for",
                place="the prompt",
                key=name,
                found=count,
                remedy=f"raise `{name}` of its settings (rl.engine_{name})",
            )


def seen_by_trainer(row: Row, settings: ImageSettings) -> list[np.ndarray]:
    """The pictures of a row [height, width, 3] as the trainer sees them, resized: its patches put
    back."""
    return [frames[0, 0] for frames in _put_back(row.pixel_values_PC, row.image_grid_I3, settings)]


def seen_videos(row: Row, settings: ImageSettings) -> list[np.ndarray]:
    """The videos of a row [frames, height, width, 3], likewise: the frames that were taken."""
    found = _put_back(row.pixel_values_videos_PC, row.video_grid_I3, settings)
    return [frames.reshape(-1, *frames.shape[2:]) for frames in found]


def _put_back(
    pixels_PC: Tensor | None, grid_I3: Tensor | None, settings: ImageSettings
) -> list[np.ndarray]:
    """[temporal patches, frames of one, height, width, 3] of each picture or video. Sides of
    patches are those of the model's weights, so pictures and videos have the same."""
    if grid_I3 is None:
        return []
    assert pixels_PC is not None and pixels_PC.dtype == torch.uint8
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_I3]
    parts = pixels_PC.split([t * h * w for t, h, w in grids])
    side, merge = settings.patch_size, settings.merge_size
    return [unpatch(p.numpy(), grid, side, merge) for p, grid in zip(parts, grids, strict=True)]


# A prompt with one placeholder for each picture and video, which vLLM puts all others in place of.
#
# Of a video, vLLM also writes the time of each frame before its placeholders, from what it is told
# of them. The times in the prompt are those to tell it.

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
