"""Calls of one model, in their order: gradients, steps, weights out and in."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.checkpoint.export import export_checkpoint
from megatron_vlm.data.encode.row import IGNORE, Row
from megatron_vlm.service.front import forms
from megatron_vlm.service.journal.calls import model_id, sampler_id
from megatron_vlm.service.journal.journal import Journal
from megatron_vlm.service.journal.values import (
    Call,
    Changes,
    CheckpointKind,
    ModelChange,
    NewCheckpoint,
    NewSampler,
    Outcome,
    Saved,
    tinker_path,
)
from megatron_vlm.service.losses import form_of, options_of
from megatron_vlm.service.models import ModelForm
from megatron_vlm.service.orders import ModelOrders
from megatron_vlm.service.residents import Resident, Residents
from megatron_vlm.service.rows import RowReader
from megatron_vlm.service.wire.answers import write_forward_backward
from megatron_vlm.service.wire.requests import read_forward_backward
from megatron_vlm.service.wire.values import RequestError
from megatron_vlm.step.losses import Objective
from megatron_vlm.step.optimizer import AdamStep

Done = tuple[Outcome, Changes]


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
    rows = [reader.datum(datum, place, form) for place, datum in enumerate(request.data)]
    # Rows of about the same length share a micro-batch, and replicas have about the same to do.
    by_length = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids_S))
    order = [place for first in range(replicas) for place in by_length[first::replicas]]
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    ordered = [rows[place] for place in order]
    return Batch(ordered, order, shapes, form.ours, options, request.forward_only)


class ModelCalls:
    """On rank 0. Each method does a call, and returns its answer and what else has changed."""

    def __init__(self, orders: ModelOrders, residents: Residents, journal: Journal):
        self.orders, self.residents, self.journal = orders, residents, journal
        self.gauges = {"trained_tokens_total": 0.0, "optimizer_steps_total": 0.0}

    def create_model(self, call: Call, body: bytes) -> Done:
        form = forms.CreateModel.model_validate_json(body)
        lora = form.lora_config or forms.LoraForm(rank=0)
        targets = ("attention",) * lora.train_attn + ("mlp",) * lora.train_mlp
        if lora.rank and not targets:
            raise RequestError(
                "lora_config: train_unembed alone is not supported, since the unembedding has no "
                "adapters here; set train_attn or train_mlp"
            )
        seed = call.seed if lora.seed is None else lora.seed
        made = ModelForm(lora.rank, seed % 2**31, targets if lora.rank else ())
        id = model_id(call.owner, form.model_seq_id)
        self.residents.create(id, made)
        return self._created(id, "create_model", made)

    def load_model(self, call: Call, body: bytes) -> Done:
        form = forms.LoadModel.model_validate_json(body)
        id = model_id(call.owner, form.model_seq_id)
        made, folder = self._stored(form.path)
        self.residents.create(id, made, folder, form.optimizer)
        return self._created(id, "load_weights", made, form.optimizer, path=form.path)

    def _created(
        self, id: str, kind: str, made: ModelForm, moments: bool = True, **more: str
    ) -> Done:
        facts: dict[str, Any] = {"form": made.plain(), "moments": moments}
        if made.rank:  # what weights_info tells
            facts |= {"train_attn": "attention" in made.targets, "train_mlp": "mlp" in made.targets}
            facts["train_unembed"] = False
        change = ModelChange(id, state="ready", facts=facts)
        return _json({"model_id": id, "type": kind, **more}), Changes(models=(change,))

    def _stored(self, path: str) -> tuple[ModelForm, Path]:
        found = self.journal.checkpoint(path)
        if found is None:
            raise RequestError(f"path: {path} is not there any more; it was deleted or expired")
        return ModelForm.of(found.facts["form"]), found.folder

    def load_weights(self, call: Call, body: bytes) -> Done:
        form = forms.LoadWeights.model_validate_json(body)
        made, folder = self._stored(form.path)
        resident = self.residents.model(call.owner)
        if made.rank != resident.form.rank or made.targets != resident.form.targets:
            raise RequestError(
                f"path: {form.path} is of a model with rank {made.rank} of {made.targets}, and "
                f"this one has rank {resident.form.rank} of {resident.form.targets}; load it as a "
                "new model"
            )
        self.orders.load(resident.id, str(folder), form.optimizer)
        resident.changed(call.seq)
        saved = self.residents.new_folder("states")
        self.orders.save(resident.id, str(saved), True)
        resident.saved = call.seq
        answer = {"path": form.path, "model_id": call.owner, "type": "load_weights"}
        return _json(answer), Changes(saved=(Saved(call.owner, call.seq, saved),))

    def forward_backward(self, call: Call, batch: Batch) -> Done:
        resident = self.residents.model(call.owner)
        if batch.forward_only:
            log_probs = self.orders.forward(resident.id, batch.rows)
            metrics = metrics_of(batch, log_probs)
        else:
            log_probs, metrics = self._gradients(resident, batch)
        self.gauges["trained_tokens_total"] += batch.tokens
        outputs = [{"logprobs": each} for each in batch.in_order(log_probs)]
        return Outcome(write_forward_backward(outputs, metrics), "protobuf"), Changes()

    def _gradients(self, resident: Resident, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        done = self.orders.forward_backward(resident.id, batch.rows, batch.loss, batch.options)
        assert done.log_probs is not None
        means = {f"{name}:mean": value for name, value in done.means.items()}
        return done.log_probs, {"loss:sum": done.loss, **means}

    def optim_step(self, call: Call, body: bytes) -> Done:
        resident = self.residents.model(call.owner)
        norm = self._step(resident, call.seq, forms.OptimStep.model_validate_json(body).adam_params)
        # A norm that is not finite is no number of JSON's.
        metrics = {"grad_norm": norm} if math.isfinite(norm) else {"skipped_not_finite": 1.0}
        steps = self.orders.models.step_of(resident.id)
        change = ModelChange(call.owner, figures={"steps": steps, **metrics})
        return _json({"metrics": metrics}), Changes(models=(change,))

    def _step(self, resident: Resident, seq: int, asked: forms.AdamParams) -> float:
        adam = AdamStep(
            asked.beta1,
            asked.beta2,
            asked.eps,
            asked.weight_decay,
            max(asked.grad_clip_norm, 0.0),
            without_gradients=True,
        )
        norm, _ = self.orders.optim_step(resident.id, asked.learning_rate, adam)
        resident.changed(seq)
        self.gauges["optimizer_steps_total"] += 1
        return norm

    def redo(self, resident: Resident, call: Call, batch: Batch | None, body: bytes) -> None:
        """A call that was done before the model went to disk, or the service died."""
        if call.kind == "forward_backward":
            assert batch is not None
            self._gradients(resident, batch)
        elif call.kind == "optim_step":
            asked = forms.OptimStep.model_validate_json(body).adam_params
            self._step(resident, call.seq, asked)

    def save_weights(self, call: Call, body: bytes) -> Done:
        form = forms.SaveWeights.model_validate_json(body)
        path = tinker_path(call.owner, "training", form.path)
        if not form.overwrite and self.journal.checkpoint(path) is not None:
            raise RequestError(f"path: {path} is there; give another name, or overwrite=True")
        resident = self.residents.model(call.owner)
        folder, made = self._written(resident, "training", form, moments=True)
        resident.saved, resident.unsaved_s = resident.applied, 0.0
        saved = Saved(call.owner, resident.applied, folder)
        answer = _json({"path": path, "type": "save_weights"})
        return answer, Changes(checkpoints=(made,), saved=(saved,))

    def save_weights_for_sampler(self, call: Call, body: bytes) -> Done:
        form = forms.SaveWeightsForSampler.model_validate_json(body)
        resident = self.residents.model(call.owner)
        if form.path is not None:
            named = forms.Named.model_validate_json(body)
            folder, made = self._written(resident, "sampler", named, moments=False)
            self.residents.fresh[str(folder)] = resident.id, resident.version
            path = tinker_path(call.owner, "sampler", form.path)
            answer = _json({"path": path, "type": "save_weights_for_sampler"})
            return answer, Changes(checkpoints=(made,))
        model = self.journal.model(call.owner)
        if form.sampling_session_seq_id is None or model is None:
            raise RequestError("give path, a name, or sampling_session_seq_id for a session")
        folder = self.residents.new_folder("weights")
        self.orders.save(resident.id, str(folder), False)
        self.residents.fresh[str(folder)] = resident.id, resident.version
        sampler = NewSampler(
            sampler_id(model.session, form.sampling_session_seq_id),
            model.session,
            model.id,
            model.base_model,
            folder,
            facts={"form": resident.form.plain()},
        )
        answer = _json({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})
        return answer, Changes(samplers=(sampler,))

    def save_weights_external(self, call: Call, body: bytes) -> Done:
        form = forms.SaveWeightsExternal.model_validate_json(body)
        resident = self.residents.model(call.owner)
        _, made = self._written(resident, "external", form, moments=False)
        path = tinker_path(call.owner, "external", form.path)
        return _json({"path": path, "type": "save_weights_external"}), Changes(checkpoints=(made,))

    def unload_model(self, call: Call, body: bytes) -> Done:
        id = forms.OfModel.model_validate_json(body).model_id
        self.residents.forget(id)
        change = ModelChange(id, state="unloaded")
        return _json({"model_id": id, "type": "unload_model"}), Changes(models=(change,))

    def _written(
        self, resident: Resident, kind: CheckpointKind, form: forms.Named, moments: bool
    ) -> tuple[Path, NewCheckpoint]:
        """The model's weights in a folder of their own."""
        folder = self.residents.new_folder("weights")
        self.orders.save(resident.id, str(folder), moments)
        if kind == "external":
            out = folder.with_name(f"{folder.name}-export")
            export_checkpoint(str(folder), str(out), kind="adapter" if resident.form.rank else None)
            folder = out
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        expires = None if form.ttl_seconds is None else time.time() + form.ttl_seconds
        facts = {"form": resident.form.plain(), "moments": moments}
        return folder, NewCheckpoint(
            resident.id, kind, form.path, folder, size, expires, form.user_metadata or {}, facts
        )


def _json(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(json.dumps(answer).encode())


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
