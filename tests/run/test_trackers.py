# .venv/bin/python -m pytest tests/run/test_log_sinks.py
"""Trackers get the values of metrics.jsonl under the names of charts, samples and settings, and
never stop a run."""

import gzip
import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from rich.console import Console

from megatron_vlm.config.schema import Config, LogConfig
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import read_mark, write_mark
from megatron_vlm.report.metrics_lines import Example, ExamplePart, ExampleTurn, RlLine, StepLine
from megatron_vlm.report.picture_uri import data_uri
from megatron_vlm.report.run_overview import StageReport, layout_table
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.throughput import Profiler
from megatron_vlm.run.trackers import (
    TRACKER_GROUP,
    TRACKER_PATIENCE_S,
    TrackedSample,
    check_trackers,
)
from tests.support import entry_point
from tests.support.error_fields import raises
from tests.support.file_tracker import registered
from tests.support.random_runs import ROOT

KEY = 40 * "0"  # the form of an API key of W&B
FIGURES = StepLine(0, 0, 2.5, 1e-3, 0.5, 0.1, 1000.0, 100.0, 5.0, 0.02, None, 1.5)
_COUNTS = dict(prompts=4, asked=4, alike=0.125, answer_tokens=6.5, longest_answer=9, cut=0.0625)
_COUNTS |= dict(turns=1.0, sampling_s=0.2, reward=0.75, reward_std=0.25, kl=0.5)
SAMPLES = RlLine(step=0, **_COUNTS, figures={"exact": 0.25, "reward": 0.125})
OF_REWARDS = {"exact", "figures/reward"}  # as `reward` is also a field of RlLine
BLOCK = 2**15  # bytes of W&B's file
RUN_ID = "0123456789abcdef0123456789abcdef"
PIXELS = np.full((4, 6, 3), (200, 30, 40), np.uint8)
TEXT = "Which?\nright answer: red\nanswer: blue"


LOG = LogConfig(trackers=("file",), project="shapes")


def write_run(run, first, *trackers, patience_s=TRACKER_PATIENCE_S, last=2):
    """Log two steps, an evaluation and samples, as a run does that has done `first` steps."""
    if read_mark(run) is None:
        write_mark(run, RUN_ID, kind="run", last_serial=0)
    cfg = Config(run=str(run), log=replace(LOG, trackers=trackers))
    run_log = RunLog(cfg, True, 10, first, patience_s)
    try:
        run_log.start(
            **dict(
                step=first, platform="cpu", world=1, layout={"tp": 1}, parameters=2, trainable=1
            ),
            **dict(model="m", samples=3, total_steps=10, versions={}),
        )
        run_log.samples(replace(SAMPLES, step=first + 1))
        for step in range(first + 1, first + 1 + last):
            run_log.step(replace(FIGURES, step=step, loss=2.5 - step))
        scores = {
            "loss": 1.25,
            "token_accuracy": 0.75,
            "exact_match": 0.5,
            "samples": 4,
            "seconds": 2,
        }
        run_log.evaluation(first + last, "held", scores)
        parts = (ExamplePart("Which?"), ExamplePart(image=data_uri(PIXELS)))
        example = Example("held: 1", "red", "blue", (ExampleTurn("user", parts),))
        run_log.show(first + last, "held", [TrackedSample.from_example(example)])
        run_log.event(first + last, "an event")
    finally:
        run_log.close()


def calls_in(run):
    return [json.loads(line) for line in (run / "calls.jsonl").read_text().splitlines()]


def events_in(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == "event"]


