# .venv/bin/python -m pytest tests/distributed/test_hosts.py
"""Two hosts as network namespaces of Linux: their link is cut during a run, which then resumes."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.test_train import command, go_pooled, outside_of_jobs, steps_of, values
from tests.support.sets import write_set

pytestmark = [
    pytest.mark.alone,  # it starts jobs and kills them
    pytest.mark.slow,  # it waits for a time-out
]
STEPS = 400
KEYS = ("checkpoint.every=10", "launch.timeout_minutes=0.5", "optim.schedule=constant")
HOSTS = {"mvlm-a": "10.231.0.1", "mvlm-b": "10.231.0.2"}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    """Yield two namespaces, each with one end of a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` of iproute2")
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", "cable-a", "type", "veth", "peer", "name", "cable-b")
        for name, address in HOSTS.items():
            cable = f"cable-{name[-1]}"
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove_hosts()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield list(HOSTS)
    remove_hosts()


def remove_hosts() -> None:
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(folder: Path, model: str, run: str) -> list[subprocess.Popen]:
    """Start one rank on each host, with the variables that torchrun or Slurm would set."""
    train = command(folder, model, run, f"train.steps={STEPS}", *KEYS)[4:]
    jobs = []
    for rank, name in enumerate(HOSTS):
        env = outside_of_jobs() | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": HOSTS["mvlm-a"],
            "MASTER_PORT": "29517",
            "GLOO_SOCKET_IFNAME": f"cable-{name[-1]}",
            "OMP_NUM_THREADS": "1",
        }
        inside = ["ip", "netns", "exec", name, sys.executable, "-m", "megatron_vlm.train", *train]
        jobs.append(subprocess.Popen(inside, env=env, stderr=subprocess.PIPE, text=True))
    return jobs


def test_a_cut_link_is_named_and_the_run_resumes(hosts, tiny, tmp_path, pool):
    write_set(tmp_path)
    jobs = start(tmp_path, tiny(), "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and '"step", "step": 15' in metrics.read_text()):
        assert all(job.poll() is None for job in jobs) and time.monotonic() < until
        time.sleep(0.05)
    ip("-n", "mvlm-b", "link", "set", "cable-b", "down")
    outputs = [job.communicate(timeout=150)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [70, 70], outputs
    assert "rank 0: rank 1 has not been heard from for" in outputs[0]
    lost = "rank 1: rank 0, which has died or cannot be reached, has not answered for"
    assert lost in outputs[1]
    done = len(steps_of(tmp_path / "run"))
    ip("-n", "mvlm-b", "link", "set", "cable-b", "up")
    # The run resumes on the same two hosts, and does a few steps more than before.
    jobs = start(tmp_path, tiny(), "run")
    while len(steps_of(tmp_path / "run")) < done + 12:
        assert all(job.poll() is None for job in jobs) and time.monotonic() < until + 200
        time.sleep(0.05)
    for job in jobs:
        job.kill()
        job.communicate()
    again = steps_of(tmp_path / "run")[done:]
    assert done - 20 < again[0]["step"] <= done + 1 and again[0]["step"] % 10 == 1
    status, _, err = go_pooled(pool, 2, tmp_path, tiny(), "one-host", *KEYS, "train.steps=40")
    assert status == 0, err
    first = values(steps_of(tmp_path / "one-host"))[:15]
    assert values(steps_of(tmp_path / "run"))[:15] == first
