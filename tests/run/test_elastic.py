# .venv/bin/python -m pytest tests/run/test_elastic.py
"""Restarts by torchrun: after a killed rank, without a lost machine, and with it when it is back.
Each time the run resumes from its last checkpoint with the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.run.test_train import command, go_pooled, outside_of_jobs, steps_of, values
from tests.support.sets import write_set

pytestmark = [
    pytest.mark.alone,  # it starts jobs and kills them
    pytest.mark.slow,  # each start imports everything again
]
TOLERANCE = 1e-6  # relative (measured worst: 1.4e-7)
NODES_SH = Path(__file__).parents[2] / "scripts" / "train_nodes.sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    write_set(folder)
    return folder


def arguments(*more: str) -> list[str]:
    return ["checkpoint.every=5", "optim.schedule=constant", *more]


def start(launcher: list[str], folder: Path, model: str, run: str, *more: str, **env: str):
    train = command(folder, model, run, *arguments(*more))[4:]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [*launcher, *train],
        env=outside_of_jobs() | {"PATH": path, "OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait(jobs: list[subprocess.Popen], ready) -> None:
    until = time.monotonic() + 200
    while not ready():
        assert time.monotonic() < until and all(job.poll() is None for job in jobs)
        time.sleep(0.02)


def ranks_below(job: subprocess.Popen) -> dict[int, int]:
    """Return the process ids of the ranks that a launcher has started."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    pids = {}
    for pid in map(int, children):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pids |= {int(each[5:]): pid for each in environ if each.startswith(b"RANK=")}
    return pids


def last_values(run: Path) -> list[tuple]:
    """Return the values of each step as it was last done."""
    return values(list({step["step"]: step for step in steps_of(run)}.values()))


def test_a_killed_rank_starts_the_job_again(folder, tiny, pool):
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    more = ("parallel.pp=2", "train.steps=40")
    job = start([*launcher, "-m", "megatron_vlm.train"], folder, tiny(), "killed", *more)
    wait([job], lambda: len(steps(folder / "killed")) > 12)
    os.kill(ranks_below(job)[1], signal.SIGKILL)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    done = [step["step"] for step in steps(folder / "killed")]
    (again,) = (now for before, now in pairwise(done) if now != before + 1)
    assert again % 5 == 1 and again >= 6  # it did not start from scratch
    status, _, err = go_pooled(pool, 2, folder, tiny(), "whole", *arguments(*more))
    assert status == 0, err
    assert last_values(folder / "killed") == values(steps_of(folder / "whole"))


def test_a_lost_machine_leaves_fewer_replicas_until_it_is_back(folder, tiny, pool):
    """Two launchers represent two machines with one rank each, as the script starts them. One
    replica rounds differently from two; a small learning rate keeps that from growing."""
    run, slow = folder / "machines", ("parallel.pp=1", "optim.lr=1e-5")
    settings = {"NODES": "2", "LEAST": "1", "MASTER": "127.0.0.1", "PORT": "29533"}
    settings |= {"PROCESSES": "1", "RESTARTS": "3"}

    def machine(number: int) -> subprocess.Popen:
        more = (*slow, "train.steps=100000")
        launcher = ["bash", str(NODES_SH)]
        return start(launcher, folder, tiny(), "machines", *more, **settings, NODE=str(number))

    def layouts() -> list[int]:
        return [line["layout"]["dp"] for line in lines(run) if line["kind"] == "start"]

    jobs = [machine(0), machine(1)]
    try:
        wait(jobs, lambda: len(steps(run)) > 12)
        lost = jobs.pop()
        for pid in [lost.pid, *ranks_below(lost).values()]:
            os.kill(pid, signal.SIGKILL)
        lost.communicate()
        wait(jobs, lambda: layouts() == [2, 1] and steps(run)[-1]["step"] > 40)
        jobs.append(machine(1))
        wait(jobs, lambda: layouts() == [2, 1, 2] and len(steps(run)) > 80)
    finally:
        for job in jobs:
            job.terminate()
        print(layouts(), *(job.communicate()[1] for job in jobs))
    actual = last_values(run)
    assert [step for step, *_ in actual] == list(range(1, len(actual) + 1))
    overrides = arguments(*slow, f"train.steps={len(actual)}")
    status, _, err = go_pooled(pool, 2, folder, tiny(), "two-replicas", *overrides)
    assert status == 0, err
    expected = values(steps_of(folder / "two-replicas"))
    worst = max(
        abs(value - reference) / reference
        for step, other in zip(actual, expected, strict=True)
        for value, reference in zip(step[1:3], other[1:3], strict=True)
    )
    print(f"{len(actual)} steps, worst relative difference {worst:.1e}")
    assert worst <= TOLERANCE


def lines(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, whose last line may be incomplete."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps(run: Path) -> list[dict]:
    return [line for line in lines(run) if line["kind"] == "step"]
