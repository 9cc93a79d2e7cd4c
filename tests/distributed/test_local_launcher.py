# .venv/bin/python -m pytest tests/distributed/test_local_launcher.py
"""Processes of a job start and end together, and the exit status says how the job ended."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.config.schema import Config, LaunchConfig, ParallelConfig
from megatron_vlm.distributed.launch.launch import launch, processes_for
from megatron_vlm.distributed.launch.local_launcher import run_job
from megatron_vlm.distributed.process import is_under_launcher
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises

PROGRAM = """
import os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["MEGATRON_VLM_RESTART"])
open(f"{sys.argv[1]}/{restart}-{rank}", "w").write(os.environ["WORLD_SIZE"] + str(os.getpid()))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return job(body, count), the exit status of run_job on a module with this body."""

    def run(body: str, count: int = 2, max_restarts: int = 0) -> int:
        (tmp_path / "job_program.py").write_text(PROGRAM + body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return run_job("job_program", [str(tmp_path)], count, max_restarts)

    return run


def starts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("?-?"))


def test_every_rank_is_started_once(job, tmp_path):
    assert job("") == 0
    assert starts(tmp_path) == ["0-0", "0-1"]
    assert (tmp_path / "0-1").read_text().startswith("2")


def test_the_port_of_a_job_is_rank_0s_alone(job):
    """Processes that bind any port or connect meanwhile get another one from the kernel."""
    body = """
import socket
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
with socket.socket() as other:
    try:
        other.bind(address)
    except OSError:
        with socket.create_server(address):
            sys.exit(0)
sys.exit(5)
"""
    assert job(body, 1) == 0


LOSES_A_RANK = """
import torch
import torch.distributed as dist
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.process import LAUNCHER, run_process
from megatron_vlm.distributed.rendezvous import join_world

def work(_):
    join_world(pick_platform("cpu"), 1.0)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 0

if rank == 2:
    del os.environ[LAUNCHER]  # as under torchrun or Slurm
sys.exit(run_process(work, []))
"""


@pytest.mark.full  # three processes import torch
def test_a_rank_that_loses_another_says_so_in_one_sentence(job, capfd):
    assert job(LOSES_A_RANK, 3) == 137
    sentences = capfd.readouterr().err.splitlines()
    assert sentences == [
        "megatron-vlm: rank 2: another rank has ended, or cannot be reached any more; its own "
        "messages say why",
        "megatron-vlm: rank 1 was killed by SIGKILL",
    ]


def test_the_first_failure_counts_and_ends_the_others(job, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("megatron_vlm.distributed.launch.restart.RANK_GRACE_S", 0.5)
    assert job("time.sleep(3600) if rank == 0 else sys.exit(7)") == 7
    assert "rank 1 ended with exit status 7" in capfd.readouterr().err
    pid = int((tmp_path / "0-0").read_text()[1:])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_rank_is_named(job, capfd, monkeypatch):
    monkeypatch.setattr("megatron_vlm.distributed.launch.restart.RANK_GRACE_S", 0.5)
    assert job("rank or os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)") == 137
    assert "rank 0 was killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(("status", "runs"), [(1, 3), (70, 3), (2, 1), (75, 1)])
def test_failures_restart_the_job_and_mistakes_do_not(status, runs, job, tmp_path):
    assert job(f"sys.exit({status})", 1, max_restarts=2) == status
    assert starts(tmp_path) == [f"{restart}-0" for restart in range(runs)]


def test_a_restart_may_succeed(job, tmp_path):
    assert job("sys.exit(restart == 0)", 2, max_restarts=5) == 0
    assert starts(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.parametrize(("restarts", "status"), [(1, 0), (0, 5)])
def test_a_single_process_is_started_again_too(restarts, status, tmp_path, monkeypatch):
    """A launcher starts it again. A job that may not start again runs without a launcher."""
    body = """
    with open(f"{arguments[0]}/attempts", "a") as file:
        print(os.getpid(), file=file)
    return 5 * (os.environ.get("MEGATRON_VLM_RESTART", "0") == "0")
