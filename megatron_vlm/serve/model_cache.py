"""Which models are in memory: those that were used last. The others wait on disk, and come back as
they were; after a crash so do all.

On disk a model is a checkpoint that holds its calls up to some number; the calls after that are
done once more, in their order, from the journal.
"""

import gc
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.config.schema import ServeConfig
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.process import say
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import partial_of
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call, Model, SamplingSession
from megatron_vlm.serve.model_commands import ModelCommands
from megatron_vlm.serve.rank_models import BASE, ModelForm

Redo = Callable[["LoadedModel", Call], None]


@dataclass
class LoadedModel:
    """A model in memory."""

    id: str
    form: ModelForm
    applied: int  # the last call that its weights hold
    saved: int  # the last that its durable state holds
    version: int = 0  # of its weights, counted while it is in memory
    unsaved_s: float = 0.0  # of work that is not in its durable state

    def changed(self, seq: int) -> None:
        """Its weights are others since this call."""
        self.applied, self.version = seq, self.version + 1


class ModelCache:
    """On rank 0. `redo` does a call of a model again, without an answer."""

    def __init__(self, serve: ServeConfig, orders: ModelCommands, journal: Journal, redo: Redo):
        self.serve, self.orders, self.journal, self.redo = serve, orders, journal, redo
        self.models: OrderedDict[str, LoadedModel] = OrderedDict()
        self.snapshots: OrderedDict[str, ModelForm] = OrderedDict()
        self.fresh: dict[str, tuple[str, int]] = {}  # folder: a model that has these weights
        self.swap_s = 0.0  # that it took lately to bring something into memory

    def has(self, name: str) -> bool:
        """Whether a model, or weights in a folder, are in memory."""
        id, version = self.fresh.get(name, (name, None))
        if id in self.models and version in (None, self.models[id].version):
            return True
        return name in self.snapshots or name == "None"  # the base model

    def _swapped(self, started: float) -> None:
        self.swap_s += 0.3 * (time.monotonic() - started - self.swap_s)

    def new_folder(self, kind: str) -> Path:
        """For a checkpoint; names are never used twice."""
        folder = self.journal.run / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def create(
        self, id: str, form: ModelForm, source: Path | None = None, moments: bool = True
    ) -> None:
        """Make a model as it begins, or as a checkpoint has it."""
        self._check(form)
        self._make_room(form)
        folder = None if source is None else str(source)
        self.orders.make(id, form, True, folder, moments)
        self.models[id] = LoadedModel(id, form, 0, 0)

    def _check(self, form: ModelForm) -> None:
        if form.rank > self.serve.max_rank:
            raise ConfigError(
                f": this service has serve.max_rank={self.serve.max_rank}",
                key="lora_config.rank",
                found=form.rank,
                allowed="at most that",
            )
        if not form.rank and not self.serve.full_models:
            raise ConfigError(
                "trains all weights, and this service has serve.full_models=0",
                key="lora_config.rank",
                found=0,
                allowed="a rank above 0",
            )

    def model(self, id: str) -> LoadedModel:
        """The model, brought back into memory if need be."""
        if id not in self.models:
            self._restore(id)
        self.models.move_to_end(id)
        return self.models[id]

    def _restore(self, id: str) -> None:
        started = time.monotonic()
        found = self.journal.model(id)
        assert found is not None and found.state == "ready", f"{id} is not there"
        form = ModelForm.of(found.facts["form"])
        source, moments = (found.folder, True) if found.folder else _beginning(found)
        self.create(id, form, source, moments)
        resident = self.models[id]
        resident.applied = resident.saved = found.saved
        try:
            for call in self.journal.replay(id):
                self.redo(resident, call)
        except (BrokenError, Stopped):
            raise
        except Exception:
            self.forget(id)  # half of what it was would be worse than nothing
            raise
        self._swapped(started)

    def _make_room(self, form: ModelForm) -> None:
        most = self.serve.adapters if form.rank else self.serve.full_models
        forms = {id: each.form for id, each in self.models.items()}
        for id in _oldest(forms, form, most):
            self.offload(id)

    def offload(self, id: str) -> None:
        """To disk, and out of memory."""
        if self._is_wanted(id):
            self.keep(self.models[id])
        self.forget(id)

    def put_away_silent(self) -> None:
        """To disk with those whose clients have not been heard of: scripts that end without a word
        hold memory no longer than that. Those of a session that was finished end soon, and are not
        written before."""
        live = self.journal.live_models()
        for id in [id for id in self.models if id not in live]:
            model = self.journal.model(id)
            session = None if model is None else self.journal.session(model.session)
            if session is None or session.finished is None or not self._is_wanted(id):
                self.offload(id)

    def _is_wanted(self, id: str) -> bool:
        """Whether its client may still ask for it."""
        found = self.journal.model(id)
        return found is not None and found.state == "ready"

    def forget(self, id: str) -> None:
        """Out of memory, whatever is on disk."""
        if self.models.pop(id, None) is not None:
            self.fresh = {f: which for f, which in self.fresh.items() if which[0] != id}
            self.orders.drop(id)
            gc.collect()  # hooks and modules refer to each other

    def keep(self, resident: LoadedModel) -> None:
        """Make its state durable, unless it is. What its gradients hold stays in the journal."""
        if resident.applied > resident.saved:
            folder = self.new_folder("states")
            try:
                self.orders.save(resident.id, str(folder), True)
                self.journal.saved(resident.id, resident.applied, folder)
            except (BrokenError, Stopped):
                raise
            except Exception:  # the room is needed
                for left in (folder, partial_of(folder)):
                    shutil.rmtree(left, ignore_errors=True)
                raise
            resident.saved = resident.applied
        resident.unsaved_s = 0.0

    def keep_all(self) -> None:
        """The service stops in good order. What cannot be kept is done again from the journal."""
        for resident in self.models.values():
            try:
                if self._is_wanted(resident.id):
                    self.keep(resident)
            except (BrokenError, Stopped):
                raise
            except Exception as error:
                say(f"the state of {resident.id} could not be kept, and is made again: {error}")

    def weights(self, sampler: SamplingSession) -> str:
        """By which name the ranks have what this session samples from."""
        if sampler.folder is None:
            return BASE
        folder = str(sampler.folder)
        id, version = self.fresh.get(folder, ("", 0))
        if id in self.models and self.models[id].version == version:
            return id
        return self.snapshot(sampler)

    def snapshot(self, sampler: SamplingSession) -> str:
        """The same, apart from the model that it was taken of."""
        folder = str(sampler.folder)
        if folder not in self.snapshots:
            started = time.monotonic()
            form = ModelForm.of(sampler.facts["form"])
            most = self.serve.snapshots if form.rank else self.serve.full_snapshots
            # What samples are under way of goes last: they would have to be drawn again.
            under_way = self.orders.models.decoders
            idle_first = dict(sorted(self.snapshots.items(), key=lambda each: each[0] in under_way))
            for name in _oldest(idle_first, form, most):
                self.snapshots.pop(name)
                self.orders.drop(name)
                gc.collect()
            self.orders.make(folder, form, False, folder, False)
            self.snapshots[folder] = form
            self._swapped(started)
        self.snapshots.move_to_end(folder)
        return folder

    def delete_orphan_folders(self) -> None:
        """Folders that no row of the journal names: a call has failed, or a process has died,
        before there was one. Whatever this process writes is in the journal by now, since its calls
        are done one after the other."""
        there = [
            path for kind in ("states", "weights") for path in (self.journal.run / kind).glob("*")
        ]
        known = self.journal.folders()
        for folder in there:
            if folder not in known:
                shutil.rmtree(folder, ignore_errors=True)


def _beginning(model: Model) -> tuple[Path | None, bool]:
    """What a model without durable state begins with, and whether with the optimizer's moments."""
    return model.source, bool(model.facts.get("moments", True))


def _oldest(forms: Mapping[str, ModelForm], new: ModelForm, most: int) -> list[str]:
    """Those that have to go before there is room for a new one of its kind; the oldest first."""
    alike = [name for name, form in forms.items() if bool(form.rank) == bool(new.rank)]
    return alike[: max(0, len(alike) - most + 1)]
