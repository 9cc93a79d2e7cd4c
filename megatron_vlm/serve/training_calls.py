"""Calls that train models, in the order of each model: gradients and optimizer steps."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import estimate
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.serve.failures import undo_on_error
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.journal.journal_records import Call, Changes, Done, ModelChange, Outcome
from megatron_vlm.serve.loss_names import CROSS_ENTROPY
from megatron_vlm.serve.model_cache import LoadedModel, ModelCache
from megatron_vlm.serve.protocol.answers import write_forward_backward
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.requests_as_rows import Batch, figures_of, metrics_of
from megatron_vlm.serve.served_models import ModelCommands
from megatron_vlm.training.optimizer_step import AdamStep

_GIB = 2**30
# The log-probs of the rows of a batch, and its metrics.
Computed = tuple[Sequence[Tensor], Mapping[str, float]]


class TrainingCalls:
    """Calls on rank 0. Each returns its result and the changes to the journal."""

    def __init__(self, commands: ModelCommands, model_cache: ModelCache):
        self.commands, self.models, self.model_cache = commands, commands.models, model_cache
        self.gauges = {
            "trained_tokens_total": 0.0,
            "optimizer_steps_total": 0.0,
            "passes_of_several_models_total": 0.0,
        }

    def forward_backward(self, calls: Sequence[tuple[Call, Batch]]) -> list[Done]:
        """Run the calls of different models. A call with forward_only must be the only one."""
        models = [self.model_cache.model(call.owner) for call, _ in calls]
        batches = [batch for _, batch in calls]
        if batches[0].forward_only:
            [batch], forward = batches, self.models.forward
            log_probs = self.commands.call(forward, models[0].id, batch_of(batch.rows))
            return [self._answer(batch, (log_probs, metrics_of(batch, log_probs)))]
        for loaded, batch in zip(models, batches, strict=True):
            self._check_fits(loaded, batch)
        before = [self.models.backwards_of(each.id) for each in models]

        def forget_changed() -> None:  # models with new gradients are restored from disk
            for loaded, count in zip(models, before, strict=True):
                if self.models.backwards_of(loaded.id) != count:
                    self.model_cache.forget(loaded.id)

        with undo_on_error(forget_changed):
            computed = self._gradients(models, batches)
            finished = list(map(self._answer, batches, computed))
        self.gauges["passes_of_several_models_total"] += len(batches) > 1
        return finished

    def _check_fits(self, loaded: LoadedModel, batch: Batch) -> None:
        worker = self.models.workers[loaded.id]
        itemsize = worker.chunks[0].config.params_dtype.itemsize
        memory = worker.platform.memory_total()
        check_fits(batch.rows, worker.cfg, worker.source.sizes, worker.dims, itemsize, memory)

    def _gradients(self, models: Sequence[LoadedModel], batches: Sequence[Batch]) -> list[Computed]:
        """Compute the gradients, and return the log-probs and the metrics of each batch."""
        losses = [
            {"name": loaded.id, "loss": batch.loss, "options": batch.options}
            for loaded, batch in zip(models, batches, strict=True)
        ]
        rows = [batch_of(batch.rows) for batch in batches]
        metrics = self.commands.call(self.models.forward_backward, losses, *rows)
        return [(each.log_probs or [], figures_of(each)) for each in metrics]

    def _answer(self, batch: Batch, computed: Computed) -> Done:
        log_probs, metrics = computed
        self.gauges["trained_tokens_total"] += batch.tokens
        outputs = [{"logprobs": each} for each in batch.in_datum_order(log_probs)]
        if batch.loss == CROSS_ENTROPY:
            pairs = zip(batch.rows, log_probs, strict=True)
            losses = [-row.values_S["weights"].reshape(each.shape) * each for row, each in pairs]
            for output, loss in zip(outputs, batch.in_datum_order(losses), strict=True):
                output["elementwise_loss"] = loss
        return Outcome(write_forward_backward(outputs, metrics), "protobuf"), Changes()

    def optim_step(self, call: Call, body: bytes) -> Done:
        loaded = self.model_cache.model(call.owner)
        norm = self._step(loaded, call.seq, schemas.OptimStep.model_validate_json(body).adam_params)
        # JSON has no form for a norm that is not finite.
        metrics = {"grad_norm": norm} if math.isfinite(norm) else {"skipped_not_finite": 1.0}
        steps = self.models.workers[loaded.id].steps
        change = ModelChange(call.owner, figures={"steps": steps, **metrics})
        answer = json.dumps({"metrics": metrics}).encode()
        return Outcome(answer), Changes(models=(change,))

    def _step(self, loaded: LoadedModel, seq: int, params: schemas.AdamParams) -> float:
        adam = AdamStep(
            params.beta1,
            params.beta2,
            params.eps,
            params.weight_decay,
            max(params.grad_clip_norm, 0.0),
            without_gradients=True,
        )
        with undo_on_error(lambda: self.model_cache.forget(loaded.id)):
            norm, _ = self.commands.call(
                self.models.optim_step, loaded.id, params.learning_rate, asdict(adam)
            )
        loaded.record_change(seq)
        self.gauges["optimizer_steps_total"] += 1
        return norm

    def redo(self, loaded: LoadedModel, call: Call, batch: Batch | None, body: bytes) -> None:
        """Repeat a call that was done before the model was offloaded or the service died."""
        if call.kind == "forward_backward":
            assert batch is not None
            self._gradients([loaded], [batch])
        elif call.kind == "optim_step":
            adam_params = schemas.OptimStep.model_validate_json(body).adam_params
            self._step(loaded, call.seq, adam_params)


# The planner's estimate of a forward_backward, before it starts.


def check_fits(
    rows: Sequence[Row],
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    itemsize: int,
    memory: int,
) -> None:
    """Raise RequestError if the rows would not fit into memory even if their model were the only
    one there. The rows are dealt to the replicas, longest first, so the first replica has the
    longest row. `itemsize`: bytes of a weight; `memory`: bytes of a device."""
    local_rows, batch_rows = rows[: -(-len(rows) // dims.dp)], cfg.train.micro_batch_size
    batches = [
        BatchSizes.from_rows([_size(row) for row in local_rows[first : first + batch_rows]])
        for first in range(0, len(local_rows), batch_rows)
    ]
    needed = max(
        stage.total for stage in estimate(ModelLayout(cfg, sizes, dims, itemsize), batches)
    )
    if needed > memory:
        largest = max(batch.padded_tokens for batch in batches)
        raise RequestError(
            f"needs {needed / _GIB:.1f} GiB on a rank for micro-batches of up to {largest} tokens "
            f"({batch_rows} datums, as long as the longest of them), and its device has "
            f"{memory / _GIB:.1f} GiB",
            key="data",
            remedy="send shorter datums, or have the service started with a smaller "
            "train.micro_batch_size, or model.recompute=full",
        )


def _size(row: Row) -> BatchSizes:
    supervised = 0 if row.targets is None else int((row.targets != IGNORE).any(-1).sum())
    pixels, grids = row.pixel_values_PC, row.image_grid_I3
    patches = 0 if pixels is None else len(pixels)
    largest = 0 if grids is None or not len(grids) else int(grids.prod(-1).max())
    return BatchSizes(1, len(row.ids_S), supervised, patches, largest)
