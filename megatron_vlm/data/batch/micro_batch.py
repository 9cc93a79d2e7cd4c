"""MicroBatch: several rows, padded on the right, ready for every stage.

Shapes: S tokens of a row, B rows of a micro-batch (S is then the longest row), I images,
P patches of all images, C values of a patch, 3 the axes time, height, width, 5 the columns
of a token: its id, its target (what it predicts) and its position on three axes, F the values
of a token that a loss reads, N supervised tokens, T the tokens of all rows, L decoder layers with
experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_vlm.data.encode.row import IGNORE, PlacedRow, Row, place_row
from megatron_vlm.errors import DataError
from megatron_vlm.family.sizes import Tokens

_PADDING = np.array([0, IGNORE, 0, 0, 0], dtype=np.int32)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward, on the host; patches may already be on the device. Targets are
    shifted: targets[b, s] is what position s predicts.

    What decides shapes is looked up here, on the host: asked of a tensor on the device, the host
    would wait until the device has computed everything before it."""

    tokens_BS5: Tensor  # int32, in one table so that a single copy moves it
    lengths: tuple[int, ...]
    rows: tuple[int, ...]  # the places of its rows in the batch that they came from
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    values_BSF: Tensor | None = None  # float32; values[b, s] belong to targets[b, s]
    value_names: tuple[str, ...] = ()
    weights_BS: Tensor | None = None  # float32, of the losses of targets; None: each is 1
    routing_TLK: Tensor | None = None  # int32, row by row; -1: the routers choose
    visual: bool = False  # whether it has images or videos: known on stages without them, too

    @property
    def ids_BS(self) -> Tensor:
        return self.tokens_BS5[..., 0].long()

    @property
    def targets_BS(self) -> Tensor:
        return self.tokens_BS5[..., 1].long()

    @property
    def position_ids_3BS(self) -> Tensor:
        return self.tokens_BS5[..., 2:].permute(2, 0, 1).long()

    @cached_property
    def supervised(self) -> tuple[Tensor, Tensor]:
        """Row and column [N] of each supervised position, row by row."""
        row_N, column_N = (self.tokens_BS5[..., 1] != IGNORE).nonzero(as_tuple=True)
        return row_N, column_N

    @property
    def num_supervised(self) -> int:
        return len(self.supervised[0])

    @property
    def targets_N(self) -> Tensor:
        """The targets of the supervised positions."""
        return self.targets_BS[self.supervised]

    @property
    def weights_N(self) -> Tensor | None:
        """The weights of their losses."""
        return None if self.weights_BS is None else self.weights_BS[self.supervised]

    @property
    def values_NF(self) -> Tensor | None:
        """The values that a loss reads of them."""
        return None if self.values_BSF is None else self.values_BSF[self.supervised]

    @cached_property
    def weight(self) -> float:
        """The sum of the weights: the number of supervised tokens, if each has the weight 1."""
        weights_N = self.weights_N
        return float(self.num_supervised if weights_N is None else weights_N.double().sum())

    def check_values(self, names: Sequence[str], where: str) -> None:
        """Refuse a batch that has supervised tokens but not these values."""
        missing = [name for name in names if name not in self.value_names]
        if missing and self.num_supervised:
            raise DataError(
                f"{where}: the loss reads {missing[0]!r} of each token, but it has "
                f"{', '.join(self.value_names) or 'no values'}; place and collate its rows with "
                f"value_names={tuple(names)}"
            )

    def log_probs_by_row(self, log_probs_N: Tensor) -> list[Tensor]:
        """The log-probs of supervised positions, by row, each in the place of its own token [S]."""
        spread_BS = log_probs_N.new_zeros(self.tokens_BS5.shape[:2])
        spread_BS[self.supervised] = log_probs_N
        shifted_BS = torch.cat([torch.zeros_like(spread_BS[:, :1]), spread_BS[:, :-1]], dim=1)
        return [row[:length].clone() for row, length in zip(shifted_BS, self.lengths, strict=True)]


VISUAL_FIELDS = ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3")
LOSS_FIELDS = ("values_BSF", "weights_BS")


def collate(
    rows: Sequence[PlacedRow], places: Sequence[int], value_names: Sequence[str] = ()
) -> MicroBatch:
    """Pad rows on the right to the longest and concatenate their patches. `value_names` are those
    that the rows were placed with."""
    lengths = tuple(len(row.tokens_S5) for row in rows)
    longest = max(lengths)
    padding = np.broadcast_to(_PADDING, (longest, 5))
    # A single concatenation of rows and paddings. Padding is on the right only, where causal
    # attention hides it from every token, so its ids may be anything.
    pieces = [
        piece
        for row, length in zip(rows, lengths, strict=True)
        for piece in (row.tokens_S5, padding[length:])
        if len(piece)
    ]
    tokens_BS5 = torch.from_numpy(np.concatenate(pieces).reshape(len(rows), longest, 5))
    others: dict[str, Any] = {"value_names": tuple(value_names)}
    for name in VISUAL_FIELDS:
        others[name] = _cat([getattr(row.row, name) for row in rows])
    others["visual"] = any(others[name] is not None for name in VISUAL_FIELDS)
    if value_names:
        values = [torch.from_numpy(row.values_SF) for row in rows if row.values_SF is not None]
        others["values_BSF"] = pad_sequence(values, batch_first=True)
    if any(row.weights_S is not None for row in rows):
        weights = [
            torch.ones(length) if row.weights_S is None else torch.from_numpy(row.weights_S)
            for row, length in zip(rows, lengths, strict=True)
        ]
        others["weights_BS"] = pad_sequence(weights, batch_first=True)
    others["routing_TLK"] = _routing([row.row.routing_SLK for row in rows], lengths)
    return MicroBatch(tokens_BS5, lengths, tuple(places), **others)


def cut_micro_batches(
    rows: Sequence[Row],
    size: int,
    tokens: Tokens,
    value_names: Sequence[str] = (),
    first_row: int = 0,
) -> list[MicroBatch]:
    """Cut a batch, in order, into micro-batches of at most `size` rows, with these values of each
    token. Errors count rows from `first_row`."""
    if not rows:
        raise DataError("an empty batch: every data parallel rank needs at least one row")
    placed = [
        place_row(row, tokens, f"row {i}", value_names) for i, row in enumerate(rows, first_row)
    ]
    ends = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    return [collate(placed[start:end], range(start, end), value_names) for start, end in ends]


def filler_batch() -> MicroBatch:
    """One token, no image, no loss, for a rank without a row of its own."""
    return MicroBatch(torch.from_numpy(_PADDING.copy()).view(1, 1, 5), (1,), ())


def _routing(given: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """The experts of all tokens; those of a row that says nothing are left to the routers."""
    said = {tuple(each.shape[1:]) for each in given if each is not None}
    if not said:
        return None
    if len(said) > 1 or len(shape := said.pop()) != 2:
        raise DataError(
            "routing: rows of one batch have tokens of different shapes; give [tokens, layers with "
            "experts, experts of a token] for each row"
        )
    pieces = [
        torch.full((length, *shape), -1) if each is None else each
        for each, length in zip(given, lengths, strict=True)
    ]
    return torch.cat([piece.to(torch.int32) for piece in pieces])


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None and len(tensor)]
    kinds = {tensor.dtype for tensor in present}
    if len(kinds) > 1:  # torch.cat would silently turn bytes into floats
        raise DataError(f"pixels of one micro-batch are {sorted(map(str, kinds))}; give one dtype")
    return torch.cat(present) if present else None
