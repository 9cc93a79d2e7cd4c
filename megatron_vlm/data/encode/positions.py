"""M-RoPE positions and the check that placeholders and images agree: both walk the same runs.

Shapes: S tokens of a row, B rows, I images, 3 the axes time, height, width.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class VisionTokens:
    """The token ids that stand for visual features, and how many patches make one token."""

    image_id: int
    video_id: int
    merge: int  # side of the square of patches that becomes one token

    @staticmethod
    def of(hf_config: PretrainedConfig) -> "VisionTokens":
        merge = hf_config.vision_config.spatial_merge_size
        return VisionTokens(hf_config.image_token_id, hf_config.video_token_id, merge)


@dataclass(frozen=True)
class Run:
    """The tokens of one image, or of one frame of a video: [start, start + height * width)."""

    start: int
    height: int
    width: int


class GridQueue:
    """The grids of images and of video frames that still wait for their tokens, in order."""

    def __init__(
        self, image_grid_I3: Tensor | None, video_grid_I3: Tensor | None, tokens: VisionTokens
    ):
        self.waiting = {
            token: deque(
                # A video's frames are separate runs of tokens: timestamps stand between them.
                (h // tokens.merge, w // tokens.merge)
                for t, h, w in ([] if grid_I3 is None else grid_I3.tolist())
                for _ in range(1 if token == tokens.image_id else t)
            )
            for token, grid_I3 in (
                (tokens.image_id, image_grid_I3),
                (tokens.video_id, video_grid_I3),
            )
        }
        self.total = {token: len(grids) for token, grids in self.waiting.items()}
        self.names = {tokens.image_id: "image", tokens.video_id: "video frame"}

    def runs_of(self, ids_S: Tensor, where: str) -> list[Run]:
        """The runs of placeholders in a row, each with the grid that comes next.

        Raises DataError that names the row, the image, and both counts.
        """
        values, counts = torch.unique_consecutive(ids_S, return_counts=True)
        ends = counts.cumsum(0)
        runs = []
        is_visual = torch.isin(values, torch.tensor(list(self.waiting)))
        for index in is_visual.nonzero().flatten().tolist():
            token, start, end = int(values[index]), int(ends[index - 1]), int(ends[index])
            start = start if index else 0
            name = self.names[token]
            while start < end:
                number = self.total[token] - len(self.waiting[token])
                if not self.waiting[token]:
                    raise DataError(
                        f"{where}: {end - start} {name} tokens at position {start} are left over "
                        f"after {number} {name}s; drop the tokens or add the {name}"
                    )
                h, w = self.waiting[token].popleft()
                if h * w > end - start:
                    raise DataError(
                        f"{where}: {name} {number} has {h} x {w} = {h * w} features but "
                        f"{end - start} placeholder tokens at position {start}; expand the "
                        "placeholder with the image processor that made its pixels"
                    )
                runs.append(Run(start, h, w))
                start += h * w
        return runs

    def check_used_up(self, where: str) -> None:
        """Every image must have met its tokens."""
        for token, grids in self.waiting.items():
            if grids:
                name, total = self.names[token], self.total[token]
                raise DataError(
                    f"{where}: {total} {name}s but placeholder tokens for only "
                    f"{total - len(grids)}; add the missing placeholders or drop the {name}"
                )


def check_placeholders(
    ids_BS: Tensor,
    image_grid_I3: Tensor | None,
    video_grid_I3: Tensor | None,
    tokens: VisionTokens,
) -> None:
    """A whole micro-batch: its images in order against the placeholders of its rows."""
    queue = GridQueue(image_grid_I3, video_grid_I3, tokens)
    for row, ids_S in enumerate(ids_BS.cpu()):
        queue.runs_of(ids_S, f"row {row} of the micro-batch")
    queue.check_used_up("micro-batch")


def mrope_positions(length: int, runs: list[Run]) -> Tensor:
    """Position ids [3, S]: text counts up on all three axes; an image keeps one time and spans
    height and width; what follows goes on after its longer side."""
    positions_3S = torch.empty(3, length, dtype=torch.long)
    cursor, position = 0, 0
    for run in [*runs, Run(length, 0, 0)]:
        text = run.start - cursor
        positions_3S[:, cursor : run.start] = torch.arange(position, position + text)
        position += text
        end = run.start + run.height * run.width
        rows = torch.arange(run.height).repeat_interleave(run.width)
        positions_3S[0, run.start : end] = position
        positions_3S[1, run.start : end] = position + rows
        positions_3S[2, run.start : end] = position + torch.arange(run.width).repeat(run.height)
        position += max(run.height, run.width)
        cursor = end
    return positions_3S