def test_a_tracker_of_another_package_gets_everything_and_a_resume_the_same_id(tmp_path):
    run = tmp_path / "first"
    run.mkdir()
    with registered(tmp_path):
        check_trackers(Config(log=LOG))
        write_run(run, 0, "file")
        write_run(run, 2, "file")
    calls = calls_in(run)
    start = {"id": RUN_ID, "name": "first", "project": "shapes", "lr": Config().optim.lr}
    assert [each for each in calls if each["call"] == "start"] == [
        {"call": "start", **start, "step": first} for first in (0, 2)
    ]
    losses = [(each["step"], each["train/loss"]) for each in calls if "train/loss" in each]
    assert losses == [(1, 1.5), (2, 0.5), (3, -0.5), (4, -1.5)]
    [scores] = [each for each in calls[:6] if "held/exact_match" in each]
    assert (scores["step"], scores["held/exact_match"]) == (2, 0.5)
    [rl, _] = [each for each in calls if "rl/reward" in each]
    assert {name[3:] for name in rl if name.startswith("rl/")} == {*_COUNTS, *OF_REWARDS}
    samples = [{"text": TEXT, "pixels": [[200, 30, 40]]}]
    shown = [each for each in calls if each["call"] == "samples"]
    assert shown == [
        {"call": "samples", "step": step, "name": "held", "samples": samples} for step in (2, 4)
    ]
    assert [each["call"] for each in calls].count("finish") == 2
    assert events_in(run) == ["an event", "an event"]


def test_the_samples_of_rl_are_the_episodes_of_samples_jsonl():
    uris = [data_uri(np.full((2, 2, 3), level, np.uint8)) for level in (10, 20)]
    episode = {
        "answers": ["no", "yes"],
        "heard": [{"text": "?", "images": uris[1:]}],
        "reward": 0.5,
    }
    line = {"question": "Is it?", "right": None, "images": uris[:1], "episodes": [episode] * 2}
    samples = TrackedSample.from_line(line)
    assert [each.pictures()[1].getpixel((0, 0)) for each in samples] == [(20, 20, 20)] * 2
    assert samples[0].text == "Is it?\nanswer: no / yes\nreward: 0.5"


@pytest.mark.parametrize("how", ["raises", "hangs"])
@pytest.mark.parametrize("call", ["start", "figures", "samples", "finish"])
def test_a_tracker_that_fails_costs_one_warning(how, call, tmp_path):
    (tmp_path / "fault").write_text(f"{how} {call}")
    with registered(tmp_path):
        write_run(tmp_path, 4, "file", "tensorboard", patience_s=0.25)
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines.count('"kind": "step"') == 2 and lines.count('"kind": "eval"') == 1
    [warning] = [text for text in events_in(tmp_path) if text != "an event"]
    assert warning.startswith("log.trackers=file gets nothing more until the run is started again")
    reason = (
        "it raised SystemExit: " + f"{call} failed here" if how == "raises" else "within 0.25 s"
    )
    assert warning.endswith(reason)
    # The other tracker has everything.
    assert tensorboard_in(tmp_path).Scalars("held/exact_match")[0].value == 0.5


def test_a_tracker_that_hangs_is_left_while_the_run_goes_on(tmp_path):
    (tmp_path / "fault").write_text("hangs figures")
    write_mark(tmp_path, RUN_ID)
    with registered(tmp_path):
        cfg = Config(run=str(tmp_path), log=LOG)
        run_log = RunLog(cfg, True, 10**6, patience_s=0.1)
        for step in itertools.count(1):
            run_log.step(replace(FIGURES, step=step))
            if not run_log.trackers:
                break
    run_log.close()
    [warning] = events_in(tmp_path)
    assert warning.endswith(
        ("it has not answered within 0.1 s", "it is more than 1000 calls behind")
    )


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_tracker_that_cannot_start_is_refused_before_the_first_step(how, tmp_path):
    (tmp_path / "fault").write_text(f"{how} start")
    reason = "SystemExit: start failed here" if how == "raises" else "within 0.1 s"
    failed = raises(ConfigError, key="log.trackers", found="file", problem_has=reason)
    with registered(tmp_path), failed:
        write_run(tmp_path, 0, "file", patience_s=0.1)


def test_trackers_that_cannot_be_started_are_named(tmp_path, monkeypatch):
    names = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
    with raises(ConfigError, key="log.trackers", found="file", allowed=names):
        check_trackers(Config(log=LOG))
    broken = entry_point.registered(
        tmp_path, TRACKER_GROUP, "file", "tests.support.no_such:Tracker"
    )
    with broken, raises(ConfigError, found="file", problem_has="cannot be imported: ModuleNot"):
        check_trackers(Config(log=LOG))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in names:
        with raises(ConfigError, found=name, remedy=f"run pip install {name}"):
            check_trackers(Config(log=replace(LOG, trackers=(name,))))
    check_trackers(Config())


