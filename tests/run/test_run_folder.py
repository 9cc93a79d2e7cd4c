# .venv/bin/python -m pytest tests/run/test_run_folder.py
"""Ordinary sequences of commands on one run folder. test_sequences.py plays random ones."""

import fcntl
import json
import os
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.cli import main
from megatron_vlm.config import Config, load_config
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.io.atomic import MARK
from megatron_vlm.run.run_folder import held_folder
from tests.run.test_sequences import SMALLEST
from tests.run.test_train import command, go_pooled, run_rank, steps_of
from tests.support.sets import write_set
from tests.support.suites import full

FOLDERS = ("export", "merged", "checkpoints", "predictions", "tensorboard", "profile", "stacks")
SMALL = ("parallel.pp=1", "train.global_batch_size=2")


class Folder:
    def __init__(self, root: Path, pool, model: str):
        self.root, self.pool, self.model = root, pool, model
        self.run = root / "run"
        self.checkpoints = self.run / "checkpoints"

    def train(self, steps: int, *more: str, status: int = 0, **keys: object) -> str:
        """Train and return the output. In the names of keys, __ replaces the dot."""
        words = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
        last = (*SMALL, f"train.steps={steps}", *more, *words)
        done, out, err = go_pooled(self.pool, 1, self.root, self.model, "run", *last)
        assert done == status, err
        return out + err

    def names(self) -> list[str]:
        return sorted(path.name.removeprefix("step-000000") for path in self.checkpoints.iterdir())

    def flip(self, step: int) -> None:
        path = self.step(step) / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def step(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def exported(self) -> tuple[int, str]:
        mark = json.loads((self.run / "export" / MARK).read_text())
        return mark["step"], mark["checkpoint"]

    def check_export(self, step: int) -> None:
        """Check that the export names this step and equals the command's export of it."""
        assert self.exported()[0] == step
        reference = self.root / f"export-of-{step}"
        shutil.rmtree(reference, ignore_errors=True)
        export_checkpoint(str(self.step(step)), str(reference))
        actual = {path.name: path.read_bytes() for path in (self.run / "export").iterdir()}
        assert actual == {path.name: path.read_bytes() for path in reference.iterdir()}


@pytest.fixture
def folder(tmp_path, pool, tiny):
    write_set(tmp_path)
    return Folder(tmp_path, pool, tiny(**SMALLEST))


def test_an_export_is_of_the_last_checkpoint(folder):
    folder.train(3)
    folder.check_export(3)
    modes = {path.stat().st_mode for path in (folder.run / "export").iterdir()}
    assert len(modes) == 1  # safetensors alone would hide its files from other users
    assert "export still holds step 3" in folder.train(6, checkpoint__export="false")
    assert folder.exported()[0] == 3
    output = folder.train(6)
    assert "nothing was left to train: 6 steps are done" in output and "exported step 6" in output
    folder.check_export(6)
    assert "export already holds step 6" in folder.train(6)
    # An export that has lost a file is written again.
    (folder.run / "export" / "config.json").unlink()
    folder.train(6)
    folder.check_export(6)
    assert "6 steps are done, more than the 3 asked for" in folder.train(3)
    folder.check_export(6)
    # A run in another folder with no steps left exports the checkpoint that it starts from.
    folder.run = folder.root / "other"
    folder.train(3, f"run={folder.run}", checkpoint__resume=folder.step(3))
    assert folder.exported()[0] == 3 and not (folder.run / "checkpoints").exists()


@pytest.mark.full
def test_a_damaged_export_is_not_current(folder):
    folder.train(3)
    weights, mark = (folder.run / "export" / name for name in ("model.safetensors", MARK))
    before = weights.read_bytes()
    # A later copy counts as unchanged.
    shutil.copytree(folder.run / "export", folder.root / "copy")
    (folder.root / "copy").rename(folder.run / "export.copy")
    shutil.rmtree(folder.run / "export")
    (folder.run / "export.copy").rename(folder.run / "export")
    assert "export already holds step 3" in folder.train(3)
    damaged = bytearray(before)
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    # By the times of the files, somebody has written to it.
    assert re.search(r"run/export: .* model\.safetensors ", folder.train(3, status=2))
    assert weights.read_bytes() == damaged
    # By the times of the files nobody has, so the disk must have damaged it.
    while mark.stat().st_ctime_ns <= weights.stat().st_ctime_ns:
        os.utime(mark)
    assert "export/model.safetensors has changed since it was written" in folder.train(3)
    assert weights.read_bytes() == before
    folder.check_export(3)


@pytest.mark.full
def test_damage_to_all_checkpoints_costs_no_new_ones(folder):
    folder.train(6)
    for step in (3, 6):
        folder.flip(step)
    output = folder.train(9, "checkpoint.every=1", checkpoint__keep_last=3)
    assert "can be used: starting anew" in output
    assert [line["step"] for line in steps_of(folder.run)[6:]] == list(range(1, 10))
    assert folder.names() == ["03.aside1", "06.aside1", "07", "08", "09"]
    folder.check_export(9)
    assert "resumed from" in folder.train(10) and folder.exported()[0] == 10


@pytest.mark.full
def test_a_line_that_was_left_is_not_gone_on_from(folder):
    folder.train(9, checkpoint__keep_last=5)
    lr, start = "optim.lr=1e-5", folder.step(3)  # a line with other weights
    output = folder.train(6, lr, checkpoint__resume=start)
    assert f"step-00000006, step-00000009 in {folder.checkpoints}: of another line" in output
    assert folder.names() == ["03", "06", "06.aside1", "09"]
    folder.check_export(6)
    output = folder.train(9, lr)
    assert f"resumed from {folder.step(6)}" in output
    assert folder.names() == ["06", "06.aside1", "09", "09.aside1"]
    folder.check_export(9)
    # If the newest is damaged, the run resumes from the one before it in the same line.
    folder.flip(9)
    output = folder.train(12, lr)
    assert f"resumed from {folder.step(6)}" in output and "step-00000009" in output
    folder.check_export(12)


def restarted(*args: object) -> tuple[int, str, str]:
    os.environ["MEGATRON_VLM_RESTART"] = "1"
    try:
        return run_rank(*args)
    finally:
        del os.environ["MEGATRON_VLM_RESTART"]


@pytest.mark.full
def test_a_restart_does_not_go_on_from_what_the_job_left(folder):
    """The job, which resumes from step 3, fails before its first save and is restarted."""
    folder.train(9, checkpoint__keep_last=5)
    words = command(folder.root, folder.model, "run", *SMALL, "train.steps=6")[4:]
    words.append(f"checkpoint.resume={folder.step(3)}")
    failing = [*words, "optim.lr=3e38", "train.max_nonfinite=0"]
    [(status, _, err)] = folder.pool.run(run_rank, 1, failing)
    assert status == 2 and "not applied" in err
    [(status, out, err)] = folder.pool.run(restarted, 1, words)
    assert status == 0 and f"resumed from {folder.step(3)}" in out, err
    # A checkpoint that the job itself saved is resumed from.
    [(status, out, err)] = folder.pool.run(restarted, 1, words)
    assert status == 0 and f"resumed from {folder.step(6)}" in out, err
    assert folder.names() == ["03", "06", "06.aside1", "09"]


@pytest.mark.full
def test_the_best_is_known_where_it_is_the_last_step(folder):
    keys = {"data__eval": folder.root / "train.jsonl", "checkpoint__best": "train/loss"}
    folder.train(3, checkpoint__keep_last=1, **keys)
    assert best(folder.step(3))["best_step"] == 3
    folder.train(9, checkpoint__keep_last=1, optim__lr=30, **keys)  # the loss gets worse
    assert folder.names() == ["03", "09"]
    assert best(folder.step(9)) == best(folder.step(3))
    # The best step by another score does not count.
    folder.train(12, checkpoint__keep_last=1, **keys | {"checkpoint__best": "train/token_accuracy"})
    assert best(folder.step(12))["best_of"] == "train/token_accuracy"
    assert best(folder.step(12))["best_step"] == 12


def best(checkpoint: Path) -> dict:
    progress = json.loads((checkpoint / "state.json").read_text())["progress"]
    return {key: value for key, value in progress.items() if key.startswith("best")}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("run/export/thesis.txt", "export: is not empty"),
        ("run/export.partial/thesis.txt", "export.partial: is in the way"),
        ("run/checkpoints/step-00000003.partial/thesis.txt", "00003.partial: is in the way"),
        ("run/config.yaml", "/run is not the folder of a run, and has config.yaml"),
        ("run/samples.jsonl", "/run is not the folder of a run, and has samples.jsonl"),
        ("run/predictions/eval.jsonl", "/run is not the folder of a run, and has predictions"),
    ],
)
def test_what_is_in_the_way_is_refused_before_the_first_step(theirs, words, folder):
    path = folder.root / theirs
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    assert words in folder.train(3, status=2)
    assert path.read_text() == "years of work" and not (folder.run / "metrics.jsonl").exists()


