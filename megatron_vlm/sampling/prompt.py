"""A row as an engine takes it: what the trainer sees, put the way that vLLM asks for.

Shapes: P patches, C values of a patch, S tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megatron_vlm.data.encode.positions import GridQueue
from megatron_vlm.data.encode.row import Row
from megatron_vlm.data.media.images import ImageSettings
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.sampling.engine import EngineSettings
from megatron_vlm.step.completions import SamplingSettings


@dataclass(frozen=True)
class Request:
    """What an engine is asked: the fields of its `sample`, and the pixels of the pictures."""

    fields: dict[str, Any]
    pixels: list[bytes]


class Prompts:
    """Makes requests of rows for one model."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.tokens = read_sizes(settings.folder).tokens
        self.images = ImageSettings.from_checkpoint(settings.folder)

    def request(self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]) -> Request:
        """Refuses what the engine would not see as the trainer does, or would cut."""
        self._check(prompt, settings)
        if wrong := [seed for seed in seeds if not 0 <= seed < 2**63]:
            raise ConfigError(f"a seed is {wrong[0]}; give numbers from 0 to 2**63 - 1")
        ids = prompt.ids_S.tolist()
        queue = GridQueue(prompt.image_grid_I3, None, self.tokens)
        runs = queue.runs_of(prompt.ids_S, "the prompt")
        queue.check_used_up("the prompt")
        # vLLM is given the first placeholder of each picture, and multiplies it itself.
        ends = [0, *(run.start + run.height * run.width for run in runs), len(ids)]
        starts = [*(run.start + 1 for run in runs), len(ids)]
        kept = [ids[end:start] for end, start in zip(ends[:-1], starts, strict=True)]
        pictures = seen(prompt, self.images)
        fields = {
            "prompt": [token for part in kept for token in part],
            "expected": ids,
            "pictures": [picture.shape[:2] for picture in pictures],
            "settings": asdict(settings),
            "never": [self.tokens.image_id, self.tokens.video_id],
            "seeds": list(seeds),
        }
        return Request(fields, [picture.tobytes() for picture in pictures])

    def _check(self, prompt: Row, settings: SamplingSettings) -> None:
        if prompt.video_grid_I3 is not None:
            raise DataError(
                "the prompt has a video, and vLLM would choose and resize its frames anew; draw "
                "from our own sampler, or give its frames as pictures"
            )
        pixels = prompt.pixel_values_PC
        if pixels is not None and pixels.dtype != torch.uint8:
            raise DataError(
                f"the prompt's pixels are {pixels.dtype}, and an engine is sent pictures; give "
                "rows with bytes, as RowMaker makes them"
            )
        prompt.check_pixels("the prompt")
        images = 0 if prompt.image_grid_I3 is None else len(prompt.image_grid_I3)
        if images > self.settings.pictures:
            raise ConfigError(
                f"the prompt has {images} pictures, and the engine was started for at most "
                f"{self.settings.pictures}; raise `pictures` of its settings"
            )
        length, most = len(prompt.ids_S), self.settings.max_len
        if length + settings.max_tokens > most:
            raise ConfigError(
                f"the prompt has {length} tokens and max_tokens is {settings.max_tokens}, and the "
                f"engine takes up to {most} of both together; raise `max_len` of its settings, ask "
                "for fewer tokens, or shorten the prompt"
            )


def seen(row: Row, settings: ImageSettings) -> list[np.ndarray]:
    """The pictures of a row [height, width, 3] as the trainer sees them, resized: its patches put
    back."""
    if row.image_grid_I3 is None:
        return []
    assert row.pixel_values_PC is not None and row.pixel_values_PC.dtype == torch.uint8
    grids = row.image_grid_I3.tolist()
    parts = row.pixel_values_PC.split([high * wide for _, high, wide in grids])
    merge, side = settings.merge_size, settings.patch_size
    found = []
    for (_, high, wide), patches_PC in zip(grids, parts, strict=True):
        blocks = patches_PC.view(high // merge, wide // merge, merge, merge, 3, side, side)
        pixels = blocks.permute(0, 2, 5, 1, 3, 6, 4).reshape(high * side, wide * side, 3)
        found.append(pixels.numpy())
    return found