def tensorboard_in(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_figures_samples_and_configuration(tmp_path):
    write_run(tmp_path, 0, "tensorboard", last=3)
    write_run(tmp_path, 2, "tensorboard")  # step 3 again, as after a kill
    accumulator = tensorboard_in(tmp_path)
    names = accumulator.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/tokens_per_s", "held/exact_match"} <= set(names)
    assert not [name for name in names if name.endswith(("/step", "/mfu", "/ranking", "/text"))]
    losses = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    assert losses == [(1, 1.5), (2, 0.5), (3, -0.5), (4, -1.5)]
    of_samples = {name: accumulator.Scalars(f"rl/{name}")[0].value for name in _COUNTS}
    assert of_samples == pytest.approx(_COUNTS)
    of_rewards = {name[3:] for name in names if name.startswith("rl/")} - of_samples.keys()
    assert of_rewards == OF_REWARDS
    assert accumulator.Scalars("rl/figures/reward")[0].value == 0.125
    [event] = accumulator.Images("held/pictures/0")
    pixels = np.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
    assert event.step == 4 and np.array_equal(pixels, PIXELS)
    text = accumulator.Tensors("held/answers/text_summary")[-1]
    assert b"Which?  \nright answer: red" in text.tensor_proto.string_val[0]
    config = accumulator.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert f"optim.lr={Config().optim.lr}  ".encode() in config


def test_frozen_parts_are_in_brackets_and_no_markup_is_printed(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    run_log = RunLog(Config(run=str(tmp_path)), True, 10, console=console)
    report = StageReport(0, (range(2),), Counter(vision=80_000, head=5000), Counter(head=5000))
    run_log.say(layout_table(Config(), "cpu", [report]))
    run_log.close()
    [row] = [line for line in console.file.getvalue().splitlines() if "(80k)" in line]
    assert row.split() == ["0", "0-1", "(80k)", "-", "-", "-", "5k", "85k", "5k"]


@pytest.mark.slow  # W&B's own process is slow
def test_wandb_offline_has_everything_and_a_resumed_run_keeps_its_id(tmp_path):
    """The run and its resume are two processes. Within one, W&B's service, which still knows the
    run, lost the second's lines on a machine under load."""
    write_in_processes(sys.executable, "wandb", tmp_path, {"WANDB_MODE": "offline"})
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(RUN_ID) for folder in folders)
    records = [r for folder in folders for r in wandb_records(folder / f"run-{RUN_ID}.wandb")]
    items = [record.history.item for record in records if record.HasField("history")]
    rows = [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in item} for item in items
    ]
    losses = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 1.5), (2, 0.5), (3, -0.5), (4, -1.5)]
    assert [row["held/exact_match"] for row in rows if "held/exact_match" in row] == [0.5, 0.5]
    starts = [record.run for record in records if record.HasField("run")]
    config = {item.key: item.value_json for item in starts[0].config.update}
    assert json.loads(config["optim.lr"]) == Config().optim.lr
    assert {(start.project, start.display_name) for start in starts} == {("shapes", tmp_path.name)}
    [row, _] = [row for row in rows if "held/pictures/0.path" in row]
    picture = folders[0] / "files" / row["held/pictures/0.path"]
    assert np.array_equal(np.asarray(PIL.Image.open(picture)), PIXELS)
    assert (row["held/pictures/0.caption"], row["held/answers.nrows"]) == (TEXT, 1)


