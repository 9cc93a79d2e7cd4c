"""MicroBatch: several rows, right padded, ready for every stage.

Shapes: S tokens of a row, B rows of a micro-batch (S then the longest row), I images,
P patches of all images, C values of a patch, 3 the axes time, height, width, 5 the columns
of a token: its id, its target (what it predicts) and its position on three axes, F the values
of a token that a loss reads, N supervised tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.encode.positions import VisionTokens
from megatron_vlm.data.encode.row import IGNORE, PlacedRow, Row, place_row
from megatron_vlm.errors import DataError

_PADDING = np.array([0, IGNORE, 0, 0, 0], dtype=np.int32)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes. Targets are shifted: targets[b, s] is what position s predicts."""

    tokens_BS5: Tensor  # int32: one table, so that one copy moves it
    lengths: tuple[int, ...]
    rows: tuple[int, ...]  # the places of its rows in the batch they came from
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    values_BSF: Tensor | None = None  # float32: values[b, s] are of targets[b, s]
    value_names: tuple[str, ...] = ()

    @cached_property
    def ids_BS(self) -> Tensor:
        return self.tokens_BS5[..., 0].long()

    @cached_property
    def targets_BS(self) -> Tensor:
        return self.tokens_BS5[..., 1].long()

    @cached_property
    def position_ids_3BS(self) -> Tensor:
        return self.tokens_BS5[..., 2:].permute(2, 0, 1).long()

    @cached_property
    def num_supervised(self) -> int:
        return int((self.tokens_BS5[..., 1] != IGNORE).sum())

    def for_stage(self, first: bool, device: torch.device, last: bool = False) -> "MicroBatch":
        """The part that a stage needs, on its device: pixels go to the first alone, values to the
        last."""
        changes: dict[str, Any] = {}
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if (name in VISUAL_FIELDS and not first) or (name == "values_BSF" and not last):
                changes[name] = None
            elif isinstance(value, Tensor):
                changes[name] = value.to(device, non_blocking=True)
        return replace(self, **changes)

    def values_N(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Of the supervised tokens, by name. Without such tokens a batch need not have any."""
        if not names:
            return {}
        if self.values_BSF is None:
            return dict.fromkeys(names, torch.zeros(0, device=self.tokens_BS5.device))
        values_NF = self.values_BSF[self.targets_BS != IGNORE]
        return {name: values_NF[:, self.value_names.index(name)] for name in names}

    def check_values(self, names: Sequence[str], where: str) -> None:
        """That they are there, where a token is supervised."""
        missing = [name for name in names if name not in self.value_names]
        if missing and self.num_supervised:
            raise DataError(
                f"{where}: the loss reads {missing[0]!r} of each token, and it has "
                f"{', '.join(self.value_names) or 'no values'}; place and collate its rows with "
                f"value_names={tuple(names)}"
            )

    def log_probs_by_row(self, log_probs_N: Tensor) -> list[Tensor]:
        """Spread the log-probs of supervised positions over rows, under their own tokens [S]."""
        spread_BS = log_probs_N.new_zeros(self.targets_BS.shape)
        spread_BS[self.targets_BS != IGNORE] = log_probs_N
        shifted_BS = torch.cat([torch.zeros_like(spread_BS[:, :1]), spread_BS[:, :-1]], dim=1)
        return [row[:length].clone() for row, length in zip(shifted_BS, self.lengths, strict=True)]


VISUAL_FIELDS = ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3")


def collate(
    rows: Sequence[PlacedRow], places: Sequence[int], value_names: Sequence[str] = ()
) -> MicroBatch:
    """Pad rows on the right to their longest and lay their patches end to end. `value_names` are
    those that the rows were placed with."""
    lengths = tuple(len(row.tokens_S5) for row in rows)
    longest = max(lengths)
    padding = np.broadcast_to(_PADDING, (longest, 5))
    # One concatenation of rows and paddings: right padding only, under causal attention nothing
    # before it sees it, so its ids are free.
    pieces = [
        piece
        for row, length in zip(rows, lengths, strict=True)
        for piece in (row.tokens_S5, padding[length:])
        if len(piece)
    ]
    tokens_BS5 = torch.from_numpy(np.concatenate(pieces).reshape(len(rows), longest, 5))
    visual = {name: _cat([getattr(row.row, name) for row in rows]) for name in VISUAL_FIELDS}
    values_BSF = _pad_values(rows, longest) if value_names else None
    return MicroBatch(
        tokens_BS5,
        lengths,
        tuple(places),
        **visual,
        values_BSF=values_BSF,
        value_names=tuple(value_names),
    )


def _pad_values(rows: Sequence[PlacedRow], longest: int) -> Tensor:
    values = [row.values_SF for row in rows if row.values_SF is not None]
    values_BSF = np.zeros((len(rows), longest, values[0].shape[1]), dtype=np.float32)
    for place, values_SF in enumerate(values):
        values_BSF[place, : len(values_SF)] = values_SF
    return torch.from_numpy(values_BSF)


def cut_micro_batches(
    rows: Sequence[Row],
    size: int,
    tokens: VisionTokens,
    value_names: Sequence[str] = (),
    first_row: int = 0,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `size` rows, in order, with these values of each
    token. In errors the first row is called `first_row`."""
    if not rows:
        raise DataError("an empty batch: every data parallel rank needs at least one row")
    placed = [
        place_row(row, tokens, f"row {i}", value_names) for i, row in enumerate(rows, first_row)
    ]
    ends = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    return [collate(placed[start:end], range(start, end), value_names) for start, end in ends]


def filler_batch() -> MicroBatch:
    """For a rank without a row of its own: one token, no image, no loss."""
    return MicroBatch(torch.from_numpy(_PADDING.copy()).view(1, 1, 5), (1,), ())


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None and len(tensor)]
    kinds = {tensor.dtype for tensor in present}
    if len(kinds) > 1:  # torch.cat would turn bytes into floats without a word
        raise DataError(f"pixels of one micro-batch are {sorted(map(str, kinds))}; give one dtype")
    return torch.cat(present) if present else None
