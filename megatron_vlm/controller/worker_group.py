"""WorkerGroup, the calls of a controller, and the split of a batch into one part for each data
parallel replica.

Pixel values go to the first stage alone. The other stages get patches without values ([P, 0]) and
still count them, so that a wrong batch is an error on every rank and not a hang on some ranks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_vlm.data.tensors.tensor_batch import (
    MASK,
    PIXEL_FIELDS,
    TensorBatch,
    Value,
    batch_of,
    row_fields,
)
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import DataError
from megatron_vlm.training.backward import LossCall
from megatron_vlm.training.generate import ROWS
from megatron_vlm.training.losses import LossFunction, Objective, check_divisor
from megatron_vlm.training.optimizer_step import AdamStep
from megatron_vlm.training.worker import StepMetrics

BatchLike = TensorBatch | Sequence[Row]
T = TypeVar("T")
Join = Callable[[list[Any]], T]  # combines the replicas' results, which are in order


@dataclass(frozen=True)
class ReplicaBatch:
    """Part of one replica: all fields without patch values, and the patch values separately."""

    batch: TensorBatch
    pixels: TensorBatch | None
    first_row: int  # number of the part's first row in the whole batch

    def all_fields(self) -> TensorBatch:
        """Return all fields, with the patch values if this rank has them."""
        return self.batch if self.pixels is None else self.batch.with_fields(**self.pixels.fields)


Parts = Sequence[ReplicaBatch] | None
_OF_TARGETS = ("labels", "targets", MASK)


def filled_rows(rows: BatchLike, count: int, value_names: Sequence[str] = ()) -> TensorBatch:
    """Return what a loss reads of rows, with more rows, without images and loss, until `count`
    divides their number."""
    batch = select_fields(rows, (*row_fields(), *value_names))
    if not len(batch):
        raise DataError("there are no rows", place="the batch", remedy="give at least one row")
    return _fill_batch(batch, -len(batch) % count)


def without_labels(rows: BatchLike) -> TensorBatch:
    """Return rows without labels and targets."""
    batch = select_fields(rows, (name for name in row_fields() if name not in _OF_TARGETS))
    labels = TensorList([torch.full_like(ids_S, IGNORE) for ids_S in batch["ids"]])
    return batch.with_fields(labels=labels)


def split_batch(batch: TensorBatch, places: int | Sequence[Sequence[int]]) -> list[ReplicaBatch]:
    """Return a part with the rows at each of these places; for a number, that many parts, as even
    as possible."""
    if isinstance(places, int):
        chunks = batch.chunk(places)
    else:
        chunks = [batch[each] for each in places]
    parts, first_row = [], 0
    for rows in chunks:
        names = [name for name in PIXEL_FIELDS if name in rows]
        bare = {name: TensorList([row[:, :0] for row in _patches(rows[name])]) for name in names}
        pixels = rows.select(names) if names else None
        parts.append(ReplicaBatch(rows.with_fields(**bare), pixels, first_row))
        first_row += len(rows)
    return parts


def select_fields(rows: BatchLike, names: Iterable[str]) -> TensorBatch:
    """Return the named fields. The other fields of a controller's batch are left out."""
    batch = rows if isinstance(rows, TensorBatch) else batch_of(rows)
    if "ids" not in batch:
        raise DataError(
            f"is missing from the fields {', '.join(batch.keys())}", place="the batch", key="ids"
        )
    return batch.select(name for name in dict.fromkeys(names) if name in batch)


def _fill_batch(batch: TensorBatch, missing: int) -> TensorBatch:
    if not missing:
        return batch
    filler = {"ids": torch.zeros(1), "labels": torch.full((1,), IGNORE), MASK: torch.zeros(1)}
    fields = {}
    for name, value in batch.items():
        row = filler.get(name, torch.empty(0)).to(value.dtype)
        fields[name] = TensorList([*value, *[row] * missing])
    return TensorBatch(fields, batch.meta)


def _patches(value: Value) -> list[torch.Tensor]:
    return [row if row.dim() == 2 else row.new_empty(0, 0) for row in value]


class Transport(Protocol):
    """A channel that carries a call to every rank; see torchrun.py and ray_actors.py."""

    dims: ParallelDims

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        """Call a method of every RankWorker. If there are parts, a rank gets its replica's part."""

    def close(self) -> None: ...


