# .venv/bin/python -m pytest tests/distributed/test_ray_launcher.py
"""`launch=ray` on a real cluster of two nodes: the losses are those without Ray, digit for digit,
and the run resumes after a lost actor or node."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron_vlm.config.schema import Config, LaunchConfig, ParallelConfig
from megatron_vlm.errors import ConfigError
from tests.rl.test_rl import furthest, learnt, samples, words
from tests.run.test_train import command, go_pooled, outside_of_jobs, steps_of, values
from tests.support.error_fields import raises
from tests.support.ports import descendants, is_loopback, listening
from tests.support.sets import write_set

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.alone,  # it starts jobs and kills them
    pytest.mark.slow,  # minutes: Ray and the actors import everything again
    pytest.mark.usefixtures("ray_lock"),
]
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    write_set(folder)
    return folder


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def overrides(*more: str) -> list[str]:
    return [f"train.steps={STEPS}", "checkpoint.every=2", "parallel.pp=1", *more]


def start(cluster, folder: Path, model: str, run: str, *more: str) -> subprocess.Popen:
    ray = ["launch=ray", f"launch.ray_address={cluster.address}", *more]
    return subprocess.Popen(
        command(folder, model, run, *overrides(*ray)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=outside_of_jobs(),
        text=True,
    )


def wait_for_step(job: subprocess.Popen, run: Path, step: int) -> None:
    until = time.monotonic() + 200
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and f'"step", "step": {step}' in metrics.read_text()):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


def actor_pids() -> list[int]:
    """Return the ids of the processes that Ray names after a rank."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith((b"ray::rank", b"ray::TrainActor")):
            pids.append(int(entry.name))
    return sorted(pids)


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Suspend the processes for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def whole(folder: Path, model: str, pool) -> list[tuple]:
    """Return the steps of the run without Ray, at DP=2."""
    if not (folder / "whole" / "export").exists():
        status, _, err = go_pooled(pool, 2, folder, model, "whole", *overrides())
        assert status == 0, err
    return values(steps_of(folder / "whole"))


def test_losses_are_those_without_ray(cluster, folder, tiny, pool):
    job = start(cluster, folder, tiny(), "with-ray")
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    assert values(steps_of(folder / "with-ray")) == whole(folder, tiny(), pool)
    assert "(rank 0" in out and f"step {STEPS}/{STEPS}" in out  # lines have their rank
    one, other = (folder / run / "export" / "model.safetensors" for run in ("with-ray", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_learning_from_samples_is_what_it_is_without_ray(cluster, folder, tiny, pool):
    model, more = tiny(deepstack=1, from_scratch=True), ["parallel.pp=2", "log.report=false"]
    without = learnt(pool, 2, folder, model, "rl-without", *more)
    ray = ["launch=ray", f"launch.ray_address={cluster.address}"]
    program = [sys.executable, "-m", "megatron_vlm.cli", "rl"]
    argv = [*program, *words(folder, model, "rl-with", *more, *ray)]
    done = subprocess.run(argv, capture_output=True, text=True, env=outside_of_jobs(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert samples(folder / "rl-with") == samples(without)
    assert furthest(folder / "rl-with", without) == 0


def test_a_cluster_of_its_own_stays_on_loopback(folder, tiny):
    options = overrides("launch=ray", "launch.processes=1", "train.steps=100000")
    env = {name: value for name, value in outside_of_jobs().items() if name != "RAY_ADDRESS"}
    job = subprocess.Popen(
        command(folder, tiny(), "own", *options), env=env, stdout=subprocess.PIPE
    )
    try:
        wait_for_step(job, folder / "own", 2)
        addresses = listening(descendants(job.pid))
    finally:
        job.terminate()
        job.communicate(timeout=200)
    assert (
        len(addresses) > 4
        and {address for address, _ in addresses if not is_loopback(address)} == set()
    )


def test_a_lost_actor_starts_the_job_again(cluster, folder, tiny, pool):
    job = start(cluster, folder, tiny(), "actor")
    wait_for_step(job, folder / "actor", 4)
    os.kill(actor_pids()[-1], signal.SIGKILL)
    out, _ = job.communicate(timeout=400)
    assert job.returncode == 0, out
    assert "was lost: its process or its node is gone" in out and "starting again" in out
    steps = {step["step"]: step for step in steps_of(folder / "actor")}
    assert values(list(steps.values())) == whole(folder, tiny(), pool)


def test_a_lost_node_leaves_fewer_replicas(cluster, folder, tiny, pool):
    job = start(cluster, folder, tiny(), "node")
    wait_for_step(job, folder / "node", 4)
    with stopped(actor_pids()):  # a node takes a second to go, in which the run might end
        cluster.remove_node(cluster.second, allow_graceful=False)
    out, _ = job.communicate(timeout=400)
    assert job.returncode == 0, out
    assert "dp=2" in out and "dp=1" in out
    steps = {step["step"]: step for step in steps_of(folder / "node")}
    expected = whole(folder, tiny(), pool)
    assert [step for step, *_ in values(list(steps.values()))] == list(range(1, STEPS + 1))
    for actual, reference in zip(values(list(steps.values())), expected, strict=True):
        # Another layout rounds otherwise.
        assert actual[1:3] == pytest.approx(reference[1:3], rel=2e-4)


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:port", "nowhere://x"])
def test_a_ray_that_does_not_start_is_said(address, monkeypatch):
    """Errors of ray.init are of many kinds: a start that times out raises Exception itself."""
    from megatron_vlm.distributed.launch.ray_launcher import run_ray_job

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=f"^launch.ray_address={address}: Ray does not start: "):
        run_ray_job(Config(), [], address)


def test_how_many_ranks():
    from megatron_vlm.distributed.launch.ray_launcher import world_size

    def ranks(room: int, restart: int = 0, processes: int | None = None, **parallel: int) -> int:
        launch = LaunchConfig(processes=processes)
        return world_size(Config(parallel=ParallelConfig(**parallel), launch=launch), room, restart)

    assert ranks(7, tp=2) == 6 and ranks(4) == 4
    assert ranks(8, processes=4, pp=2) == 4
    assert ranks(3, restart=1, processes=4, pp=2) == 2  # the remaining room
    with raises(ConfigError, key="launch.processes", found=4, problem_has="room for 4"):
        ranks(4, tp=8)
    with raises(ConfigError, key="launch.processes", found=3, problem_has="room for 8"):
        ranks(8, processes=3, tp=2)
