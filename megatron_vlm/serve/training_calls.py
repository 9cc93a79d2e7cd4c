"""Calls of a model, in their order: gradients, optimizer steps, and saving and loading of
weights."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.config.trainable import Exported
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.distributed.rank0 import run_in_thread
from megatron_vlm.errors import show_value
from megatron_vlm.serve.failures import undo_on_error
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import (
    Call,
    Changes,
    CheckpointKind,
    ModelChange,
    NamedCheckpoint,
    Outcome,
    SamplingSession,
    Saved,
    model_id,
    sampler_id,
    tinker_path,
)
from megatron_vlm.serve.memory_check import check_fits
from megatron_vlm.serve.model_cache import LoadedModel, ModelCache
from megatron_vlm.serve.protocol.answers import write_forward_backward
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.rank_models import ModelCommands, ModelSettings
from megatron_vlm.serve.requests_as_rows import Batch, figures_of, metrics_of
from megatron_vlm.training.optimizer_step import AdamStep

Done = tuple[Outcome, Changes]

# {switch of lora_config: the part of the model that it gives adapters}
_PARTS = {"train_attn": "attention", "train_mlp": "mlp", "train_unembed": "head"}


class ModelCalls:
    """Calls of models on rank 0. Each method runs a call, and returns its result and the changes to
    the journal."""

    def __init__(self, commands: ModelCommands, model_cache: ModelCache, journal: Journal):
        self.commands, self.models = commands, commands.models
        self.model_cache, self.journal = model_cache, journal
        counted = (
            "trained_tokens_total",
            "optimizer_steps_total",
            "passes_of_several_models_total",
        )
        self.gauges = dict.fromkeys(counted, 0.0)

    def create_model(self, call: Call, body: bytes) -> Done:
        form = schemas.CreateModel.model_validate_json(body)
        lora = form.lora_config or schemas.LoraForm(rank=0)
        targets = tuple(part for flag, part in _PARTS.items() if getattr(lora, flag))
        if lora.rank and not targets:
            raise RequestError(
                f": {', '.join(_PARTS)} are all false, so that nothing would learn",
                key="lora_config.rank",
                found=lora.rank,
                remedy="set one of them",
            )
        seed = call.seed if lora.seed is None else lora.seed
        made = ModelSettings(lora.rank, seed % 2**31, targets if lora.rank else ())
        id = model_id(call.owner, form.model_seq_id)
        self.model_cache.create(id, made)
        return self._creation_result(id, "create_model", made)

    def load_model(self, call: Call, body: bytes) -> Done:
        form = schemas.LoadModel.model_validate_json(body)
        id = model_id(call.owner, form.model_seq_id)
        made, folder = self._find_stored(form.path)
        self.model_cache.create(id, made, folder, form.optimizer)
        return self._creation_result(id, "load_weights", made, form.optimizer, path=form.path)

    def _creation_result(
        self, id: str, kind: str, made: ModelSettings, moments: bool = True, **more: str
    ) -> Done:
        facts: dict[str, Any] = {"form": made.as_json(), "moments": moments}
        if made.rank:  # weights_info returns these
            facts |= {flag: part in made.targets for flag, part in _PARTS.items()}
        change = ModelChange(id, state="ready", facts=facts)
        return _json({"model_id": id, "type": kind, **more}), Changes(models=(change,))

    def _find_stored(self, path: str) -> tuple[ModelSettings, Path]:
        checkpoint = self.journal.checkpoint(path)
        if checkpoint is None:
            raise RequestError(
                ": the checkpoint was deleted or has expired", key="path", found=path
            )
        return ModelSettings.from_json(checkpoint.facts["form"]), checkpoint.folder

    def load_weights(self, call: Call, body: bytes) -> Done:
        form = schemas.LoadWeights.model_validate_json(body)
        made, folder = self._find_stored(form.path)
        loaded = self.model_cache.model(call.owner)
        if made.rank != loaded.form.rank or made.targets != loaded.form.targets:
            raise RequestError(
                f"has adapters of {_adapters(made)}, and this model has {_adapters(loaded.form)}",
                key="path",
                found=form.path,
                remedy="load it as a new model",
            )
        with self._undo_on_error(loaded):
            self.commands.call(self.models.load, loaded.id, str(folder), form.optimizer)
            loaded.record_change(call.seq)
            saved = self.model_cache.new_folder("states")
            self.model_cache.save(loaded, saved, True)
        loaded.saved = call.seq
        answer = {"path": form.path, "model_id": call.owner, "type": "load_weights"}
        return _json(answer), Changes(saved=(Saved(call.owner, call.seq, saved),))

    def forward_backward(self, calls: Sequence[tuple[Call, Batch]]) -> list[Done]:
        """Run the forward_backward calls of different models. A forward_only call must be the only
        one."""
        models = [self.model_cache.model(call.owner) for call, _ in calls]
        batches = [batch for _, batch in calls]
        if batches[0].forward_only:
            assert len(batches) == 1
            log_probs = self.commands.call(
                self.models.forward, models[0].id, batch_of(batches[0].rows)
            )
            results = [(log_probs, metrics_of(batches[0], log_probs))]
        else:
            for loaded, batch in zip(models, batches, strict=True):
                self._check_fits(loaded, batch)
            with self._added_or_not(models):
                results = self._gradients(models, batches)
                finished = self._answers(batches, results)
            self.gauges["passes_of_several_models_total"] += len(batches) > 1
            return finished
        return self._answers(batches, results)

    def _check_fits(self, loaded: LoadedModel, batch: Batch) -> None:
        worker = self.models.workers[loaded.id]
        itemsize = worker.chunks[0].config.params_dtype.itemsize
        memory = worker.platform.memory_total()
        check_fits(batch.rows, worker.cfg, worker.source.sizes, worker.dims, itemsize, memory)

    def _added_or_not(self, models: Sequence[LoadedModel]) -> AbstractContextManager[None]:
        """Preserve the gradients if the body raises an error. Models that have received new
        gradients are forgotten, so that they are restored from disk."""
        before = [self.models.backwards_of(each.id) for each in models]

        def forget_changed() -> None:
            for loaded, count in zip(models, before, strict=True):
                if self.models.backwards_of(loaded.id) != count:
                    self.model_cache.forget(loaded.id)

        return undo_on_error(forget_changed)

    def _undo_on_error(self, loaded: LoadedModel) -> AbstractContextManager[None]:
        """Forget the model if the body raises an error, so that no partial change remains. The
        model is then restored from disk."""
        return undo_on_error(lambda: self.model_cache.forget(loaded.id))

    def _answers(
        self,
        batches: Sequence[Batch],
        results: Sequence[tuple[Sequence[Tensor], Mapping[str, float]]],
    ) -> list[Done]:
        return [
            (self._answer(batch, *result), Changes())
            for batch, result in zip(batches, results, strict=True)
        ]

    def _answer(
        self, batch: Batch, log_probs: Sequence[Tensor], metrics: Mapping[str, float]
    ) -> Outcome:
        self.gauges["trained_tokens_total"] += batch.tokens
        outputs = [{"logprobs": each} for each in batch.in_datum_order(log_probs)]
        return Outcome(write_forward_backward(outputs, metrics), "protobuf")

    def _gradients(
        self, models: Sequence[LoadedModel], batches: Sequence[Batch]
    ) -> list[tuple[list[Tensor], dict[str, float]]]:
        """Compute the gradients, and return the log-probs and the metrics of each batch."""
        losses = [
            {"name": loaded.id, "loss": batch.loss, "options": batch.options}
            for loaded, batch in zip(models, batches, strict=True)
        ]
        rows = [batch_of(batch.rows) for batch in batches]
        metrics = self.commands.call(self.models.forward_backward, losses, *rows)
        return [(each.log_probs or [], figures_of(each)) for each in metrics]

    def optim_step(self, call: Call, body: bytes) -> Done:
        loaded = self.model_cache.model(call.owner)
        norm = self._step(loaded, call.seq, schemas.OptimStep.model_validate_json(body).adam_params)
        # JSON has no form for a norm that is not finite.
        metrics = {"grad_norm": norm} if math.isfinite(norm) else {"skipped_not_finite": 1.0}
        steps = self.models.step_of(loaded.id)
        change = ModelChange(call.owner, figures={"steps": steps, **metrics})
        return _json({"metrics": metrics}), Changes(models=(change,))

    def _step(self, loaded: LoadedModel, seq: int, params: schemas.AdamParams) -> float:
        adam = AdamStep(
            params.beta1,
            params.beta2,
            params.eps,
            params.weight_decay,
            max(params.grad_clip_norm, 0.0),
            without_gradients=True,
        )
        with self._undo_on_error(loaded):
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

    def save_weights(self, call: Call, body: bytes) -> Done:
        form = schemas.SaveWeights.model_validate_json(body)
        path = tinker_path(call.owner, "training", form.path)
        if not form.overwrite and self.journal.checkpoint(path) is not None:
            raise RequestError(
                f": {path} exists",
                key="path",
                found=form.path,
                allowed="another name, or overwrite=True",
            )
        loaded = self.model_cache.model(call.owner)
        folder, made = self._write_weights(loaded, "training", form, moments=True)
        loaded.saved, loaded.unsaved_s = loaded.applied, 0.0
        saved = Saved(call.owner, loaded.applied, folder)
        answer = _json({"path": path, "type": "save_weights"})
        return answer, Changes(checkpoints=(made,), saved=(saved,))

    def save_weights_for_sampler(self, call: Call, body: bytes) -> Done:
        form = schemas.SaveWeightsForSampler.model_validate_json(body)
        loaded = self.model_cache.model(call.owner)
        if form.path is not None:
            named = schemas.Named.model_validate_json(body)
            folder, made = self._write_weights(loaded, "sampler", named, moments=False)
            self.model_cache.fresh[str(folder)] = loaded.id, loaded.version
            path = tinker_path(call.owner, "sampler", form.path)
            answer = _json({"path": path, "type": "save_weights_for_sampler"})
            return answer, Changes(checkpoints=(made,))
        model = self.journal.model(call.owner)
        if form.sampling_session_seq_id is None or model is None:
            raise RequestError(
                "is missing",
                key="path",
                allowed="a name, or sampling_session_seq_id for a session",
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
            facts={"form": loaded.form.as_json()},
        )
        answer = _json({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})
        return answer, Changes(samplers=(sampler,))

    def save_weights_external(self, call: Call, body: bytes) -> Done:
        form = schemas.SaveWeightsExternal.model_validate_json(body)
        loaded = self.model_cache.model(call.owner)
        _, made = self._write_weights(loaded, "external", form, moments=False)
        path = tinker_path(call.owner, "external", form.path)
        return _json({"path": path, "type": "save_weights_external"}), Changes(checkpoints=(made,))

    def unload_model(self, call: Call, body: bytes) -> Done:
        id = schemas.ModelIdForm.model_validate_json(body).model_id
        self.model_cache.forget(id)
        change = ModelChange(id, state="unloaded")
        return _json({"model_id": id, "type": "unload_model"}), Changes(models=(change,))

    def _write_weights(
        self, loaded: LoadedModel, kind: CheckpointKind, form: schemas.Named, moments: bool
    ) -> tuple[Path, NamedCheckpoint]:
        """Save the model's weights in a new folder, and return the folder and its checkpoint."""
        folder = self.model_cache.new_folder("weights")
        self.model_cache.save(loaded, folder, moments)
        if kind == "external":
            folder = self._export(folder, loaded.form)
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        expires = None if form.ttl_seconds is None else time.time() + form.ttl_seconds
        facts = {"form": loaded.form.as_json(), "moments": moments}
        return folder, NamedCheckpoint(
            loaded.id, kind, form.path, folder, size, expires, form.user_metadata or {}, facts
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


def _adapters(form: ModelSettings) -> str:
    return f"rank {form.rank} on {show_value(form.targets)}"


def _json(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(json.dumps(answer).encode())
