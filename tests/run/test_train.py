# .venv/bin/python -m pytest tests/run/test_train.py
"""Whole runs as a user starts them: files in, checkpoints, resume, signals, an export out."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm.cli import main
from megatron_vlm.config import load_config
from megatron_vlm.distributed.agreement import Signals
from megatron_vlm.distributed.process import run_guarded
from megatron_vlm.run import progress
from megatron_vlm.run.run_folder import check_unnamed
from megatron_vlm.train import run_train
from tests.support.chats import picture, say, text
from tests.support.sets import write_set

pytestmark = pytest.mark.newest  # it depends on the versions

STEPS = 6


def command(folder: Path, model: str, run: str, *overrides: str) -> list[str]:
    """Two steps an epoch are not enough for the set: the run crosses the end of one."""
    keys = {
        "model": "tiny_cpu",
        "model.path": model,
        "model.recompute_vision": "true",  # as the recipes of released models
        "data.train": folder / "train.jsonl",
        "data.cache_dir": folder / "cache",
        "data.num_workers": 0,
        "run": folder / run,
        "parallel.pp": 2,
        "train.steps": STEPS,
        "train.global_batch_size": 7,
        "train.micro_batch_tokens": 400,
        "checkpoint.every": 3,
        "launch.timeout_minutes": 2,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "megatron_vlm.cli", "train", *words, *overrides]


def go(*args: str) -> subprocess.CompletedProcess:
    how = dict(capture_output=True, text=True, timeout=280, env=outside_of_jobs())
    return subprocess.run(command(*args), **how)


def outside_of_jobs() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def run_rank(words: list[str]) -> tuple[int, str, str]:
    """The same in a process that has imported all there is: what one rank does and says."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = run_guarded(run_train, words)
    return status, out.getvalue(), err.getvalue()


def go_pooled(pool, world: int, *args: str) -> tuple[int, str, str]:
    """Rank 0's status and words."""
    answers = pool.run(run_rank, world, command(*args)[4:])
    assert len({status for status, _, _ in answers}) == 1
    assert all(out == "" for _, out, _ in answers[1:])  # the others are quiet
    return answers[0]


def steps_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def values(steps: list[dict]) -> list[tuple]:
    return [(s["step"], s["loss"], s["grad_norm"], s["lr"], s["epoch"]) for s in steps]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_set(folder)
    done = go(folder, tiny(), "whole")
    assert (done.returncode, done.stderr) == (0, "")  # libraries warn of nothing
    return folder, done.stdout