@pytest.mark.slow
@pytest.mark.engine("trackers")
@pytest.mark.parametrize("name", ["mlflow", "trackio", "swanlab"])
def test_packages_read_back_what_they_have(name, tmp_path):
    """A run and its resume, one run for the tracker."""
    python, run = ROOT / ".venv-trackers" / "bin" / "python", tmp_path / "first"
    run.mkdir()
    store = f"sqlite:///{tmp_path}/mlflow.db"
    variables = {"SWANLAB_MODE": "offline", "MLFLOW_TRACKING_URI": store}
    variables["TRACKIO_DIR"] = str(tmp_path / "trackio")
    write_in_processes(python, name, run, variables)
    reader = [python, ROOT / "tests" / "support" / "tracker_readers.py", name, run]
    done = subprocess.run(
        reader, cwd=run, env=os.environ | variables, check=True, timeout=300, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout.splitlines()[-1])
    names = {"mlflow": "first", "trackio": f"first-{RUN_ID[:8]}", "swanlab": RUN_ID}
    assert found == {
        "runs": [names[name]],
        "losses": [[1, 1.5], [2, 0.5], [3, -0.5], [4, -1.5]],
        "lr": Config().optim.lr,
        "pixel": [200, 30, 40],
        "texts": [TEXT],
        "ended": True,
    }
    assert events_in(run) == ["an event", "an event"]


def write_in_processes(python, tracker, run, variables):
    """Log a run and its resume, each in a process of its own."""
    code = (
        "from pathlib import Path\nfrom tests.run.test_trackers import write_run\n"
        "write_run(Path({!r}), {}, {!r})"
    )
    environment = os.environ | {"WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)} | variables
    for first in (0, 2):
        command = [python, "-c", code.format(str(run), first, tracker)]
        subprocess.run(command, cwd=run, env=environment, check=True, timeout=300)


def wandb_records(path):
    """Yield what is in a file that `wandb sync` would send: records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), 7, b""  # behind the header of the file
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:  # no header fits: the next block begins
            place += left
            continue
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        is_end = data[place + 6] in (1, 4)  # a whole record, or the last part of one
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if not is_end:
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(parts)
        parts = b""
        yield record


@pytest.mark.parametrize(
    ("variables", "netrc", "reason"),
    [
        ({"WANDB_MODE": "off"}, "", "wandb cannot read its settings: mode: Input should be"),
        ({}, "", "there is no login for https://wandb.example"),
        ({"WANDB_API_KEY": "abc"}, "", "WANDB_API_KEY invalid"),
        ({"WANDB_API_KEY": KEY}, "", None),
        ({"WANDB_MODE": "offline"}, "", None),
        ({"WANDB_MODE": "disabled"}, "", None),
        ({}, f"machine wandb.example login user password {KEY}", None),
        ({}, f"machine other.example login user password {KEY}", "there is no login"),
    ],
)
def test_wandb_without_a_login_is_refused_before_anything_is_loaded(
    variables, netrc, reason, tmp_path, monkeypatch
):
    """The variables, settings and files are those that W&B itself reads; no server is asked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    folders = ("HOME", "WANDB_CONFIG_DIR", "WANDB_DIR")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in dict.fromkeys(folders, str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    for name, value in {"WANDB_BASE_URL": "https://wandb.example", **variables}.items():
        monkeypatch.setenv(name, value)
    from wandb.sdk import wandb_setup

    monkeypatch.setattr(wandb_setup, "_singleton", None)  # the variables are read once
    cfg = Config(log=replace(LOG, trackers=("wandb",)))
    if reason is None:
        check_trackers(cfg)
        return
    remedy = "WANDB_MODE" if "settings" in reason else "wandb login`, set WANDB_API_KEY, or set"
    with raises(ConfigError, key="log.trackers", found="wandb", remedy_has=remedy) as caught:
        check_trackers(cfg)
    assert reason in str(caught.value)


def test_a_trace_has_the_chosen_steps_of_rank_0(tmp_path):
    import torch

    cfg = Config(run=str(tmp_path), log=LogConfig(profile_steps=[1, 3]))
    profilers = {rank: Profiler(cfg, rank, pick_platform("cpu")) for rank in (0, 1)}
    sizes = (11, 12, 13, 14)
    for step, size in enumerate(sizes):
        for profiler in profilers.values():
            profiler.begin_step(step)
        torch.zeros(size, size) @ torch.zeros(size, size)
    for profiler in profilers.values():
        profiler.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0.json.gz"]
    with gzip.open(tmp_path / "profile" / "rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    shapes = [e["args"]["Input Dims"][0] for e in events if e.get("name") == "aten::matmul"]
    assert shapes == [[12, 12], [13, 13]]
