"""Cache of the models in memory, which holds the models that were used last. The others are
offloaded to disk and are restored as they were. After a crash all models are restored.

On disk a model is a checkpoint that contains the effect of its calls up to some number. The later
calls run again from the journal, in their order.
"""

import gc
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megatron_vlm.config.command_checks import loaded_counts
from megatron_vlm.config.schema import ServeConfig
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import partial_of
from megatron_vlm.serve.failures import catch_error, undo_on_error
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call, SamplingSession
from megatron_vlm.serve.served_models import BASE, ModelCommands, ModelSettings

Redo = Callable[["LoadedModel", Call], None]


@dataclass
class LoadedModel:
    """Model in memory."""

    id: str
    form: ModelSettings
    applied: int  # last call that its weights contain
    saved: int  # last call that its checkpoint contains
    version: int = 0  # version of its weights, counted while the model is in memory
    unsaved_s: float = 0.0  # seconds of work that its checkpoint does not contain

    def record_change(self, seq: int) -> None:
        """Record that this call has changed the weights."""
        self.applied, self.version = seq, self.version + 1


class ModelCache:
    """Cache of loaded models on rank 0. `redo` runs a call of a model again, without a result."""

    def __init__(self, serve: ServeConfig, commands: ModelCommands, journal: Journal, redo: Redo):
        self.max_rank, self.counts = serve.max_rank, loaded_counts(serve)
        self.commands, self.journal, self.redo = commands, journal, redo
        self.models: OrderedDict[str, LoadedModel] = OrderedDict()
        self.snapshots: OrderedDict[str, ModelSettings] = OrderedDict()
        self.fresh: dict[str, tuple[str, int]] = {}  # {folder: (model, version) with these weights}
        self.swap_s = 0.0  # moving average of the seconds that loading into memory takes

    def is_loaded(self, name: str) -> bool:
        """Return whether a model, or the weights in a folder, are in memory."""
        id, version = self.fresh.get(name, (name, None))
        if id in self.models and version in (None, self.models[id].version):
            return True
        return name in self.snapshots or name == "None"  # the base model

    def _record_swap(self, started: float) -> None:
        self.swap_s += 0.3 * (time.monotonic() - started - self.swap_s)

    def new_folder(self, kind: str) -> Path:
        """Return a new path for a checkpoint; a name is never used twice."""
        folder = self.journal.run / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def create(
        self, id: str, form: ModelSettings, source: Path | None = None, moments: bool = True
    ) -> None:
        """Create a model with its initial weights, or with a checkpoint's weights."""
        self._check(form)
        capacity = self.counts["adapters" if form.rank else "full_models"]
        forms = {id: each.form for id, each in self.models.items()}
        for surplus in _oldest_surplus(forms, form, capacity):
            self.offload(surplus)
        folder = None if source is None else str(source)
        self._make(id, form, True, folder, moments)
        self.models[id] = LoadedModel(id, form, 0, 0)

    def _make(
        self, name: str, form: ModelSettings, training: bool, folder: str | None, moments: bool
    ) -> None:
        make, settings = self.commands.models.make, asdict(form)
        self.commands.call(make, name, settings, training, folder, moments)

    def save(self, loaded: LoadedModel, folder: Path, moments: bool) -> None:
        """Save the weights of the model and, with `moments`, the optimizer's moments."""
        self.commands.call(self.commands.models.save, loaded.id, str(folder), moments)

    def _check(self, form: ModelSettings) -> None:
        if form.rank > self.max_rank:
            raise ConfigError(
                f": this service has serve.max_rank={self.max_rank}",
                key="lora_config.rank",
                found=form.rank,
                allowed="at most that",
            )
        if not form.rank and not self.counts["full_models"]:
            raise ConfigError(
                "trains all weights, and this service has serve.loaded={full_models: 0}",
                key="lora_config.rank",
                found=0,
                allowed="a rank above 0",
            )

    def model(self, id: str) -> LoadedModel:
        """Return the model, and restore it from disk if needed."""
        if id not in self.models:
            self._restore(id)
        self.models.move_to_end(id)
        return self.models[id]

    def _restore(self, id: str) -> None:
        started = time.monotonic()
        record = self.journal.model(id)
        assert record is not None and record.state == "ready", f"{id} is not there"
        form = ModelSettings.from_json(record.facts["form"])
        source, moments = record.folder, True
        if source is None:  # no state was saved since the creation
            source, moments = record.source, bool(record.facts.get("moments", True))
        self.create(id, form, source, moments)
        loaded = self.models[id]
        loaded.applied = loaded.saved = record.saved
        # A model must not be used with only some of its calls.
        with undo_on_error(lambda: self.forget(id)):
            for call in self.journal.replay(id):
                self.redo(loaded, call)
        self._record_swap(started)

    def offload(self, id: str) -> None:
        """Save the model to disk, and free its memory."""
        if self._is_wanted(id):
            self.keep(self.models[id])
        self.forget(id)

    def put_away_silent(self) -> None:
        """Offload the models whose clients have gone silent, as scripts do that end without notice.
        Models of a finished session end soon, and are not offloaded."""
        live = self.journal.live_models()
        for id in [id for id in self.models if id not in live]:
            model = self.journal.model(id)
            session = None if model is None else self.journal.session(model.session)
            if session is None or session.finished is None or not self._is_wanted(id):
                self.offload(id)

    def _is_wanted(self, id: str) -> bool:
        """Return whether the client may still use the model."""
        record = self.journal.model(id)
        return record is not None and record.state == "ready"

    def forget(self, id: str) -> None:
        """Free the memory of the model without saving it."""
        if self.models.pop(id, None) is not None:
            self.fresh = {f: entry for f, entry in self.fresh.items() if entry[0] != id}
            self.commands.call(self.commands.models.drop, id)
            gc.collect()  # hooks and modules refer to each other

    def keep(self, loaded: LoadedModel) -> None:
        """Save the state of the model, unless it is saved. The journal has its gradients' calls."""
        if loaded.applied > loaded.saved:
            folder = self.new_folder("states")

            def free_disk_space() -> None:
                for leftover in (folder, partial_of(folder)):
                    shutil.rmtree(leftover, ignore_errors=True)

            with undo_on_error(free_disk_space):
                self.save(loaded, folder, True)
                self.journal.record_saved(loaded.id, loaded.applied, folder)
            loaded.saved = loaded.applied
        loaded.unsaved_s = 0.0

    def keep_all(self) -> None:
        """Save all models before the service stops, except those that cannot be saved."""
        for loaded in self.models.values():
            with catch_error(partial(_report_unsaved, loaded.id)):
                if self._is_wanted(loaded.id):
                    self.keep(loaded)

    def weights(self, sampler: SamplingSession) -> str:
        """Return the ranks' name for the weights that this session samples from."""
        if sampler.folder is None:
            return BASE
        folder = str(sampler.folder)
        id, version = self.fresh.get(folder, ("", 0))
        if id in self.models and self.models[id].version == version:
            return id
        return self.snapshot(sampler)

    def snapshot(self, sampler: SamplingSession) -> str:
        """Load a copy of these weights that is independent of their model, and return its name."""
        folder = str(sampler.folder)
        if folder not in self.snapshots:
            started = time.monotonic()
            form = ModelSettings.from_json(sampler.facts["form"])
            capacity = self.counts["snapshots" if form.rank else "full_snapshots"]
            # Weights with samples in progress are evicted last: these samples would be drawn again.
            in_progress = self.commands.models.decoders
            idle_first = dict(
                sorted(self.snapshots.items(), key=lambda each: each[0] in in_progress)
            )
            for name in _oldest_surplus(idle_first, form, capacity):
                self.snapshots.pop(name)
                self.commands.call(self.commands.models.drop, name)
                gc.collect()
            self._make(folder, form, False, folder, False)
            self.snapshots[folder] = form
            self._record_swap(started)
        self.snapshots.move_to_end(folder)
        return folder

    def delete_orphan_folders(self) -> None:
        """Delete the folders that no row of the journal names, because a call has failed or a
        process has died before. No call runs now, so no folder is still without its row."""
        folders = [
            path for kind in ("states", "weights") for path in (self.journal.run / kind).glob("*")
        ]
        in_journal = self.journal.folders()
        for folder in folders:
            if folder not in in_journal:
                shutil.rmtree(folder, ignore_errors=True)


def _oldest_surplus(
    forms: Mapping[str, ModelSettings], new: ModelSettings, max_count: int
) -> list[str]:
    """Return the names to evict to make room for a new model of this kind, the oldest first."""
    same_kind = [name for name, form in forms.items() if bool(form.rank) == bool(new.rank)]
    return same_kind[: max(0, len(same_kind) - max_count + 1)]


def _report_unsaved(model: str, error: Exception) -> None:
    print_to_user(f"the state of {model} could not be saved; the journal rebuilds it: {error}")
