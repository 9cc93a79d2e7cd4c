"""Pairs of placeholder runs and the grids of their images, and the check that they agree.

Shapes: S tokens of a row, B rows, I images, 3 the axes time, height, width.
"""

from collections import deque

import torch
from torch import Tensor

from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import PlaceholderRun, Tokens


class GridQueue:
    """The grids of the images and video frames whose tokens are still to come, in order."""

    def __init__(self, image_grid_I3: Tensor | None, video_grid_I3: Tensor | None, tokens: Tokens):
        grids = {tokens.image_id: image_grid_I3, tokens.video_id: video_grid_I3}
        self.waiting = {
            token: deque(
                # A video's frames are separate runs of tokens, with timestamps between them.
                (h // tokens.merge, w // tokens.merge)
                for t, h, w in ([] if grid_I3 is None else grid_I3.tolist())
                for _ in range(1 if token == tokens.image_id else t)
            )
            for token, grid_I3 in grids.items()
        }
        self.total = {token: len(grids) for token, grids in self.waiting.items()}
        self.names = {tokens.image_id: "image", tokens.video_id: "video frame"}

    def runs_of(self, ids_S: Tensor, where: str) -> list[PlaceholderRun]:
        """Return a row's runs of placeholders, each with the next grid, or raise a DataError."""
        values, counts = torch.unique_consecutive(ids_S, return_counts=True)
        ends = counts.cumsum(0)
        starts = ends - counts
        runs = []
        is_visual = torch.isin(values, torch.tensor(list(self.waiting)))
        for index in is_visual.nonzero().flatten().tolist():
            token, start, end = int(values[index]), int(starts[index]), int(ends[index])
            name = self.names[token]
            while start < end:
                number = self.total[token] - len(self.waiting[token])
                if not self.waiting[token]:
                    raise DataError(
                        f": {end - start} {name} tokens at position {start} are left over after "
                        f"{number} {name}s",
                        place=where,
                        remedy=f"drop the tokens or add the {name}",
                    )
                h, w = self.waiting[token].popleft()
                if h * w > end - start:
                    raise DataError(
                        f": {name} {number} has {h} x {w} = {h * w} features but {end - start} "
                        f"placeholder tokens at position {start}",
                        place=where,
                        remedy="expand the placeholder with the image processor that made its "
                        "pixels",
                    )
                runs.append(PlaceholderRun(start, h, w))
                start += h * w
        return runs

    def check_used_up(self, where: str) -> None:
        """Raise a DataError if images are left that have no tokens."""
        for token, grids in self.waiting.items():
            if grids:
                name, total = self.names[token], self.total[token]
                raise DataError(
                    f"has {total} {name}s but placeholder tokens for only {total - len(grids)}",
                    place=where,
                    remedy=f"add the missing placeholders or drop the {name}",
                )


def check_placeholders(
    ids_BS: Tensor, image_grid_I3: Tensor | None, video_grid_I3: Tensor | None, tokens: Tokens
) -> None:
    """Check the images of a micro-batch, in order, against the placeholders of its rows."""
    queue = GridQueue(image_grid_I3, video_grid_I3, tokens)
    for row, ids_S in enumerate(ids_BS.cpu()):
        queue.runs_of(ids_S, f"row {row} of the micro-batch")
    queue.check_used_up("micro-batch")
