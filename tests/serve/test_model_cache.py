# .venv/bin/python -m pytest tests/serve/test_model_cache.py
"""Models in memory and folders on disk, with ranks that only write folders."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron_vlm.config.command_checks import LOADED, loaded_counts
from megatron_vlm.config.schema import ServeConfig
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import TRAINING, Call, Changes, ModelChange
from megatron_vlm.serve.model_cache import ModelCache
from megatron_vlm.serve.model_calls import ModelCalls
from megatron_vlm.serve.served_models import ModelSettings
from tests.serve.test_journal import DONE, a_model, a_step, pass_time
from tests.support.error_fields import raises
from tests.support.fake_calls import opened

FORM = ModelSettings(2, 0)


@dataclass
class Ranks:
    """Ranks that record the models in their memory, and write folders."""

    there: list[str] = field(default_factory=list)
    full: bool = False

    @property
    def models(self) -> "Ranks":
        return self

    def call(self, method: Callable[..., None], *arguments: object) -> None:
        method(*arguments)

    def make(self, name: str, *_: object) -> None:
        self.there.append(name)

    def drop(self, name: str) -> None:
        self.there.remove(name)

    def save(self, name: str, folder: str, moments: bool) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "state.json").write_text("{}")
        if self.full:
            raise CheckpointError(f"{folder}: No space left on device")

    def wait(self) -> None:
        pass


def residents_of(journal: Journal, ranks: Ranks) -> ModelCache:
    return ModelCache(ServeConfig(), ranks, journal, lambda resident, call: None)  # type: ignore[arg-type]


def in_memory(journal: Journal, model_cache: ModelCache) -> tuple[str, str]:
    """Return a session, and a model of it that has done a step."""
    session, model = a_model(journal)
    call = journal.accept(a_step(model, 1)).request_id
    facts = ModelChange(model, facts={"form": asdict(FORM)})
    journal.finish(call, DONE, Changes(models=(facts,)))
    model_cache.create(model, FORM)
    model_cache.models[model].record_change(1)
    return session, model


def states(journal: Journal) -> set[Path]:
    return {path for kind in ("states", "weights") for path in (journal.run / kind).glob("*")}


def test_models_of_silent_clients_wait_on_disk(tmp_path):
    with opened(tmp_path) as journal:
        model_cache = residents_of(journal, ranks := Ranks())
        _, silent = in_memory(journal, model_cache)
        session, here = in_memory(journal, model_cache)
        gone, unloaded = in_memory(journal, model_cache)
        closed, ending = in_memory(journal, model_cache)
        pass_time(journal, 1000)
        journal.touch_session(session)
        for finished in (gone, closed):
            journal.finish_session(finished, "success")
        journal.sweep()
        with journal._store.write() as db:
            db.execute("UPDATE models SET state = 'unloaded' WHERE id = ?", (unloaded,))
        model_cache.put_away_silent()
        # A model whose client has finished ends soon, so it is not written first.
        assert ranks.there == [here, ending] and list(model_cache.models) == [here, ending]
        saved = journal.model(silent)
        assert saved.saved == 1 and states(journal) == {saved.folder}
        assert model_cache.model(silent).applied == 1 and ranks.there == [here, ending, silent]
        ranks.full = True  # a full disk loses nothing, as the model stays in memory
        model_cache.models[silent].record_change(2)
        with pytest.raises(CheckpointError):
            model_cache.put_away_silent()
        assert list(model_cache.models) == [here, ending, silent]


def test_counts_of_models_in_memory_are_defaults_with_changes():
    assert loaded_counts(ServeConfig(loaded={"full_models": 0})) == LOADED | {"full_models": 0}
    for loaded, key in (
        ({"adapter": 1}, "serve.loaded.adapter"),
        ({"adapters": 0}, "serve.loaded.adapters"),
        ({"snapshots": 1.5}, "serve.loaded.snapshots"),
        (3, "serve.loaded"),
    ):
        with raises(ConfigError, key=key):
            loaded_counts(ServeConfig(loaded=loaded))  # type: ignore[arg-type]


def test_folders_that_no_row_names_are_removed(tmp_path):
    with opened(tmp_path) as journal:
        model_cache = residents_of(journal, ranks := Ranks())
        _, model = in_memory(journal, model_cache)
        model_cache.keep(model_cache.models[model])
        kept_folder = journal.model(model).folder
        for orphan in ("states/a", "weights/b", "weights/c.partial"):
            (journal.run / orphan / "inner").mkdir(parents=True)
        ranks.full = True
        model_cache.models[model].record_change(2)
        with pytest.raises(CheckpointError):
            model_cache.keep(model_cache.models[model])
        assert len(states(journal)) == 4  # a save that fails leaves no folder
        model_cache.delete_orphan_folders()
        assert states(journal) == {kept_folder}
        # A folder that a row releases stays for a while, because a download may be in progress.
        ranks.full = False
        model_cache.keep(model_cache.models[model])
        model_cache.delete_orphan_folders()
        assert states(journal) == {kept_folder, journal.model(model).folder}


def test_a_download_leaves_nothing_else_behind(tmp_path, monkeypatch):
    def export(folder: str, out: str, *_: object, **__: object) -> None:
        assert (Path(folder) / "state.json").is_file()
        Path(out).mkdir()
        (Path(out) / "adapter_model.safetensors").write_bytes(b"w")

    monkeypatch.setattr("megatron_vlm.serve.model_calls.export_checkpoint", export)
    with opened(tmp_path) as journal:
        model_cache = residents_of(journal, ranks := Ranks())
        _, model = in_memory(journal, model_cache)
        calls = ModelCalls(ranks, model_cache, journal)  # type: ignore[arg-type]
        form = schemas.SaveWeightsExternal(model_id=model, seq_id=2, path="out")
        body = form.model_dump_json().encode()
        promise = journal.accept(Call("save_weights_external", model, 2, "k", body))
        (call,) = journal.next_calls()
        journal.finish(promise.request_id, *calls.save_weights_external(call, form))
        (made,) = journal.checkpoints()
        assert states(journal) == {made.folder}


def test_a_call_is_run_by_the_method_of_its_name_which_takes_its_form():
    for name, (form, _) in schemas.CALL_FORMS.items():
        assert get_type_hints(getattr(ModelCalls, name))["form"] is form
    forms = {name: form for name, (form, _) in schemas.CALL_FORMS.items()}
    ordered = {name for name in forms if issubclass(forms[name], schemas.OrderedForm)}
    assert {*TRAINING} == {"forward_backward", *ordered}
