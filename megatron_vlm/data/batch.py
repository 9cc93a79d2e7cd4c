"""Row: one sample as tensors. MicroBatch: several rows, right padded, ready for every stage.

Shapes: S tokens of a row, B rows of a micro-batch (S then the longest row), I images,
P patches of all images, C values of a patch, 3 the axes time, height, width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_vlm.data.positions import GridQueue, VisionTokens, mrope_positions
from megatron_vlm.errors import DataError

IGNORE = -100  # a label that carries no loss, as in Hugging Face


@dataclass(frozen=True)
class Row:
    """One sample. Labels stand under their own token (Hugging Face's way, not shifted)."""

    ids_S: Tensor
    labels_S: Tensor
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None

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
class MicroBatch:
    """What one forward takes. Targets are shifted: targets[b, s] is what position s predicts."""

    ids_BS: Tensor
    targets_BS: Tensor
    position_ids_3BS: Tensor
    lengths: tuple[int, ...]
    pixel_values_PC: Tensor | None
    image_grid_I3: Tensor | None
    pixel_values_videos_PC: Tensor | None
    video_grid_I3: Tensor | None

    @property
    def num_supervised(self) -> int:
        return int((self.targets_BS != IGNORE).sum())

    def for_stage(self, first: bool, last: bool, device: torch.device) -> "MicroBatch":
        """The part that a stage needs, on its device: pixels on the first, targets on the last."""
        changes: dict[str, Any] = {}
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if name in _VISUAL_FIELDS and not first:
                changes[name] = None
            elif isinstance(value, Tensor) and (last or name != "targets_BS"):
                changes[name] = value.to(device, non_blocking=True)
        return replace(self, **changes)

    def log_probs_by_row(self, log_probs_N: Tensor) -> list[Tensor]:
        """Spread the log-probs of supervised positions over rows, under their own tokens [S]."""
        spread_BS = log_probs_N.new_zeros(self.targets_BS.shape)
        spread_BS[self.targets_BS != IGNORE] = log_probs_N
        shifted_BS = torch.cat([torch.zeros_like(spread_BS[:, :1]), spread_BS[:, :-1]], dim=1)
        return [row[:length].clone() for row, length in zip(shifted_BS, self.lengths, strict=True)]


_VISUAL_FIELDS = ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3")


def collate(rows: Sequence[Row], tokens: VisionTokens, first_row: int = 0) -> MicroBatch:
    """Pad rows on the right to their longest, lay their patches end to end, check every image."""
    positions, targets = [], []
    for offset, row in enumerate(rows):
        where = f"row {first_row + offset}"
        if row.ids_S.shape != row.labels_S.shape or row.ids_S.dim() != 1 or not len(row.ids_S):
            raise DataError(
                f"{where}: ids {tuple(row.ids_S.shape)} and labels {tuple(row.labels_S.shape)} "
                "must be two vectors of one length, at least 1"
            )
        row.check_pixels(where)
        queue = GridQueue(row.image_grid_I3, row.video_grid_I3, tokens)
        runs = queue.runs_of(row.ids_S, where)
        queue.check_used_up(where)
        positions.append(mrope_positions(len(row.ids_S), runs).T)
        targets.append(torch.cat([row.labels_S[1:], torch.tensor([IGNORE])]))
    return MicroBatch(
        # Right padding only: under causal attention nothing before it sees it, so the id is free.
        ids_BS=pad_sequence([row.ids_S for row in rows], batch_first=True, padding_value=0),
        targets_BS=pad_sequence(targets, batch_first=True, padding_value=IGNORE),
        position_ids_3BS=pad_sequence(positions, batch_first=True).permute(2, 0, 1).contiguous(),
        lengths=tuple(len(row.ids_S) for row in rows),
        **{name: _cat([getattr(row, name) for row in rows]) for name in _VISUAL_FIELDS},
    )


def micro_batches(rows: Sequence[Row], size: int, tokens: VisionTokens) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `size` rows, in order."""
    if not rows:
        raise DataError("an empty batch: every data parallel rank needs at least one row")
    return [
        collate(rows[start : start + size], tokens, start) for start in range(0, len(rows), size)
    ]


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None and len(tensor)]
    return torch.cat(present) if present else None