def all_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the names below a folder, and of files the time and the content."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else (0, b"")
        for path in sorted(folder.rglob("*"))
    }


REFUSALS = {
    "lora=default lora.rank=2": "has none",  # by the checkpoint, after the model and the data
    "data.eval={root}/wrong.jsonl": "wrong.jsonl",
    "checkpoint.resume=never train.steps=3": "has checkpoints of an earlier one",
    "optim=muon": "keeps other states",
    'data.add_tokens=["<new>"]': "is not the [] of the checkpoint",
    "data.train={root}/other.jsonl": "was trained on other data",
    "data.train={root}/wrong.jsonl": "wrong.jsonl",
    "model.path={root}/unlike": "safetensors",
    "checkpoint.resume={root}": "complete",
}


@pytest.mark.parametrize("cases", [slice(3), full(slice(3, None))], ids=["few", "rest"])
def test_a_refused_start_changes_nothing(cases, folder, capfd):
    """job.lock, too, is that of the last job that began. A dry run says the same, except about
    weights, which it does not need."""
    folder.train(3)
    wrong, unlike = folder.root / "wrong.jsonl", folder.root / "unlike"
    wrong.write_text('{"messages": 1}\n')
    records = (folder.root / "train.jsonl").read_text()
    (folder.root / "other.jsonl").write_text(records.replace("word", "Word"))
    shutil.copytree(folder.model, unlike, ignore=shutil.ignore_patterns("*.safetensors"))
    before = all_of(folder.run)
    for words, said in list(REFUSALS.items())[cases]:
        more = words.format(root=folder.root).split()
        assert said in folder.train(5, *more, status=2), words
        assert all_of(folder.run) == before, words
        if said != "safetensors":
            dry = command(folder.root, folder.model, "run", *SMALL, "train.steps=5", *more)
            assert main([*dry[3:], "--dry-run"]) == 2 and said in capfd.readouterr().err, words
            assert all_of(folder.run) == before, words
    new = (f"run={folder.root / 'new' / 'run'}", f"data.eval={wrong}")
    assert "wrong.jsonl" in folder.train(3, *new, status=2)
    assert not (folder.root / "new").exists()