def test_a_run_says_what_it_does(whole):
    folder, out = whole
    assert "The vision tower sits on stage 0" in out
    assert f"step {STEPS}/{STEPS}  loss " in out and f"exported step {STEPS} to" in out
    steps = steps_of(folder / "whole")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [step["epoch"] for step in steps] == [0, 0, 0, 1, 1, 1]
    start = json.loads((folder / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["samples"] == 23 and start["layout"] == {"tp": 1, "pp": 2, "dp": 1}
    assert "global_batch_size: 7" in (folder / "whole" / "config.yaml").read_text()


def test_the_export_loads_in_transformers(whole, tiny):
    folder, _ = whole
    tuned = Qwen3VLForConditionalGeneration.from_pretrained(folder / "whole" / "export")
    base = Qwen3VLForConditionalGeneration.from_pretrained(tiny())
    moved = [
        not torch.equal(a, b)
        for a, b in zip(tuned.state_dict().values(), base.state_dict().values(), strict=True)
    ]
    assert all(moved)


def test_resume_is_exact(whole, tiny, pool):
    """From the checkpoint in the middle: every digit, and every byte of the export."""
    folder, _ = whole
    (folder / "resumed" / "checkpoints").mkdir(parents=True)
    shutil.copytree(
        folder / "whole" / "checkpoints" / "step-00000003",
        folder / "resumed" / "checkpoints" / "step-00000003",
    )
    status, out, err = go_pooled(pool, 2, folder, tiny(), "resumed")
    assert status == 0, err
    assert "resumed from" in out
    assert values(steps_of(folder / "resumed")) == values(steps_of(folder / "whole")[3:])
    one, other = (folder / run / "export" / "model.safetensors" for run in ("whole", "resumed"))
    assert one.read_bytes() == other.read_bytes()


def run_rank_late(words: list[str], late: int, most_steps: int) -> tuple[int, str, str]:
    """As `run_rank`, with a default interval that is over at every step by one rank's clock."""
    minutes = 0 if int(os.environ["RANK"]) == late else 30
    with (
        patch.object(progress, "DEFAULT_MINUTES", minutes),
        patch.object(progress, "DEFAULT_STEPS", most_steps),
    ):
        return run_rank(words)


@pytest.mark.parametrize(
    ("late", "most_steps", "saved", "evaluated"),
    [(0, 500, [5, 6], [1, 2, 3, 4, 5, 6]), (1, 4, [4, 6], [4, 6])],
)
@pytest.mark.full
def test_rank_0s_clock_decides_by_default(late, most_steps, saved, evaluated, whole, tiny, pool):
    folder, _ = whole
    held = f"data.eval={{held: {folder}/train.jsonl}}"
    words = command(folder, tiny(), f"late-{late}", "checkpoint.every=null", held, "eval.samples=2")
    answers = pool.run(run_rank_late, 2, words[4:], late, most_steps)
    assert [status for status, _, _ in answers] == [0, 0], answers
    out, run = " ".join(answers[0][1].split()), folder / f"late-{late}"
    when = "every 30 minutes or 500 steps and at the end"
    assert f"(2 samples) {when}" in out and f"checkpoints {when} (the newest 2 stay)" in out
    checkpoints = sorted(int(each.name[5:]) for each in (run / "checkpoints").iterdir())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert checkpoints == saved
    assert [line["step"] for line in lines if line["kind"] == "eval"] == evaluated
    assert values(steps_of(run)) == values(steps_of(folder / "whole"))


def test_a_finished_run_started_again_changes_nothing(whole, tiny, pool):
    folder, _ = whole
    export = folder / "whole" / "export" / "model.safetensors"
    before = export.read_bytes(), export.stat().st_mtime_ns
    status, out, err = go_pooled(pool, 2, folder, tiny(), "whole")
    assert status == 0, err
    assert "nothing was left to train" in out
    assert (export.read_bytes(), export.stat().st_mtime_ns) == before
    assert len(steps_of(folder / "whole")) == STEPS


@pytest.fixture(scope="module")
def broken_pictures(tmp_path_factory):
    """A set of 6 records with a picture each, of which the first, fourth and fifth cannot be
    decoded: so their steps of one record have none left."""
    folder = tmp_path_factory.mktemp("broken")
    records = []
    for row in range(6):
        picture(48, 48, row).save(folder / f"{row}.png")
        parts = {"type": "image", "image": f"{row}.png"}, text(f"{row}?")
        records.append({"messages": [say("user", *parts), say("assistant", f"word {row}")]})
        if row in (0, 3, 4):
            (folder / f"{row}.png").write_bytes((folder / f"{row}.png").read_bytes()[:200])
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.mark.full  # test_train_parts.py has such a step
@pytest.mark.parametrize("world", [1, 2])
def test_steps_without_a_trained_token_are_passed_over(world, broken_pictures, tiny, pool):
    """Weights at every step, with a break after a step of the kind, too."""
    folder, run = broken_pictures, f"of-{world}"
    more = ["data.max_errors=100", "data.shuffle=false", "train.global_batch_size=1"]
    more += [f"parallel.pp={world}", "train.steps=6", "checkpoint.every=1"]
    more += ["checkpoint.keep_last=9"]
    more += ["optim.weight_decay=0.1", "optim.lr=1e-3", "checkpoint.async_save=false"]
    status, out, err = go_pooled(pool, world, folder, tiny(), run, *more)
    assert status == 0, err
    steps = steps_of(folder / run)
    assert [step["step"] for step in steps if step["empty"]] == [1, 4, 5]
    assert [step["loss"] for step in steps if step["empty"]] == [None] * 3
    assert not any(step["skipped"] for step in steps)
    assert "step 5: no token of its batch is trained: not applied (3 so far)" in out
    checkpoints = folder / run / "checkpoints"
    weights = [
        [(checkpoints / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors").read_bytes()
         for rank in range(world)]
        for step in range(1, 7)
    ]  # fmt: skip
    moved = [one != other for one, other in itertools.pairwise(weights)]
    assert moved == [True, True, False, False, True]  # after steps 1 to 5
    start = {1: 1, 2: 4}[world]
    resumed = folder / f"{run}-from-{start}"
    (resumed / "checkpoints").mkdir(parents=True)
    name = f"step-{start:08d}"
    shutil.copytree(checkpoints / name, resumed / "checkpoints" / name)
    status, _, err = go_pooled(pool, world, folder, tiny(), resumed, *more)
    assert status == 0, err
    assert values(steps_of(resumed)) == values(steps[start:])
    one, other = (folder / each / "export" / "model.safetensors" for each in (run, resumed))
    assert one.read_bytes() == other.read_bytes()


def test_other_data_is_refused_on_resume(whole, tiny, pool):
    folder, _ = whole
    status, _, err = go_pooled(pool, 2, folder, tiny(), "whole", "data.seed=1")
    assert status == 2
    assert "was trained on other data" in err and "(data.seed=1, was 0)" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def one_step(tiny, tmp_path_factory, pool):
    """A run of one step and its model's folder. A record has no answer."""
    folder = tmp_path_factory.mktemp("one-step")
    with open(write_set(folder), "a") as file:
        file.write(json.dumps({"messages": [say("user", "a")], "meta": {"a": 1}}) + "\n")
    model = shutil.copytree(tiny(), folder / "model")
    status, _, err = go_pooled(pool, 1, folder, str(model), "first", "parallel.pp=1", ONE_STEP)
    assert status == 0, err
    return folder, model


ONE_STEP = "train.steps=1"


def resume_again(pool, one_step, tmp_path, *more: str, model=None) -> tuple[int, str, str]:
    """One step more, in a copy of the run."""
    folder, of_first = one_step
    run = shutil.copytree(folder / "first", tmp_path / "run")
    words = (folder, str(model or of_first), run, "parallel.pp=1", "train.steps=2", *more)
    return go_pooled(pool, 1, *words)


def events_of(run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "event"]


def test_what_is_not_learnt_is_said_at_the_start(one_step):
    run = one_step[0] / "first"
    said = "data.train: 1 of 24 records dropped: nothing to learn"
    passed, *_ = [text for text in events_of(run) if "'meta' (1)" in text]
    assert said in events_of(run) and "data.unknown_keys=refuse" in passed
    start = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["samples"], start["dropped"], start["wrong"]) == (23, 1, 0)
    assert "records left out: 1 dropped" in (run / "report.html").read_text()


@pytest.mark.full
def test_another_rule_for_records_is_an_event_of_the_run(one_step, tiny, pool, tmp_path):
    """Files that were copied, and keys that change no row, are none."""
    rules = ["data.train_on=last_assistant", "data.special_tokens=escape", "data.max_pixels=4096"]
    rules += ["data.video={fps: 1, max_pixels: 4096}"]
    status, _, err = resume_again(pool, one_step, tmp_path, *rules, "data.prefetch=3", model=tiny())
    assert status == 0, err
    assert [text for text in events_of(tmp_path / "run") if "resumed with" in text] == [
        "resumed with data.max_pixels=4096, was None",
        "resumed with data.special_tokens='escape', was 'refuse'",
        "resumed with data.train_on='last_assistant', was 'all_assistant'",
        "resumed with data.video={fps: 1.0, max_pixels: 4096}, was {}",
        "resumed with another set of sample lengths in data.train",
    ]


@pytest.mark.full
def test_changed_files_of_the_tokenizer_are_events_of_the_run(one_step, pool, tmp_path):
    model = shutil.copytree(one_step[1], tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# new #}")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 77}))
    # A warm-up that takes all steps is refused at the start of a run alone.
    more = ["optim.lr=1e-4", "optim.warmup_steps=2", "data.prefetch=3"]
    status, _, err = resume_again(pool, one_step, tmp_path, *more, model=model)
    assert status == 0, err
    (changed,) = [text for text in events_of(tmp_path / "run") if "settings changed" in text]
    assert changed == (
        f"settings changed since step-00000001: model.path={str(model)!r}, was "
        f"{str(one_step[1])!r}; data.prefetch=3, was 2; optim.lr=0.0001, was 0.002; "
        "optim.warmup_steps=2, was 0; train.steps=2, was 1"
    )
    assert [text for text in events_of(tmp_path / "run") if "resumed with" in text] == [
        "resumed with another chat_template.jinja in model.path",
        "resumed with another tokenizer_config.json in model.path",
    ]


def test_rules_that_leave_out_other_records_are_refused(one_step, pool, tmp_path):
    more = ("data.max_tokens=40", "data.truncation=drop")
    status, _, err = resume_again(pool, one_step, tmp_path, *more)
    assert status == 2 and "was trained on other data" in err
    assert "another choice of the records of data.train[0] that are samples" in err
    assert "data.max_tokens=40, was 8192" in err and "data.truncation='drop', was 'error'" in err


@pytest.mark.full
def test_another_experiment_does_not_go_on_with_an_unnamed_run(one_step, tmp_path, monkeypatch):
    """The default folder; what lasts longer, or is computed in another way, is the same one."""
    folder, model = one_step
    shutil.copytree(folder / "first", tmp_path / "runs" / "run")
    monkeypatch.chdir(tmp_path)
    words = command(folder, str(model), "first", ONE_STEP, "parallel.pp=1")[4:]
    words = [word for word in words if not word.startswith("run=")]
    before = (tmp_path / "runs" / "run" / "config.yaml").read_bytes()
    for more in (["optim.lr=0.001", "train.steps=9"], ["train.global_batch_size=4"]):
        status, _, err = run_rank([*words, *more])
        assert status == 2 and f"runs/run holds a run with other settings ({more[0]}, was " in err
        assert "give run=FOLDER for a new one, or run=runs/run to go on with that one" in err
    assert (tmp_path / "runs" / "run" / "config.yaml").read_bytes() == before
    for same in ([], ["train.steps=9", "log.every=3", "data.num_workers=1"]):
        check_unnamed(load_config([*words, *same]), words, None)
    named = [*words, "optim.lr=1e-5", "run=runs/run"]
    check_unnamed(load_config(named), named, None)
    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints")  # nothing to go on with
    check_unnamed(load_config(named[:-1]), named[:-1], None)


def test_a_second_interrupt_does_not_wait():
    signals = Signals()
    signals.can_save = True
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        signals.restore()


def run_command(connection: Connection, words: list[str], output: Path) -> None:
    """Run a command with its output in a file, and send its exit status."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = main(words)
    sys.stdout.flush()
    connection.send(status)


def test_a_signal_saves_and_stops_with_its_own_status(whole, tiny, process_tree, tmp_path):
    folder, _ = whole
    # One process, so that its status is the command's.
    words = command(folder, tiny(), "stopped", "parallel.pp=1", "train.steps=500")[3:]
    job = process_tree.fork(run_command, words, tmp_path / "output")
    metrics = folder / "stopped" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and '"step": 4' in metrics.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGTERM)
    status, output = job.connection.recv(), (tmp_path / "output").read_text()
    job.kill()
    assert status == 75, output[-3000:]
    assert "stopped by a signal after" in output
    done = len(steps_of(folder / "stopped"))
    assert (folder / "stopped" / "checkpoints" / f"step-{done:08d}" / "complete.json").exists()
    assert done < 500


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=nowhere.jsonl", "data.train=nowhere.jsonl: "),
        ("model.path=nowhere", "model.path=nowhere has no config.json"),
        ("parallel.virtual_stages=2", "parallel.virtual_stages=2"),
        ("optim.lrr=1", "optim.lrr is not a configuration key; did you mean 'optim.lr'"),
    ],
)
def test_mistakes_end_in_one_sentence(override, words, whole, tiny, pool):
    folder, _ = whole
    status, _, err = go_pooled(pool, 1, folder, tiny(), "mistake", "parallel.pp=1", override)
    assert status == 2
    assert words in err and err.count("\n") == 1
    assert not (folder / "mistake" / "metrics.jsonl").exists()


def test_cfg_job_prints_and_does_nothing(tmp_path, tiny):
    done = go(tmp_path, tiny(), "none", "--cfg", "job")
    assert done.returncode == 0 and "micro_batch_tokens: 400" in done.stdout
    assert not (tmp_path / "none").exists()
