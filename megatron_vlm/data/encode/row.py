"""Row: one sample as tensors, and checked against its images.

Shapes: S tokens of a row, I images, P patches of all images, C values of a patch, 3 the axes time,
height, width, 5 the columns of a token: its id, its target (what it predicts) and its position on
three axes, F the values of a token that a loss reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.encode.positions import GridQueue, VisionTokens, mrope_positions
from megatron_vlm.errors import DataError

IGNORE = -100  # a label that carries no loss, as in Hugging Face


@dataclass(frozen=True)
class Row:
    """One sample. Labels stand under their own token (Hugging Face's way, not shifted), and so do
    `values_S`: by name what a loss reads of each token (see losses.py). Pixels are floats as the
    image processor gives them, or bytes as `data.images.image_patches` does."""

    ids_S: Tensor
    labels_S: Tensor
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    values_S: Mapping[str, Tensor] = field(default_factory=dict)

    def check_pixels(self, where: str) -> None:
        """Patches and grids must come together and count the same."""
        for pixels, grid, name in (
            (self.pixel_values_PC, self.image_grid_I3, "pixel_values"),
            (self.pixel_values_videos_PC, self.video_grid_I3, "pixel_values_videos"),
        ):
            expected = 0 if grid is None else int(grid.prod(-1).sum())
            got = 0 if pixels is None else len(pixels)
            if expected != got:
                raise DataError(
                    f"{where}: {name} has {got} patches but its grid asks for {expected}; "
                    "take both from one call of the image processor"
                )


@dataclass(frozen=True)
class PlacedRow:
    """A row that was checked, its tokens with targets and positions in one table: collating it is
    a copy."""

    row: Row
    tokens_S5: np.ndarray  # int32
    values_SF: np.ndarray | None = None  # float32, shifted as targets are


def place_row(row: Row, tokens: VisionTokens, where: str, names: Sequence[str] = ()) -> PlacedRow:
    """Check every image against its placeholders, shift the labels, compute the positions; of the
    row's values take those with these names."""
    if row.ids_S.shape != row.labels_S.shape or row.ids_S.dim() != 1 or not len(row.ids_S):
        raise DataError(
            f"{where}: ids {tuple(row.ids_S.shape)} and labels {tuple(row.labels_S.shape)} "
            "must be two vectors of one length, at least 1"
        )
    row.check_pixels(where)
    queue = GridQueue(row.image_grid_I3, row.video_grid_I3, tokens)
    runs = queue.runs_of(row.ids_S, where)
    queue.check_used_up(where)
    tokens_S5 = np.empty((len(row.ids_S), 5), dtype=np.int32)
    tokens_S5[:, 0] = row.ids_S.numpy()
    tokens_S5[:-1, 1] = row.labels_S[1:].numpy()
    tokens_S5[-1, 1] = IGNORE
    tokens_S5[:, 2:] = mrope_positions(len(row.ids_S), runs).T
    values_SF = _shifted_values(row, names, where) if names else None
    return PlacedRow(row, tokens_S5, values_SF)


def _shifted_values(row: Row, names: Sequence[str], where: str) -> np.ndarray:
    values_SF = np.zeros((len(row.ids_S), len(names)), dtype=np.float32)
    supervised_S = row.labels_S[1:].numpy() != IGNORE
    for place, name in enumerate(names):
        value_S = row.values_S.get(name)
        if value_S is None and not supervised_S.any():
            continue
        if value_S is None or value_S.shape != row.ids_S.shape:
            got = "none" if value_S is None else f"{tuple(value_S.shape)}"
            raise DataError(
                f"{where}: the loss reads {name!r} of each of its {len(row.ids_S)} tokens, and it "
                f"has {got}; give one number a token, under the token it is of"
            )
        values_SF[:-1, place] = value_S[1:].detach().float().numpy()
        finite_S = np.isfinite(values_SF[:-1, place])
        if (wrong := (supervised_S & ~finite_S).nonzero()[0]).size:
            raise DataError(
                f"{where}: {name!r} of token {wrong[0] + 1} is {value_S[wrong[0] + 1]}, and the "
                "token is supervised; give a finite number, or the label -100"
            )
    return values_SF


def continued(prompt: Row, ids: Sequence[int], **values: float) -> Row:
    """The prompt with supervised tokens behind it, each of them with these values."""
    behind_S = torch.tensor(ids, dtype=torch.long)
    ids_S = torch.cat([prompt.ids_S, behind_S])
    labels_S = torch.cat([torch.full_like(prompt.ids_S, IGNORE), behind_S])
    values_S = {name: torch.full(ids_S.shape, value) for name, value in values.items()}
    return replace(prompt, ids_S=ids_S, labels_S=labels_S, values_S=values_S)