@pytest.fixture(scope="module")
def writing_all() -> Config:
    words = [
        "model=tiny_cpu",
        "lora=default",
        "checkpoint.export=both",
        "log.trackers=[tensorboard]",
    ]
    return load_config([*words, "data.eval={held: x.jsonl}", "model.path=base"])


@pytest.mark.rotate(30)
@pytest.mark.parametrize("kind", ["link to nothing", "file", "folder", "pipe", "loop"])
@pytest.mark.parametrize(
    "name",
    [
        *("export", "export.partial", "merged", "merged.partial", "checkpoints"),
        *("checkpoints/step-00000003.partial", "predictions", "predictions/held.jsonl"),
        *("config.yaml", "config.yaml.new", "metrics.jsonl", "samples.jsonl", "examples.json"),
        *("report.html", "megatron_vlm.json.new", "job.lock", "tensorboard", "profile"),
        "stacks",
    ],
)
def test_a_run_can_write_every_path_before_its_first_step(name, kind, writing_all, tmp_path):
    cfg = replace(writing_all, run=str(tmp_path))
    with held_folder(cfg) as run:
        run.begin(cfg)
    path = tmp_path / name
    is_folder = name in FOLDERS or name.endswith(".partial")
    if kind == ("folder" if is_folder else "file"):
        return
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    put = {
        "link to nothing": lambda: path.symlink_to("nowhere/at/all"),
        "loop": lambda: path.symlink_to(path.name),
        "file": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }
    put[kind]()
    before = path.lstat()
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(name)), held_folder(cfg):
        pass
    assert path.lstat() == before


