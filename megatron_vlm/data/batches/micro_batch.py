"""MicroBatch: several rows, padded on the right, in the form that every pipeline stage takes.

Shapes: S tokens of a row, B rows of a micro-batch (S is then the longest row), I images, each once,
P their patches, C values of a patch, O the images and videos of all rows, of which several rows may
have the same one, 3 the axes time, height, width, 5 the columns of a token: its id, its target (the
token that it predicts) and its position on three axes, J targets of a position, N supervised
positions, M their targets (N of them, unless positions have several), R the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import COLUMNS, IGNORE
from megatron_vlm.data.tokens.visuals import join_grids
from megatron_vlm.errors import DataError

RowPlace = tuple[int, int]  # a row's example in the batch, and its number in that example
REJECTED = "rejected"  # row value: the answer is rejected, or the document is a negative
ROW_REFERENCE = "reference"  # row value: float64, the log-prob under the reference model


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward, on the host; patches may already be on the device. Targets are
    shifted: position s predicts targets[b, s].

    Everything that decides shapes is computed here, on the host. Reading it from a tensor on the
    device would block the host until the device has finished all earlier work."""

    tokens_BS5: Tensor  # int32, in one table so that a single copy moves everything
    lengths: tuple[int, ...]
    rows: tuple[RowPlace, ...]  # places of its rows in the batch that they come from
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    # int32, the number of each among the images, then the videos, above. None: all are different.
    visual_of_O: Tensor | None = None
    # What the tower of the model reads of each patch, by name [P, ...], where the patches are.
    # Empty: the stage that has the tower makes it, on the thread that trains.
    patch_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    # COLUMNS and values that a loss reads, by name: of all tokens, or of all targets, row by row.
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    visual: bool = False  # has images or videos; set on stages without them, too
    # What losses over rows read of each row, by name [R, ...]. None if no loss does.
    row_values: Mapping[str, Tensor] | None = None
    # Targets of all rows, if a row has several at a position. IGNORE fills shorter lists.
    targets_BSJ: Tensor | None = None
    # The shape past S of each row's own targets. None: the row has labels. (): all rows have
    # labels.
    target_shapes: tuple[tuple[int, ...] | None, ...] = ()

    @property
    def ids_BS(self) -> Tensor:
        return self.tokens_BS5[..., 0].long()

    @property
    def targets_BS(self) -> Tensor:
        return self.tokens_BS5[..., 1].long()

    @property
    def position_ids_3BS(self) -> Tensor:
        return self.tokens_BS5[..., 2:].permute(2, 0, 1).long()

    @property
    def grid_I3(self) -> Tensor:
        """Grids of the images, then of the videos."""
        return join_grids(self.image_grid_I3, self.video_grid_I3)

    @cached_property
    def supervised(self) -> tuple[Tensor, Tensor]:
        """Row and column [N] of each supervised position, row by row."""
        row_N, column_N = (self.tokens_BS5[..., 1] != IGNORE).nonzero(as_tuple=True)
        return row_N, column_N

    @cached_property
    def target_positions(self) -> tuple[Tensor, Tensor] | None:
        """Two numbers for each target [M]: its position among the N, and its place among the
        targets of that position. None if each position has one target."""
        if self.targets_BSJ is None:
            return None
        of_M, which_M = (self.targets_BSJ[self.supervised] != IGNORE).nonzero(as_tuple=True)
        return of_M, which_M

    @property
    def of_M(self) -> Tensor | None:
        """The position of each target, if positions have several."""
        return None if self.target_positions is None else self.target_positions[0]

    @property
    def num_supervised(self) -> int:
        """Number of targets of all rows."""
        return len(self.supervised[0] if self.of_M is None else self.of_M)

    @property
    def targets_M(self) -> Tensor:
        """Targets of the supervised positions."""
        if self.targets_BSJ is None or self.target_positions is None:
            return self.targets_BS[self.supervised]
        return self.targets_BSJ[self.supervised][self.target_positions]

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the values that a loss reads."""
        return tuple(name for name in self.columns if name not in COLUMNS)

    @property
    def num_examples(self) -> int:
        """Number of samples that its rows belong to."""
        return len({example for example, _ in self.rows})

    @property
    def example_R(self) -> Tensor:
        """Number of each row's example in this micro-batch."""
        number = {example: n for n, example in enumerate(dict.fromkeys(e for e, _ in self.rows))}
        return torch.tensor([number[example] for example, _ in self.rows], dtype=torch.long)

    def with_row_values(self, **values: Tensor) -> "MicroBatch":
        """Return the batch with more values of its rows. A filler has no rows."""
        if not self.rows:
            return self
        return replace(self, row_values={**(self.row_values or {}), **values})

    @property
    def row_M(self) -> Tensor:
        """Row of each target."""
        row_N = self.supervised[0]
        return row_N if self.of_M is None else row_N[self.of_M]

    @cached_property
    def weight(self) -> float:
        """Sum of the weights: the number of supervised tokens if each has the weight 1."""
        weights_M = self.columns.get("loss_weights")
        return float(self.num_supervised if weights_M is None else weights_M.double().sum())

    def check_values(self, names: Sequence[str], where: str) -> None:
        """Raise a DataError if the batch has supervised tokens but not these values."""
        missing = [name for name in names if name not in self.columns]
        if missing and self.num_supervised:
            raise DataError(
                "is missing: the loss reads it for each token, and there "
                + (f"is only {', '.join(self.value_names)}" if self.value_names else "is no value"),
                place=where,
                key=missing[0],
                remedy=f"place and collate its rows with value_names={tuple(names)}",
            )

    def check_teacher(self, where: str) -> None:
        """Raise a DataError if the batch has supervised tokens but not a teacher's."""
        if self.num_supervised and "teacher_ids" not in self.columns:
            raise DataError(
                "is missing: the loss compares the model with a teacher at each supervised token",
                place=where,
                key="teacher_ids",
                remedy="score the data with megatron-vlm score and top_k, and name the folder in "
                "teacher.path",
            )

    def log_probs_by_row(self, log_probs_M: Tensor) -> list[Tensor]:
        """Return the log-probs of the targets of each row: [S], each at its own token, or in the
        shape and the order of the row's targets."""
        rows, longest = self.tokens_BS5.shape[:2]
        width = 1 if self.targets_BSJ is None else self.targets_BSJ.shape[2]
        spread_BSJ = log_probs_M.new_zeros(rows, longest, width)
        row_N, column_N = self.supervised
        if self.target_positions is None:
            spread_BSJ[row_N, column_N, 0] = log_probs_M
        else:
            of_M, which_M = self.target_positions
            spread_BSJ[row_N[of_M], column_N[of_M], which_M] = log_probs_M
        shapes = self.target_shapes or (None,) * rows
        return [
            _as_given(spread_SJ[:length], shape)
            for spread_SJ, length, shape in zip(spread_BSJ, self.lengths, shapes, strict=True)
        ]


def _as_given(spread_SJ: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Return the numbers of a row's targets in the shape that the row has."""
    if shape is None:  # labels: each number belongs to the predicted token
        spread_S = spread_SJ[:, 0]
        return torch.cat([spread_S.new_zeros(1), spread_S[:-1]])
    return spread_SJ[:, : shape[0]].clone() if shape else spread_SJ[:, 0].clone()
