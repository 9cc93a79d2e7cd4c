"""Rows as requests to vLLM, with the contents that the trainer sees.

Shapes: P patches, C values of a patch, S tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.data.tokens.visuals import GridQueue
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.images import ImageReader


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
        family = read_family(settings.folder)
        self.images, self.engine_prompt = family.images(settings.folder, {}), family.engine_prompt
        self.is_on_cpu = False  # set when the engine has told where it runs

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
        frames = [] if prompt.video_grid_I3 is None else prompt.video_grid_I3[:, 0].tolist()
        folded = self.engine_prompt.fold(ids, runs, frames, self.tokens, self._decode)
        pictures, videos = seen_by_trainer(prompt, self.images), seen_videos(prompt, self.images)
        pairs = zip(videos, folded.times, strict=True)
        fields = {
            "prompt": folded.ids,
            "expected": ids,
            "pictures": [picture.shape[:2] for picture in pictures],
            "videos": [
                {
                    "shape": video.shape[:3],
                    "facts": self.engine_prompt.video_facts(times, len(video)),
                }
                for video, times in pairs
            ],
            "processor": dict(self.engine_prompt.processor),
            "settings": asdict(settings),
            "never": self.tokens.placeholders,
            "seeds": list(seeds),
        }
        return Request(fields, [pixels.tobytes() for pixels in (*pictures, *videos)])

    @property
    def names(self) -> dict[str, Any]:
        """Names in the engine of what a prompt is looked at by."""
        return {"tower": self.engine_prompt.tower, **self.engine_prompt.names}

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.settings.folder)

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
        prompt.check_pixels("the prompt", self.tokens)
        if self.is_on_cpu and prompt.has_media and self.engine_prompt.fault_on_cpu:
            raise refuse_media(self.engine_prompt.fault_on_cpu, "the prompt")
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


def refuse_media(fault: str, place: str) -> ConfigError:
    """Return the error about pictures or videos for an engine on a CPU that has this fault."""
    return ConfigError(
        f"draws for pictures and videos on GPUs alone with this model, since {fault}",
        place=place,
        key="engine.name",
        found="vllm on a CPU",
        remedy="set engine.name=own, with which the trainer itself draws",
    )


def seen_by_trainer(row: Row, images: ImageReader) -> list[np.ndarray]:
    """Return the pictures of a row [height, width, 3] as the trainer sees them: resized, and put
    back together from patches."""
    return [frames[0, 0] for frames in _put_back(row.pixel_values_PC, row.image_grid_I3, images)]


def seen_videos(row: Row, images: ImageReader) -> list[np.ndarray]:
    """Return the videos of a row [frames, height, width, 3] in the same way, with the frames that
    were sampled."""
    videos = _put_back(row.pixel_values_videos_PC, row.video_grid_I3, images)
    return [frames.reshape(-1, *frames.shape[2:]) for frames in videos]


def _put_back(
    pixels_PC: Tensor | None, grid_I3: Tensor | None, images: ImageReader
) -> list[np.ndarray]:
    """Return [temporal patches, frames of one, height, width, 3] of each picture or video. The
    model's weights fix the size of a patch, so pictures and videos have the same."""
    if grid_I3 is None:
        return []
    assert pixels_PC is not None and pixels_PC.dtype == torch.uint8
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_I3]
    parts = pixels_PC.split([t * h * w for t, h, w in grids])
    return [images.pictures(p.numpy(), grid) for p, grid in zip(parts, grids, strict=True)]