class WorkerGroup:
    """N MegatronWorkers that act as one. A batch is that of the whole group: rows, or a
    TensorBatch. Only the fields that a call reads are sent.

    Every method returns a future. The calls of a group run in the order in which they were made,
    whether or not the caller waited for a result.
    """

    def __init__(self, ranks: Transport):
        self.ranks = ranks
        self.dims = ranks.dims

    def forward(self, batch: BatchLike, temperature: float = 1.0) -> Future[list[Tensor]]:
        """Return the log-probs of each row's supervised tokens, as MegatronWorker.forward does."""
        return self._call_by_row(list, "forward", batch, temperature)

    def likeliest(
        self, batch: BatchLike, count: int, temperature: float = 1.0
    ) -> Future[list[Tensor]]:
        """Return the most likely tokens at each position, as MegatronWorker does."""
        return self._call_by_row(list, "likeliest", batch, count, temperature)

    def _call_by_row(
        self, make: Callable[[list[Tensor]], T], method: str, batch: BatchLike, *args: Any
    ) -> Future[T]:
        """Call a method that returns a tensor for each row, and make the result of them."""

        def join(results: list[list[Tensor]]) -> T:
            return make(_concatenate(results)[: len(batch)])

        parts = split_batch(filled_rows(batch, self.dims.dp), self.dims.dp)
        return self.ranks.call(join, method, parts, *args)

    def routing(self, batch: BatchLike) -> Future[TensorList]:
        """Return the experts of each token in each row, as MegatronWorker.routing does. As the
        field `routing` of a batch they route its tokens to the same experts again."""
        return self._call_by_row(TensorList, "routing", batch)

    def forward_backward(
        self,
        batch: BatchLike,
        return_per_token_outputs: bool = False,
        loss: str | LossFunction = "cross_entropy",
        divisor: float | None = None,
        accumulate: bool = False,
        **options: float,
    ) -> Future[StepMetrics]:
        """Compute the gradients of the mean loss over the batch, or of its sum over `divisor`. They
        replace earlier gradients, or with `accumulate` are added to those since the last
        optim_step. The values per token that the loss reads are fields of the batch; see losses.py.
        """
        check_divisor(divisor)
        value_names = Objective.create(loss, options).value_names
        parts = split_batch(filled_rows(batch, self.dims.dp, value_names), self.dims.dp)

        def join(results: list[StepMetrics]) -> StepMetrics:
            if not return_per_token_outputs:
                return results[0]
            log_probs = _concatenate([metrics.log_probs for metrics in results])[: len(batch)]
            return replace(results[0], log_probs=log_probs)

        call = LossCall(return_per_token_outputs, loss, divisor, accumulate, options)
        return self.ranks.call(join, "forward_backward", parts, call)

    def optim_step(
        self, lr: float | None = None, adam: AdamStep | None = None
    ) -> Future[tuple[float, float]]:
        """Clip and apply the gradients. Return the norm before clipping and the learning rate.
        `adam` replaces the configured settings for this step."""
        return self.ranks.call(_first_result, "optim_step", None, lr, adam)

    def sample(
        self,
        prompts: BatchLike,
        settings: SamplingSettings,
        n: int = 1,
        seed: int | Sequence[int] = 0,
        batch_rows: int = ROWS,
    ) -> Future[list[list[Completion]]]:
        """Sample `n` answers to each prompt, as MegatronWorker.sample does. Stop strings are
        searched in the text that the checkpoint's tokenizer decodes.

        With one seed, an answer depends on the seed and on its number in the call, so each call
        needs another seed. With a seed for each prompt, answer k depends on its seed + k alone.
        """
        args = (settings, n, seed, batch_rows)
        parts = split_batch(without_labels(prompts), self.dims.dp)
        return self.ranks.call(_concatenate, "sample", parts, *args)

    def generate(
        self,
        prompts: BatchLike,
        max_new_tokens: int,
        stop_ids: Collection[int],
        batch_rows: int = ROWS,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Future[list[list[int]]]:
        """Generate new tokens for each prompt, as generate.generate does. The other arguments mean
        the same as in `sample`."""
        settings = SamplingSettings(max_new_tokens, temperature, stop_ids=tuple(stop_ids))

        def join(results: list[Any]) -> list[list[int]]:
            return [settings.without_stop(each.ids) for (each,) in _concatenate(results)]

        parts = split_batch(without_labels(prompts), self.dims.dp)
        return self.ranks.call(join, "sample", parts, settings, 1, seed, batch_rows)

    def save(self, folder: str, progress: dict[str, Any] | None = None) -> Future[None]:
        """Write a checkpoint. `progress` is plain JSON, which `load` returns."""
        return self.ranks.call(_first_result, "save", None, str(folder), progress or {})

    def load(self, folder: str) -> Future[dict[str, Any]]:
        """Load a checkpoint of any layout into the workers, and return its `progress`."""
        return self.ranks.call(_first_result, "load", None, str(folder))

    def export(self, folder: str) -> Future[None]:
        """Write a Hugging Face checkpoint."""
        return self.ranks.call(_first_result, "export", None, str(folder))

    def close(self) -> None:
        """End the processes that the group started."""
        self.ranks.close()


def _first_result(results: Sequence[Any]) -> Any:
    return results[0]


def _concatenate(results: Sequence[Any]) -> list[Any]:
    return [row for rows in results for row in rows]
