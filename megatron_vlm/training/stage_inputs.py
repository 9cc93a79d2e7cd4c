"""A micro-batch on its way to a stage's device, with only the parts that the stage needs.

Shapes: S tokens of a row, B rows, N supervised places, M their targets, P patches, C values of a
patch, R a teacher's log-probs of some tokens and of all others, or the rows, 3 the axes of a
position, 5 the columns of a token, H the width of the decoder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import REJECTED, MicroBatch
from megatron_vlm.data.tokens.row import COLUMNS, GRID_OF, VALUE
from megatron_vlm.model.flash_windows import PictureTokens
from megatron_vlm.model.head import Targets
from megatron_vlm.model.router import Routing, real_places
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.model.vision import VisualPlan
from megatron_vlm.training.expert_routing import given_routing


@dataclass(frozen=True)
class RowInputs:
    """Values of the rows of a micro-batch on the device, for losses that compare rows."""

    row_M: Tensor  # row of each target
    example_R: Tensor  # number of each row's example in the micro-batch
    values: Mapping[str, Tensor]  # MicroBatch.row_values

    @staticmethod
    def from_batch(batch: MicroBatch, move: Callable[[Tensor], Tensor]) -> "RowInputs":
        """Return the values of a batch of rated answers."""
        assert batch.row_values is not None
        values = {name: move(tensor) for name, tensor in batch.row_values.items()}
        return RowInputs(move(batch.row_M), move(batch.example_R), values)

    @staticmethod
    def empty(device: torch.device) -> "RowInputs":
        """Return the values of a batch without rows."""
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        return RowInputs(nothing, nothing, {REJECTED: nothing.bool()})

    @property
    def is_rejected_R(self) -> Tensor:
        return self.values[REJECTED]

    def sums(self, values_M: Tensor) -> Tensor:
        """Return the sum of each row's values in float64. The order of the additions is fixed."""
        rows = torch.arange(len(self.example_R), device=values_M.device)
        is_of_row_RM = self.row_M == rows[:, None]
        return torch.where(is_of_row_RM, values_M.double(), 0.0).sum(1)

    @cached_property
    def counts_R(self) -> Tensor:
        """Number of targets of each row."""
        return self.sums(torch.ones_like(self.row_M, dtype=torch.float64))


@dataclass(frozen=True)
class StageInput:
    """A micro-batch on the device: pixels on the first stage, inputs of head and loss on the
    last."""

    host: MicroBatch
    tokens_BS5: Tensor
    pixel_values_PC: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    visuals: VisualPlan | None = None
    places_N: Tensor | None = None  # supervised places in the flattened [S * B]
    targets: Targets | None = None  # inputs of the head, on the last stage
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # columns of targets
    rows: "RowInputs | None" = None  # set if a loss reads rows
    number: int = 0  # number of this micro-batch in the step
    routing: Routing | None = None  # set if there are experts
    pictures: PictureTokens | None = None  # set if attention has windows

    @property
    def ids_BS(self) -> Tensor:
        return self.tokens_BS5[..., 0].long()

    @property
    def position_ids_3BS(self) -> Tensor:
        return self.tokens_BS5[..., 2:].permute(2, 0, 1).long()

    @property
    def row_M(self) -> Tensor:
        """Row of each target, on the last stage."""
        assert self.places_N is not None and self.targets is not None
        row_N, of_M = self.places_N % len(self.tokens_BS5), self.targets.of_M
        return row_N if of_M is None else row_N[of_M]

    @property
    def teacher_NR(self) -> Tensor:
        """A teacher's log-probs. A batch without supervised places, such as a filler, has none."""
        none_NR = torch.zeros(0, 2, device=self.tokens_BS5.device)
        return self.columns.get("teacher_log_probs", none_NR)

    def values_M(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of the targets by name. A batch without targets needs no values."""
        none_M = torch.zeros(0, device=self.tokens_BS5.device)
        return {name: self.columns.get(name, none_M) for name in names}


def stage_input(
    batch: MicroBatch, number: int, chunk: StageModel, sees: bool, move: Callable[[Tensor], Tensor]
) -> StageInput:
    """Return the parts of the batch that `chunk` needs. If `sees` is false, placeholders are
    words."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else move(tensor)

    parts: dict[str, Any] = {}
    if chunk.pre_process and sees:
        of_pictures = batch.grid_I3, batch.patch_inputs, batch.visual_of_O
        parts["visuals"] = chunk.plan_visuals(batch.ids_BS, *of_pictures).moved(move)
        for name in GRID_OF:
            parts[name] = moved(getattr(batch, name))
    text = chunk.sizes.text
    if sees and batch.visual and any(each.sees_image for each in text.attentions):
        parts["pictures"] = PictureTokens.of_rows(batch.ids_BS, chunk.sizes.tokens).moved(move)
    if chunk.post_process:
        row_N, column_N = batch.supervised
        parts["places_N"] = move(column_N * len(batch.lengths) + row_N)
        parts["columns"] = columns = {
            name: move(tensor)
            for name, tensor in batch.columns.items()
            if COLUMNS.get(name, VALUE).per != "token"
        }
        own = move(batch.targets_M), moved(batch.of_M)
        parts["targets"] = Targets(*own, columns.get("teacher_ids"))
        if batch.row_values is not None:
            parts["rows"] = RowInputs.from_batch(batch, move)
    if text.experts is not None:
        # A filler's rows belong to no sample, so they are padding.
        lengths = batch.lengths if batch.rows else (0,) * len(batch.lengths)
        places = move(real_places(lengths, batch.tokens_BS5.shape[1]))
        parts["routing"] = Routing(places, given_routing(batch, chunk, move))
    return StageInput(batch, move(batch.tokens_BS5), number=number, **parts)
