"""Pictures and videos of a row: from what Hugging Face's processor of the model returns, and in
pairs of a grid and the run of placeholders that it agrees with.

Shapes: S tokens of a row, B rows, I images, 3 the axes time, height, width.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.errors import DataError
from megatron_vlm.family import families, read_config
from megatron_vlm.family.spec import PlaceholderRun, Tokens


def make_visuals(checkpoint: str, processed: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the pixels and grids of a `Row`, by the names of its fields, from the tensors that the
    checkpoint's own processor returned for the pictures and videos of the row."""
    config = read_config(checkpoint)
    family, visuals = families()[config.model_type], dict[str, Tensor]()
    merge = family.sizes_of(config).tokens.merge
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if (pixels := processed.get(name)) is None:
            continue
        key = f"{kind}_position_ids" if family.unpad else f"{kind}_grid_thw"
        grid, place = processed.get(key), "the processor's output"
        if not (isinstance(pixels, Tensor) and isinstance(grid, Tensor)):
            remedy = "give all that this checkpoint's processor returns with return_tensors='pt'"
            raise DataError(f"and {name} must be tensors", place=place, key=key, remedy=remedy)
        if family.unpad:
            # Newer versions of transformers put the frames of all videos in a row, and count them.
            each = [pixels.shape[1] if pixels.dim() == 4 else 1] * len(pixels)
            frames = torch.as_tensor(processed.get(f"num_frames_per_{kind}", each))
            pixels, grid = family.unpad(pixels.flatten(0, -3), grid.flatten(0, -3), merge)
            grid = torch.stack([frames, *grid[frames.cumsum(0) - 1, 1:].unbind(1)], 1)
        visuals |= {f"{name}_PC": pixels, f"{kind}_grid_I3": grid}
    return visuals


def join_grids(*grids: Tensor | None) -> Tensor:
    """Return all grids in one table on the host."""
    present = [grid_I3.cpu() for grid_I3 in grids if grid_I3 is not None]
    return torch.cat([torch.empty(0, 3, dtype=torch.long), *present])


def pixel_fault(pixels: Tensor | None, grid_I3: Tensor | None, tokens: Tokens) -> str | None:
    """Return what cannot be right about patches and their grids, or None."""
    expected, count = 0, 0 if pixels is None else len(pixels)
    if grid_I3 is not None:
        side = torch.tensor([1, tokens.merge, tokens.merge])
        if grid_I3.shape[1:] != side.shape or bool(((grid_I3 < 1) | (grid_I3 % side > 0)).any()):
            return f"has a grid that is no [n, 3] of squares of {side[1]} x {side[1]} patches"
        expected = int(grid_I3.prod(-1).sum())
    if expected != count:
        return f"has {count} patches but its grid needs {expected}"
    if pixels is None or not count or (pixels.dtype == torch.uint8 and pixels.dim() == 2):
        return None
    if pixels.dim() != 2 or not pixels.is_floating_point():
        return f"is {pixels.dtype} {list(pixels.shape)}, neither bytes nor floats [patches, values]"
    if not pixels.shape[1]:  # a rank behind stage 0 gets the number of patches alone
        return None
    if pixels.shape[1] != (needed := tokens.patch_values or pixels.shape[1]):
        return f"has patches of {pixels.shape[1]} values, and the tower reads {needed}"
    largest = float(pixels.abs().max())
    return None if largest <= tokens.largest_pixel else f"has {largest:.4g}, which no picture has"


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
