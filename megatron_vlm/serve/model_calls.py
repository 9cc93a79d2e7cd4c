"""Calls that make, load, save and unload models."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.config.trainable import Exported
from megatron_vlm.distributed.rank0 import run_in_thread
from megatron_vlm.errors import show_value
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
from megatron_vlm.serve.protocol.payloads import RequestError
from megatron_vlm.serve.served_models import ModelCommands, ModelSettings


class ModelCalls:
    """Calls on rank 0, by the names of their kinds. Each method runs a call, and returns its result
    and the changes to the journal."""

    def __init__(self, commands: ModelCommands, model_cache: ModelCache, journal: Journal):
        self.commands, self.model_cache, self.journal = commands, model_cache, journal

    def create_model(self, call: Call, body: bytes) -> Done:
        form = schemas.CreateModel.model_validate_json(body)
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

    def load_weights(self, call: Call, body: bytes) -> Done:
        form = schemas.LoadWeights.model_validate_json(body)
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
            self.commands.call(self.commands.models.load, loaded.id, str(folder), form.optimizer)
            loaded.record_change(call.seq)
            saved = self.model_cache.new_folder("states")
            self.model_cache.save(loaded, saved, True)
        loaded.saved = call.seq
        answer = {"path": form.path, "model_id": call.owner, "type": "load_weights"}
        return _json(answer), Changes(saved=(Saved(call.owner, call.seq, saved),))

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
        made = self._write_weights(loaded, "training", form.path, form)
        loaded.saved, loaded.unsaved_s = loaded.applied, 0.0
        saved = Saved(call.owner, loaded.applied, made.folder)
        answer = _json({"path": path, "type": "save_weights"})
        return answer, Changes(checkpoints=(made,), saved=(saved,))

    def save_weights_for_sampler(self, call: Call, body: bytes) -> Done:
        form = schemas.SaveWeightsForSampler.model_validate_json(body)
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
            facts={"form": loaded.form.as_json()},
        )
        answer = _json({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})
        return answer, Changes(samplers=(sampler,))

    def save_weights_external(self, call: Call, body: bytes) -> Done:
        form = schemas.SaveWeightsExternal.model_validate_json(body)
        loaded = self.model_cache.model(call.owner)
        made = self._write_weights(loaded, "external", form.path, form)
        answer = _json({"path": made.path, "type": "save_weights_external"})
        return answer, Changes(checkpoints=(made,))

    def unload_model(self, call: Call, body: bytes) -> Done:
        id = schemas.ModelIdForm.model_validate_json(body).model_id
        self.model_cache.forget(id)
        change = ModelChange(id, state="unloaded")
        return _json({"model_id": id, "type": "unload_model"}), Changes(models=(change,))

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
        facts = {"form": loaded.form.as_json(), "moments": moments}
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


def _adapters(form: ModelSettings) -> str:
    alpha = "" if form.alpha is None else f" with alpha {form.alpha:g}"
    return f"rank {form.rank} on {show_value(form.targets)}{alpha}{' (rslora)' * form.rslora}"


def _json(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(json.dumps(answer).encode())
