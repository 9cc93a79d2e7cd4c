"""forward_backward as the ranks take it, and what the client gets to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.serve.loss_names import form_of, options_of
from megatron_vlm.serve.protocol.requests import read_forward_backward
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.worker import StepMetrics


@dataclass(frozen=True)
class Batch:
    """A forward_backward that was read: its rows, longest first and dealt out to the replicas."""

    rows: list[Row]
    order: list[int]  # the datum that each row is
    shapes: list[tuple[int, ...]]  # of the targets of each datum
    loss: str
    options: dict[str, float]
    forward_only: bool

    @property
    def tokens(self) -> int:
        return sum(len(row.ids_S) for row in self.rows)

    def in_order(self, log_probs: Sequence[Tensor]) -> list[np.ndarray]:
        """Of the datums in their order, in the shapes of their targets; given in that of rows."""
        found: list[np.ndarray] = [np.empty(0)] * len(self.order)
        for place, each in zip(self.order, log_probs, strict=True):
            found[place] = each.float().reshape(self.shapes[place]).numpy()
        return found


def read_batch(body: bytes, reader: RowReader, replicas: int) -> Batch:
    """What is to be done of the request; what is wrong in it is said by field."""
    request = read_forward_backward(body)
    form = form_of(request.loss)
    options = options_of(request.loss, request.options)
    reader.admit(
        (datum.chunks, f"data[{place}].model_input") for place, datum in enumerate(request.data)
    )
    rows = [reader.datum(datum, place, form) for place, datum in enumerate(request.data)]
    # Rows of about the same length share a micro-batch, and replicas have about the same to do.
    by_length = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids_S))
    order = [place for first in range(replicas) for place in by_length[first::replicas]]
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    ordered = [rows[place] for place in order]
    return Batch(ordered, order, shapes, form.ours, options, request.forward_only)


def figures_of(done: StepMetrics) -> dict[str, float]:
    """By the names that the client wants."""
    means = {f"{name}:mean": value for name, value in done.means.items()}
    return {"loss:sum": done.loss, **means}


def metrics_of(batch: Batch, log_probs: Sequence[Tensor]) -> dict[str, float]:
    """What a backward pass would report, of log-probs alone."""
    objective = Objective.create(batch.loss, batch.options)
    taken = [row.targets != IGNORE for row in batch.rows if row.targets is not None]
    chosen = [found[mask] for found, mask in zip(log_probs, taken, strict=True)]
    values = {
        name: torch.cat(
            [row.values_S[name][mask] for row, mask in zip(batch.rows, taken, strict=True)]
        )
        for name in objective.value_names
    }
    loss_M, report = objective.of_tokens(torch.cat(chosen), None, values)
    means = {f"{name}:mean": float(each.double().mean()) for name, each in report.items()}
    return {"loss:sum": float(loss_M.double().sum()), **means}