@pytest.mark.full
def test_what_others_put_into_a_run_stays(folder):
    """Foreign files next to the written ones are ignored; a change inside an export is refused."""
    paths = ["notes.txt", "checkpoints/notes.partial/note", "checkpoints/step-00000003/note"]
    folder.train(3, checkpoint__keep_last=1)
    for name in paths:
        (folder.run / name).parent.mkdir(exist_ok=True)
        (folder.run / name).write_text(name)
    folder.train(9, checkpoint__keep_last=1)
    assert folder.names() == ["03", "09", "notes.partial"]
    assert [(folder.run / name).read_text() for name in paths] == paths
    edited = folder.run / "export" / "config.json"
    former = edited.read_text()
    for text in (former.replace("0", "1", 1), former + " "):  # the same size, then another
        edited.write_text(text)
        assert re.search(r"run/export: .* config\.json ", folder.train(12, status=2))
        assert edited.read_text() == text
    folder.train(12, checkpoint__export="false")
    assert edited.read_text().endswith(" ")
    # Neither an export nor a checkpoint is the folder of a run, although each has a mark.
    output = folder.train(3, f"run={folder.step(9)}", status=2)
    assert f"run={folder.step(9)} is not the folder of a run, and has config.yaml" in output


def test_one_job_at_a_time(folder):
    folder.train(3)
    first = (folder.run / "job.lock").read_text().split()[1]
    before = (folder.run / "config.yaml").read_text()
    with open(folder.run / "job.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output = folder.train(4, status=2)
    assert f"is being written by another job (process {first} on {socket.gethostname()}" in output
    assert (folder.run / "config.yaml").read_text() == before
    folder.train(4)


def test_a_crash_while_exporting_leaves_the_former_one(folder):
    """The next start removes the incomplete new export."""
    folder.train(3)
    partial = folder.run / "export.partial"
    shutil.copytree(folder.run / "export", partial)
    folder.check_export(3)
    weights = load_file(folder.run / "export" / "model.safetensors")
    folder.train(6)
    folder.check_export(6)
    assert not partial.exists()
    moved = load_file(folder.run / "export" / "model.safetensors")
    assert not any(torch.equal(moved[name], weights[name]) for name in weights)


@pytest.mark.full
def test_what_a_crash_has_left_goes_at_the_next_start(folder):
    """Partial folders are removed even if that start does not write an export or checkpoint."""
    folder.train(3)
    partials = [folder.run / "export.partial", folder.checkpoints / "step-00000009.partial"]
    for partial in partials:
        shutil.copytree(folder.run / "export", partial)
    folder.train(3, checkpoint__export="false")
    assert not any(partial.exists() for partial in partials)
