# .venv/bin/python -m pytest tests/run/test_log_sinks.py
"""TensorBoard and Weights & Biases get the values of metrics.jsonl under the names of charts."""

import gzip
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_vlm.config.schema import Config, LogConfig
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.report.metrics_lines import RlLine, StepLine
from megatron_vlm.report.run_overview import StageReport, layout_table
from megatron_vlm.run.log import RunLog, check_sinks
from megatron_vlm.run.throughput import Profiler
from tests.support.error_fields import raises

KEY = 40 * "0"  # the form of an API key of W&B
FIGURES = StepLine(0, 0, 2.5, 1e-3, 0.5, 0.1, 1000.0, 100.0, 5.0, 0.02, None, 1.5)
_COUNTS = dict(prompts=4, asked=4, alike=0.125, answer_tokens=6.5, longest_answer=9, cut=0.0625)
_COUNTS |= dict(turns=1.0, sampling_s=0.2, reward=0.75, reward_std=0.25, kl=0.5)
SAMPLES = RlLine(step=0, **_COUNTS, figures={"exact": 0.25, "reward": 0.125})


def write_run(run, first: int, **log):
    cfg = Config(run=str(run), log=LogConfig(**log))
    run_log = RunLog(cfg, True, 10, first)
    run_log.start(
        **dict(step=first, platform="cpu", world=1, layout={"tp": 1}, parameters=2, trainable=1),
        **dict(model="m", samples=3, total_steps=10, versions={}),
    )
    run_log.samples(replace(SAMPLES, step=first))
    for step in range(first, first + 2):
        run_log.step(replace(FIGURES, step=step, loss=2.5 - step))
    scores = {"loss": 1.25, "token_accuracy": 0.75, "exact_match": 0.5, "samples": 4, "seconds": 2}
    run_log.evaluation(first + 2, "held", scores)
    run_log.event(first + 2, "an event")
    run_log.close()


def test_tensorboard_has_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, 0, tensorboard=True)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/tokens_per_s", "held/exact_match"} <= set(names)
    assert not [name for name in names if name.endswith(("/step", "/mfu", "/ranking", "/text"))]
    losses = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    assert losses == [(0, 2.5), (1, 1.5)]
    assert [(e.step, e.value) for e in accumulator.Scalars("held/exact_match")] == [(2, 0.5)]
    of_samples = {name: accumulator.Scalars(f"rl/{name}")[0].value for name in _COUNTS}
    assert of_samples == pytest.approx(_COUNTS)
    of_rewards = {name[3:] for name in names if name.startswith("rl/")} - of_samples.keys()
    assert of_rewards == {"exact", "figures/reward"}
    assert accumulator.Scalars("rl/figures/reward")[0].value == 0.125


def test_frozen_parts_are_in_brackets_and_no_markup_is_printed(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    run_log = RunLog(Config(run=str(tmp_path)), True, 10, console=console)
    report = StageReport(0, (range(2),), Counter(vision=80_000, head=5000), Counter(head=5000))
    run_log.say(layout_table(Config(), "cpu", [report]))
    run_log.close()
    [row] = [line for line in console.file.getvalue().splitlines() if "(80k)" in line]
    assert row.split() == ["0", "0-1", "(80k)", "-", "-", "-", "5k", "85k", "5k"]


@pytest.mark.slow  # W&B's own process is slow
def test_wandb_offline_has_the_figures_and_a_resumed_run_keeps_its_id(tmp_path):
    """The run and its resume are two processes. Within one, W&B's service, which still knows the
    run, lost the second's lines on a machine under load."""
    code = "from tests.run.test_log_sinks import write_run as w; w({!r}, {}, wandb='shapes')"
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}

    def write(first: int) -> None:
        command = [sys.executable, "-c", code.format(str(tmp_path), first)]
        subprocess.run(command, env=environment, check=True, timeout=120)

    write(0)
    run_id = (tmp_path / "wandb_id").read_text()
    write(2)
    assert (tmp_path / "wandb_id").read_text() == run_id
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(run_id) for folder in folders)
    rows = [row for folder in folders for row in wandb_rows(folder / f"run-{run_id}.wandb")]
    assert [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (0, 2.5),
        (1, 1.5),
        (2, 0.5),
        (3, -0.5),
    ]
    assert [row["held/exact_match"] for row in rows if "held/exact_match" in row] == [0.5, 0.5]


def wandb_rows(path):
    """Yield the history in a file that `wandb sync` would send: records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, place = path.read_bytes(), 7  # behind the header of the file
    assert data[:4] == b":W&B" and len(data) < 32 * 1024  # one block
    while place + 7 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[place + 7 : place + 7 + size])
        place += 7 + size
        if record.HasField("history"):
            items = record.history.item
            yield {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


@pytest.mark.parametrize("log", [{"tensorboard": True}, {"wandb": "shapes"}])
def test_what_is_not_installed_is_named(log, monkeypatch):
    cfg = Config(log=LogConfig(**log))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [(name, value)] = log.items()
    remedy = "pip install 'megatron_vlm[log]'"
    with raises(ConfigError, key=f"log.{name}", found=value, remedy_has=remedy):
        check_sinks(cfg)
    check_sinks(Config())


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
    cfg = Config(log=LogConfig(wandb="shapes"))
    if reason is None:
        check_sinks(cfg)
        return
    remedy = "WANDB_MODE" if "settings" in reason else "wandb login`, set WANDB_API_KEY, or set"
    with raises(ConfigError, key="log.wandb", found="shapes", remedy_has=remedy) as caught:
        check_sinks(cfg)
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
