"""Calls that make, load, save and unload models, and those that train them, in the order of each
model: gradients and optimizer steps."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported
from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.rank0 import run_in_thread
from megatron_vlm.errors import show_value
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import estimate
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.serve.failures import undo_on_error
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    Call,
    Changes,
    CheckpointKind,
    Done,
    ModelChange,
    NamedCheckpoint,
    Outcome,
    SamplingSession,
    Saved,
    model_id,
    sampler_id,
    tinker_path,
)
from megatron_vlm.serve.model_cache import LoadedModel, ModelCache
from megatron_vlm.serve.protocol.answers import write_forward_backward
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.requests_as_rows import CROSS_ENTROPY, Batch, figures_of, metrics_of
from megatron_vlm.serve.served_models import ModelCommands, ModelSettings
from megatron_vlm.training.optimizer_step import AdamStep

_GIB = 2**30
# The log-probs of the rows of a batch, and its metrics.
Computed = tuple[Sequence[Tensor], Mapping[str, float]]


class ModelCalls:
    """Calls on rank 0, by the names of their kinds. Each method runs a call, and returns its result
    and the changes to the journal."""

    def __init__(self, commands: ModelCommands, model_cache: ModelCache, journal: Journal):
        self.commands, self.models, self.model_cache = commands, commands.models, model_cache
        self.journal = journal
        self.gauges = {
            "trained_tokens_total": 0.0,
            "optimizer_steps_total": 0.0,
            "passes_of_several_models_total": 0.0,
        }

    def create_model(self, call: Call, form: schemas.CreateModel) -> Done:
        lora = form.lora_config or schemas.LoraForm(rank=0)
        if lora.rank and not lora.targets:
            raise RequestError(
                f": {', '.join(schemas.PARTS)} are all false, so that nothing would learn",
                key="lora_config.rank",
                found=lora.rank,
                remedy="set one of them",
            )
        seed = call.seed if lora.seed is None else lora.seed
        made = ModelSettings(lora.rank, seed % 2**31, lora.targets if lora.rank else ())
        id = model_id(call.owner, form.model_seq_id)
        self.model_cache.create(id, made)
        return self._creation_result(id, "create_model", made)

    def load_model(self, call: Call, form: schemas.LoadModel) -> Done:
        id = model_id(call.owner, form.model_seq_id)
        made, folder = self._find_stored(form.path)
        self.model_cache.create(id, made, folder, form.optimizer)
        return self._creation_result(id, "load_weights", made, form.optimizer, path=form.path)

    def _creation_result(
        self, id: str, kind: str, made: ModelSettings, moments: bool = True, **more: str
    ) -> Done:
        facts: dict[str, Any] = {"form": asdict(made), "moments": moments}
        if made.rank:  # weights_info returns these
            facts |= {flag: part in made.targets for flag, part in schemas.PARTS.items()}
        change = ModelChange(id, state="ready", facts=facts)
        return _json({"model_id": id, "type": kind, **more}), Changes(models=(change,))

    def _find_stored(self, path: str) -> tuple[ModelSettings, Path]:
        checkpoint = self.journal.checkpoint(path)
        if checkpoint is None:
            raise RequestError(
                ": the checkpoint was deleted or has expired", key="path", found=path
            )
        return ModelSettings.from_json(checkpoint.facts["form"]), checkpoint.folder

    def load_weights(self, call: Call, form: schemas.LoadWeights) -> Done:
        made, folder = self._find_stored(form.path)
        loaded = self.model_cache.model(call.owner)
        if replace(made, seed=0) != replace(loaded.form, seed=0):
            raise RequestError(
                f"has adapters of {_adapters(made)}, and this model has {_adapters(loaded.form)}",
                key="path",
                found=form.path,
                remedy="load it as a new model",
            )
        with undo_on_error(lambda: self.model_cache.forget(loaded.id)):
            self.commands.call(self.models.load, loaded.id, str(folder), form.optimizer)
            loaded.record_change(call.seq)
            saved = self.model_cache.new_folder("states")
            self.model_cache.save(loaded, saved, True)
        loaded.saved = call.seq
        answer = {"path": form.path, "model_id": call.owner, "type": "load_weights"}
        return _json(answer), Changes(saved=(Saved(call.owner, call.seq, saved),))

    def save_weights(self, call: Call, form: schemas.SaveWeights) -> Done:
        path = tinker_path(call.owner, "training", form.path)
        if not form.overwrite and self.journal.checkpoint(path) is not None:
            raise RequestError(
                f": {path} exists",
                key="path",
                found=form.path,
                allowed="another name, or overwrite=True",
            )
        loaded = self.model_cache.model(call.owner)
        made = self._write_weights(loaded, "training", form.path, form)
        loaded.saved, loaded.unsaved_s = loaded.applied, 0.0
        saved = Saved(call.owner, loaded.applied, made.folder)
        answer = _json({"path": path, "type": "save_weights"})
        return answer, Changes(checkpoints=(made,), saved=(saved,))

    def save_weights_for_sampler(self, call: Call, form: schemas.SaveWeightsForSampler) -> Done:
        loaded = self.model_cache.model(call.owner)
        if form.path is not None:
            made = self._write_weights(loaded, "sampler", form.path, form)
            self.model_cache.fresh[str(made.folder)] = loaded.id, loaded.version
            answer = _json({"path": made.path, "type": "save_weights_for_sampler"})
            return answer, Changes(checkpoints=(made,))
        model = self.journal.model(call.owner)
        if form.sampling_session_seq_id is None or model is None:
            raise RequestError(
                "is missing", key="path", allowed="a name, or sampling_session_seq_id for a session"
            )
        folder = self.model_cache.new_folder("weights")
        self.model_cache.save(loaded, folder, False)
        self.model_cache.fresh[str(folder)] = loaded.id, loaded.version
        sampler = SamplingSession(
            sampler_id(model.session, form.sampling_session_seq_id),
            model.session,
            model.id,
            model.base_model,
            folder,
            facts={"form": asdict(loaded.form)},
        )
        answer = _json({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})
        return answer, Changes(samplers=(sampler,))

    def save_weights_external(self, call: Call, form: schemas.SaveWeightsExternal) -> Done:
        loaded = self.model_cache.model(call.owner)
        made = self._write_weights(loaded, "external", form.path, form)
        answer = _json({"path": made.path, "type": "save_weights_external"})
        return answer, Changes(checkpoints=(made,))

    def unload_model(self, call: Call, form: schemas.ModelIdForm) -> Done:
        self.model_cache.forget(form.model_id)
        change = ModelChange(form.model_id, state="unloaded")
        return _json({"model_id": form.model_id, "type": "unload_model"}), Changes(models=(change,))

    def _write_weights(
        self, loaded: LoadedModel, kind: CheckpointKind, name: str, form: schemas.SaveForm
    ) -> NamedCheckpoint:
        """Save the model's weights in a new folder, and return its checkpoint."""
        folder, moments = self.model_cache.new_folder("weights"), kind == "training"
        self.model_cache.save(loaded, folder, moments)
        if kind == "external":
            folder = self._export(folder, loaded.form)
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        expires = None if form.ttl_seconds is None else time.time() + form.ttl_seconds
        facts = {"form": asdict(loaded.form), "moments": moments}
        return NamedCheckpoint(
            loaded.id, kind, name, folder, size, expires, form.user_metadata or {}, facts
        )

    def _export(self, folder: Path, made: ModelSettings) -> Path:
        """Replace the checkpoint by an export that other programs can read."""
        out = folder.with_name(f"{folder.name}-export")
        kind: Exported | None = "adapter" if made.rank else None
        try:
            export = partial(export_checkpoint, str(folder), str(out), kind=kind)
            run_in_thread(export, self.commands.wait)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return out

    # -- training, in the order of each model: gradients and optimizer steps

    def forward_backward(self, calls: Sequence[tuple[Call, Batch]]) -> list[Done]:
        """Run the calls of different models. A call with forward_only must be the only one."""
        models = [self.model_cache.model(call.owner) for call, _ in calls]
        batches = [batch for _, batch in calls]
        if batches[0].forward_only:
            [batch], forward = batches, self.models.forward
            log_probs = self.commands.call(forward, models[0].id, batch_of(batch.rows))
            return [self._answer(batch, (log_probs, metrics_of(batch, log_probs)))]
        for loaded, batch in zip(models, batches, strict=True):
            worker = self.models.workers[loaded.id]
            itemsize = worker.chunks[0].config.params_dtype.itemsize
            memory = worker.platform.memory_total()
            check_fits(batch.rows, worker.cfg, worker.source.sizes, worker.dims, itemsize, memory)
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

    def optim_step(self, call: Call, form: schemas.OptimStep) -> Done:
        loaded = self.model_cache.model(call.owner)
        norm = self._step(loaded, call.seq, form.adam_params)
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

    def redo(self, loaded: LoadedModel, call: Call, request: Batch | schemas.OptimStep) -> None:
        """Repeat a call that was done before the model was offloaded or the service died."""
        if isinstance(request, Batch):
            self._gradients([loaded], [request])
        else:
            self._step(loaded, call.seq, request.adam_params)


def _adapters(form: ModelSettings) -> str:
    alpha = "" if form.alpha is None else f" with alpha {form.alpha:g}"
    return f"rank {form.rank} on {show_value(form.targets)}{alpha}{' (rslora)' * form.rslora}"


def _json(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(json.dumps(answer).encode())


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
