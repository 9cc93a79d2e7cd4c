"""MicroBatch: several rows, padded on the right, in the form that every pipeline stage takes.

Shapes: S tokens of a row, B rows of a micro-batch (S is then the longest row), I images, P patches
of all images, C values of a patch, 3 the axes time, height, width, 5 the columns of a token: its
id, its target (the token that it predicts) and its position on three axes, F the values of a token
that a loss reads, J targets of a position, N supervised positions, M their targets (N of them,
unless positions have several), R a teacher's log-probs of J tokens and of all others, T the tokens
of all rows, L decoder layers with experts, K experts of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_vlm.data.tokens.row import IGNORE, PlacedRow, Row, place_row
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import Tokens

_PADDING = np.array([0, IGNORE, 0, 0, 0], dtype=np.int32)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward, on the host; patches may already be on the device. Targets are
    shifted: position s predicts targets[b, s].

    Everything that decides shapes is computed here, on the host. Reading it from a tensor on the
    device would block the host until the device has finished all earlier work."""

    tokens_BS5: Tensor  # int32, in one table so that a single copy moves everything
    lengths: tuple[int, ...]
    rows: tuple[int, ...]  # places of its rows in the batch that they come from
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    values_BSF: Tensor | None = None  # float32; values[b, s] belong to targets[b, s]
    value_names: tuple[str, ...] = ()
    weights_BS: Tensor | None = None  # float32, weights of the targets' losses; None: each is 1
    routing_TLK: Tensor | None = None  # int32, row by row; -1: the routers choose
    visual: bool = False  # has images or videos; set on stages without them, too
    # int32: the number of each row's example in this micro-batch, and 1 if its answer is rejected
    # or its document is a negative. None: each row is an example.
    examples_R2: Tensor | None = None
    reference_R: Tensor | None = None  # float64, log-prob of each row under the reference model
    # float64, of each row: the derivative of the loss of the global batch by its log-prob, and its
    # share of that loss. For losses that compare all rows of a global batch.
    surrogate_R2: Tensor | None = None
    # A teacher's most likely tokens at each of the N positions (int32), and its log-probs of these
    # and of all others together.
    teacher_ids_NJ: Tensor | None = None
    teacher_log_probs_NR: Tensor | None = None
    slopes_RH: Tensor | None = None  # the derivative of that loss by the embedding of each row
    # Targets of all rows, if a row has several at a position. IGNORE fills shorter lists.
    targets_BSJ: Tensor | None = None
    values_BSJF: Tensor | None = None  # values of these targets, which replace values_BSF
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
        return len(
            self.supervised[0] if self.target_positions is None else self.target_positions[0]
        )

    @property
    def targets_M(self) -> Tensor:
        """Targets of the supervised positions."""
        if self.targets_BSJ is None or self.target_positions is None:
            return self.targets_BS[self.supervised]
        return self.targets_BSJ[self.supervised][self.target_positions]

    @property
    def weights_M(self) -> Tensor | None:
        """Weights of the targets' losses."""
        if self.weights_BS is None:
            return None
        weights_N = self.weights_BS[self.supervised]
        return weights_N if self.of_M is None else weights_N[self.of_M]

    @property
    def values_MF(self) -> Tensor | None:
        """Values of the targets that a loss reads."""
        if self.values_BSJF is not None and self.target_positions is not None:
            return self.values_BSJF[self.supervised][self.target_positions]
        return None if self.values_BSF is None else self.values_BSF[self.supervised]

    @property
    def num_examples(self) -> int:
        """Number of samples that its rows belong to."""
        if self.examples_R2 is None:
            return len(self.rows)
        return len(self.examples_R2[:, 0].unique())

    @property
    def row_M(self) -> Tensor:
        """Row of each target."""
        row_N = self.supervised[0]
        return row_N if self.of_M is None else row_N[self.of_M]

    @cached_property
    def weight(self) -> float:
        """Sum of the weights: the number of supervised tokens if each has the weight 1."""
        weights_M = self.weights_M
        return float(self.num_supervised if weights_M is None else weights_M.double().sum())

    def check_values(self, names: Sequence[str], where: str) -> None:
        """Raise a DataError if the batch has supervised tokens but not these values."""
        missing = [name for name in names if name not in self.value_names]
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
        if self.num_supervised and self.teacher_ids_NJ is None:
            raise DataError(
                "is missing: the loss compares the model with a teacher at each supervised token",
                place=where,
                key="teacher_ids",
                remedy="score the data with megatron-vlm score and top_k, and name the folder in "
                "data.teacher",
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


TEACHER_FIELDS = ("teacher_ids_NJ", "teacher_log_probs_NR")
VISUAL_FIELDS = ("pixel_values_PC", "image_grid_I3", "pixel_values_videos_PC", "video_grid_I3")
LOSS_FIELDS = (
    *("values_BSF", "weights_BS", "values_BSJF", "targets_BSJ", "examples_R2", "reference_R"),
    *TEACHER_FIELDS,
)


def collate(
    rows: Sequence[PlacedRow], places: Sequence[int], value_names: Sequence[str] = ()
) -> MicroBatch:
    """Pad rows on the right to the longest and concatenate their patches. `value_names` are the
    names that the rows were placed with."""
    lengths = tuple(len(row.tokens_S5) for row in rows)
    longest = max(lengths)
    padding = np.broadcast_to(_PADDING, (longest, 5))
    # Rows and paddings are concatenated once. Padding is on the right only, where causal attention
    # hides it from every token, so its ids may be anything.
    pieces = [
        piece
        for row, length in zip(rows, lengths, strict=True)
        for piece in (row.tokens_S5, padding[length:])
        if len(piece)
    ]
    tokens_BS5 = torch.from_numpy(np.concatenate(pieces).reshape(len(rows), longest, 5))
    optional: dict[str, Any] = {"value_names": tuple(value_names)}
    for name in VISUAL_FIELDS:
        optional[name] = _cat([getattr(row.row, name) for row in rows], name)
    optional["visual"] = any(optional[name] is not None for name in VISUAL_FIELDS)
    if any(row.targets_SJ is not None for row in rows):
        optional |= _several_targets(rows, longest, len(value_names))
    elif value_names:
        values = [torch.from_numpy(row.values_SF) for row in rows if row.values_SF is not None]
        optional["values_BSF"] = pad_sequence(values, batch_first=True)
    if any(row.row.targets is not None for row in rows):
        row_targets = [row.row.targets for row in rows]
        optional["target_shapes"] = tuple(
            t if t is None else tuple(t.shape[1:]) for t in row_targets
        )
    if any(row.weights_S is not None for row in rows):
        weights = [
            torch.ones(length) if row.weights_S is None else torch.from_numpy(row.weights_S)
            for row, length in zip(rows, lengths, strict=True)
        ]
        optional["weights_BS"] = pad_sequence(weights, batch_first=True)
    optional |= _concatenate_teacher([row.row for row in rows if row.is_supervised])
    optional["routing_TLK"] = _concatenate_routing([row.row.routing_SLK for row in rows], lengths)
    return MicroBatch(tokens_BS5, lengths, tuple(places), **optional)


MAX_ROWS = 2**12  # rows of one example


def collate_examples(
    examples: Mapping[int, Sequence[PlacedRow]],
    rejected: Mapping[int, Sequence[bool]],
    reference: Mapping[int, Sequence[float]] | None = None,
) -> MicroBatch:
    """Collate the rows of rated answers, or of queries and documents, by the places of their
    examples in the global batch. `rejected` tells of each row whether its answer is rejected, or
    its document is a negative; `reference` are the rows' log-probs
    under the reference model, if they are known."""
    flat = [row for rows in examples.values() for row in rows]
    places = [place * MAX_ROWS + n for place, rows in examples.items() for n in range(len(rows))]
    table = [
        (number, int(flag)) for number, place in enumerate(examples) for flag in rejected[place]
    ]
    values = None
    if reference is not None:
        listed = [value for place in examples for value in reference[place]]
        values = torch.tensor(listed, dtype=torch.float64)
    numbers = torch.tensor(table, dtype=torch.int32)
    return replace(collate(flat, places), examples_R2=numbers, reference_R=values)


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
        raise DataError(": every data parallel rank needs at least one row", key="rows", found=[])
    placed = [
        place_row(row, tokens, f"row {i}", value_names) for i, row in enumerate(rows, first_row)
    ]
    ends = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    return [collate(placed[start:end], range(start, end), value_names) for start, end in ends]


def filler_batch() -> MicroBatch:
    """Return one token, without image and loss, for a rank without a row of its own."""
    return MicroBatch(torch.from_numpy(_PADDING.copy()).view(1, 1, 5), (1,), ())


def _several_targets(rows: Sequence[PlacedRow], longest: int, values: int) -> dict[str, Any]:
    """Return targets and values of rows of which some have several targets at each position."""
    max_targets = max(1 if row.targets_SJ is None else row.targets_SJ.shape[1] for row in rows)
    targets_BSJ = torch.full((len(rows), longest, max_targets), IGNORE)
    values_BSJF = torch.zeros(len(rows), longest, max_targets, values)
    for place, row in enumerate(rows):
        targets_SJ, values_SJF = row.targets_SJ, row.values_SJF
        if targets_SJ is None:
            targets_SJ = row.tokens_S5[:, 1:2]
            values_SJF = None if row.values_SF is None else row.values_SF[:, None]
        length, count = targets_SJ.shape
        targets_BSJ[place, :length, :count] = torch.from_numpy(targets_SJ)
        if values_SJF is not None:
            values_BSJF[place, :length, :count] = torch.from_numpy(values_SJF)
    return {"targets_BSJ": targets_BSJ, "values_BSJF": values_BSJF if values else None}


def _as_given(spread_SJ: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Return the numbers of a row's targets in the shape that the row has."""
    if shape is None:  # labels: each number belongs to the predicted token
        spread_S = spread_SJ[:, 0]
        return torch.cat([spread_S.new_zeros(1), spread_S[:-1]])
    return spread_SJ[:, : shape[0]].clone() if shape else spread_SJ[:, 0].clone()


def _concatenate_routing(
    routing_of_rows: Sequence[Tensor | None], lengths: Sequence[int]
) -> Tensor | None:
    """Concatenate the experts of all tokens. Routers choose for rows without routing."""
    shapes = {tuple(each.shape[1:]) for each in routing_of_rows if each is not None}
    if not shapes:
        return None
    if len(shapes) > 1 or len(shape := shapes.pop()) != 2:
        raise DataError(
            "has a different shape for the tokens of some rows of one batch",
            key="routing",
            remedy="give [tokens, layers with experts, experts of a token] for each row",
        )
    pieces = [
        torch.full((length, *shape), -1) if each is None else each
        for each, length in zip(routing_of_rows, lengths, strict=True)
    ]
    return torch.cat([piece.to(torch.int32) for piece in pieces])


def _concatenate_teacher(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Concatenate what a teacher has for the supervised tokens of these rows, row by row."""
    pairs = [(row.teacher_ids_NJ, row.teacher_log_probs_NR) for row in rows]
    present = [(ids, log_probs) for ids, log_probs in pairs if ids is not None]
    if not present:
        return {}
    if len(present) < len(rows) or len({ids.shape[1] for ids, _ in present}) > 1:
        raise DataError(
            "has several widths, or is missing, in rows of one micro-batch",
            key="teacher_ids",
            remedy="give the same number of tokens for each supervised token of all rows",
        )
    columns = zip(*present, strict=True)
    return {
        name: torch.cat([tensor for tensor in column if tensor is not None])
        for name, column in zip(TEACHER_FIELDS, columns, strict=True)
    }


def _cat(tensors: Sequence[Tensor | None], name: str) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None and len(tensor)]
    kinds = {tensor.dtype for tensor in present}
    if len(kinds) > 1:  # torch.cat would silently turn bytes into floats
        raise DataError(
            f"has several dtypes in one micro-batch: {', '.join(sorted(map(str, kinds)))}",
            key=name.rpartition("_")[0],
            remedy="give one dtype",
        )
    return torch.cat(present) if present else None