if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
"""
    (tmp_path / "alone.py").write_text("import os, sys\ndef run(arguments):" + body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "alone", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cfg = Config(platform="cpu", launch=LaunchConfig(max_restarts=restarts))
    assert launch(cfg, "alone", importlib.import_module("alone").run, [str(tmp_path)]) == status
    pids = (tmp_path / "attempts").read_text().split()
    assert len(pids) == 1 + restarts and (str(os.getpid()) in pids) == (not restarts)


READY = """
open(f"{sys.argv[1]}/ready-{rank}", "w").close()
time.sleep(60)
"""


@contextmanager
def signals_when_ready(folder: Path, *numbers: int) -> Iterator[None]:
    """Send these signals to this process, the launcher, once two ranks are ready."""

    def send() -> None:
        while len(list(folder.glob("ready-*"))) < 2:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()
    assert starts(folder) == ["0-0", "0-1"]  # the job was not started again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_every_rank_and_the_job_does_not_restart(number, job, tmp_path):
    before = signal.getsignal(number)
    with signals_when_ready(tmp_path, number):
        body = f"signal.signal({int(number)}, lambda *_: sys.exit(75))"
        assert job(body + READY, 2, max_restarts=1) == 75
    assert signal.getsignal(number) == before


def test_a_rank_that_a_signal_precedes_has_nothing_to_save(job, tmp_path, capfd):
    """Rank 0 is killed, as Python is before its signal handlers are set; rank 1 has set its own."""
    with signals_when_ready(tmp_path, signal.SIGTERM):
        body = "rank and signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"
        assert job(body + READY, 2, max_restarts=1) == 75
    assert "killed by" not in capfd.readouterr().err


def test_a_signal_while_ranks_are_started_ends_the_job(job, tmp_path, monkeypatch):
    """No rank has run long enough to have begun anything."""

    def start(*given: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(*given, **more)

    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", start)
    assert job("time.sleep(60)", 2, max_restarts=1) == 75


def test_a_second_interrupt_ends_ranks_that_do_not_hear_it(job, tmp_path, monkeypatch):
    """Ranks in a collective do not hear it, since Python's handler does not run there."""
    monkeypatch.setattr("megatron_vlm.distributed.launch.local_launcher.STOP_S", 0.5)
    with signals_when_ready(tmp_path, signal.SIGINT, signal.SIGINT):
        body = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
        assert job(body + READY, 2, max_restarts=1) == 130


def test_a_rank_that_does_not_end_with_the_others_is_ended(job, capfd, monkeypatch):
    monkeypatch.setattr("megatron_vlm.distributed.launch.restart.LAST_S", 0.5)
    assert job("rank and time.sleep(60)") == 70
    assert "1 of the ranks did not end in 0 s after another had" in capfd.readouterr().err


def test_a_killed_launcher_leaves_no_process(tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
time.sleep(60)
"""
    (tmp_path / "job_program.py").write_text(PROGRAM + body)
    call = f"run_job('job_program', [{str(tmp_path)!r}], 2)"
    code = f"from megatron_vlm.distributed.launch.local_launcher import run_job; {call}"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        while len(starts(tmp_path)) < 2 or not (tmp_path / "0-1").read_text():
            assert launcher.poll() is None
            time.sleep(0.02)
        pids = [int((tmp_path / name).read_text()[1:]) for name in starts(tmp_path)]
        time.sleep(0.2)  # time to set the handlers
    finally:
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/status").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_how_many_processes():
    def count(gpus: int, processes: int | None = None, **parallel: int) -> int:
        launch = LaunchConfig(processes=processes)
        return processes_for(Config(parallel=ParallelConfig(**parallel), launch=launch), gpus)

    assert count(0) == 1 and count(0, tp=2, pp=2) == 4
    assert count(8, tp=2) == 8 and count(8, 4, pp=2) == 4
    refused = {"found": 3, "problem_has": "= 2", "remedy_has": "parallel=auto"}
    with raises(ConfigError, key="launch.processes", **refused):
        count(0, 3, pp=2)


@pytest.mark.parametrize("script", ["train_node.sh", "train_nodes.sh", "train_slurm.sh"])
def test_launch_scripts_are_sound(script):
    path = Path(__file__).parents[2] / "scripts" / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK) and '"$@"' in path.read_text()


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2"}, {"RANK": "0"}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_variables_of_a_launcher_that_do_not_fit_together_are_refused(variables, monkeypatch):
    """A rank that is alone would take its part of the model and of the data for the whole."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_under_launcher()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with raises(ConfigError, key="RANK", found=variables.get("RANK")) as caught:
        is_under_launcher()
    assert f"WORLD_SIZE={variables.get('WORLD_SIZE', 'null')}" in caught.value.problem
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_under_launcher()


@pytest.fixture
def mistaken(tmp_path, monkeypatch):
    """Return a program whose rank 1 makes a mistake of its own, and all others the same one."""
    path = tmp_path / "mistaken.py"
    path.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from megatron_vlm.distributed.process import run_guarded\n"
        "from megatron_vlm.errors import ConfigError\n"
        "def fail(_):\n"
        "    raise ConfigError('alone' if os.environ['RANK'] == '1' else 'the same')\n"
        "status = run_guarded(fail, [])\n"
        # The launcher ends all ranks when the first ends, so each waits until all have spoken.
        "ranks = range(int(os.environ['WORLD_SIZE']))\n"
        "files = [Path(__file__).with_suffix(f'.{rank}') for rank in ranks]\n"
        "mine = files[int(os.environ['RANK'])]\n"
        "attempt = mine.stat().st_size + 1 if mine.exists() else 1\n"
        "mine.write_bytes(b'.' * attempt)\n"
        "while not all(x.exists() and x.stat().st_size >= attempt for x in files):\n"
        "    time.sleep(0.02)\n"
        "sys.exit(status)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return path


def test_what_all_ranks_have_to_say_is_said_once(mistaken, capfd):
    """Each attempt reports it once, and the message of one rank alone is not lost."""
    for _ in range(2):
        assert run_job("mistaken", [], 4) == 2
        err = capfd.readouterr().err
        assert err.count("the same") == 1 and err.count("rank 1: alone") == 1


@pytest.mark.full
def test_under_torchrun_it_is_said_once_too(mistaken):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["--max-restarts=1", str(mistaken)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode
    assert done.stderr.count(": the same") == 2 == done.stderr.count("rank 1: alone")
