# .venv/bin/python -m pytest tests/distributed/test_exit_cases.py
"""Ends of processes: everything that a process has started ends with it, in every case."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from getpass import getuser
from pathlib import Path

import pytest

from tests.run.test_train import command, outside_of_jobs
from tests.support.exit_cases import END_S, Marked
from tests.support.exit_jobs import hold, make_scratch, make_sockets
from tests.support.sets import write_set

pytestmark = pytest.mark.alone  # it starts jobs and kills them


def calling(function: Callable[[], None]) -> list[str]:
    """Return a command that calls a function of a module in a process of its own."""
    name = function.__name__
    return [sys.executable, "-c", f"from {function.__module__} import {name}; {name}()"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_data_workers_end_with_a_killed_trainer(number):
    """The workers also hold the trainer's output open, so `train | tee log` would never end."""
    marked = Marked(outside_of_jobs())
    trainer = subprocess.Popen(
        calling(hold), env=marked.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    trainer.stdout.readline()
    assert len(marked.alive()) == 5  # with the server of the workers and Python's own tracker
    trainer.send_signal(number)
    try:
        trainer.communicate(timeout=END_S)  # until no process holds its output open
    finally:
        marked.check_all_gone()


LAST_COLLECTIVES = """
import torch
import torch.distributed as dist
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.rendezvous import join_world

class Slow:
    def __del__(self):
        for _ in range(200_000):
            pass

def reduce():
    tensor = torch.ones(1)
    tensor.slow = Slow()
    dist.group.WORLD.allreduce([tensor])

join_world(pick_platform("cpu"), 1.0)
for _ in range(20):
    reduce()
"""


# An exit function that never ends stands for the destructor of NCCL's groups.
FAILED_OVER_NCCL = """
import atexit, sys, threading
import torch.distributed as dist
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.process import run_process
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.errors import DataError

atexit.register(threading.Event().wait)

def command(arguments):
    join_world(pick_platform("cpu"), 1.0)
    dist.get_backend = lambda *group: "nccl"
    raise eval(arguments[0])

sys.exit(run_process(command, sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        ("DataError('is empty', key='data.train')", 2, "rank 0: data.train is empty"),
        pytest.param("KeyError('size')", 1, "KeyError: 'size'", marks=pytest.mark.full),  # uncaught
    ],
)
def test_a_failed_rank_ends_though_a_group_of_nccl_cannot(error, status, words):
    command = [sys.executable, "-c", FAILED_OVER_NCCL, error]
    done = subprocess.run(command, env=outside_of_jobs(), capture_output=True, text=True)
    assert done.returncode == status and words in done.stderr, done.stderr[-2000:]


@pytest.mark.full
def test_no_process_aborts_while_gloo_frees_tensors():
    """Threads of gloo free these tensors after the script has ended; six of six such scripts ended
    with SIGABRT without leave_world."""
    words = [sys.executable, "-c", LAST_COLLECTIVES]
    done = subprocess.run(words, env=outside_of_jobs(), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_server_of_data_workers_ends_while_it_imports(tmp_path):
    """torch takes ten seconds to import on a busy machine; here it takes an hour."""
    (tmp_path / "torch.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path(__file__).with_name('begun').touch()\n"
        "time.sleep(3600)\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    marked = Marked(outside_of_jobs() | {"PYTHONPATH": os.pathsep.join(paths)})
    code = (
        "import time\n"
        "from megatron_vlm.data.worker_processes import start_server\n"
        "from megatron_vlm.distributed.process import ended_by_signals\n"
        "with ended_by_signals():\n"
        "    start_server()\n"
        "    time.sleep(3600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], env=marked.environment, stdout=subprocess.PIPE
    )
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert trainer.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        trainer.send_signal(signal.SIGTERM)
        trainer.communicate(timeout=END_S)  # until no process holds its output open
    finally:
        marked.check_all_gone()
    assert trainer.returncode == 75


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    write_set(folder)
    return folder


class PipedJob:
    """`train ... 2>&1 | cat` with two ranks and two data workers, trained for a few steps."""

    def __init__(self, folder: Path, model: str, run: str, *more: str):
        self.marked = Marked(outside_of_jobs())
        keys = ("train.steps=100000", "checkpoint.every=2", "data.num_workers=2", *more)
        words = ["sh", "-c", '"$@" 2>&1 | cat', "sh", *command(folder, model, run, *keys)]
        self.pipe = subprocess.Popen(
            words, env=self.marked.environment, stdout=subprocess.PIPE, text=True
        )
        try:
            self._wait_for_steps(folder / run / "metrics.jsonl")
        except BaseException:
            self.marked.kill()
            self.pipe.communicate()  # closes the pipe
            raise

    def _wait_for_steps(self, metrics: Path) -> None:
        until = time.monotonic() + 200
        while not (metrics.exists() and '"step", "step": 4' in metrics.read_text()):
            assert self.pipe.poll() is None and time.monotonic() < until
            time.sleep(0.05)

    def pid_of_launcher(self) -> int:
        for pid, (line, _) in self.marked.alive().items():
            if "-m megatron_vlm.cli " in line and " -c " not in line:
                return pid
        raise AssertionError("there is no launcher")

    def check_end(self, seconds: float) -> str:
        """Check that the pipe ends and that no process is left, and return the output."""
        try:
            out, _ = self.pipe.communicate(timeout=seconds)
        finally:
            self.marked.check_all_gone()
        return out


def test_a_job_that_fails_to_start_leaves_no_open_pipe(folder, tiny):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(AssertionError):
            PipedJob(folder, tiny(), "refused", "train.steps=0")
        gc.collect()
    assert [each.message for each in caught if each.category is ResourceWarning] == []


@pytest.mark.slow
@pytest.mark.rotate(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_outlives_a_killed_rank(rank, folder, tiny):
    job = PipedJob(folder, tiny(), f"rank-{rank}")
    os.kill(job.marked.pid_of(rank), signal.SIGKILL)
    assert f"rank {rank} was killed by SIGKILL" in job.check_end(60)


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(folder, tiny):
    job = PipedJob(folder, tiny(), "launcher")
    os.kill(job.pid_of_launcher(), signal.SIGKILL)
    assert "stopped by a signal after" in job.check_end(60)  # the ranks have saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to_launcher", "words"),
    [
        ((), ("rank 0: rank 1 has not been heard from for", "rank 0 ended with exit status 70")),
        ((signal.SIGKILL,), ("the run resumes from its last complete checkpoint",)),
        ((signal.SIGINT, signal.SIGINT), ()),
    ],
    ids=["alone", "killed launcher", "second interrupt"],
)
def test_nothing_outlives_ranks_that_hang(to_launcher, words, folder, tiny):
    """They cannot save: one of them is stopped, and the other waits for it. The launcher, or the
    first one to notice, ends the others."""
    watched = ("launch.timeout_minutes=0.5",) if words else ()
    job = PipedJob(folder, tiny(), f"hanging-{len(to_launcher)}", *watched)
    os.kill(job.marked.pid_of(1), signal.SIGSTOP)
    time.sleep(1)  # until the other rank waits for it in a collective
    for number in to_launcher:
        os.kill(job.pid_of_launcher(), number)
        time.sleep(0.5)
    out = job.check_end(200 if watched else 60)
    assert all(word in out for word in words), out


@pytest.mark.slow
def test_nothing_outlives_restarts(folder, tiny):
    job = PipedJob(folder, tiny(), "restarts", "launch.max_restarts=2")
    killed = set()
    while len(killed) < 3:
        assert job.pipe.poll() is None
        time.sleep(3)  # the ranks are at different points when they are killed
        with contextlib.suppress(AssertionError):
            if (pid := job.marked.pid_of(0)) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    assert "starting again, restart 2 of launch.max_restarts=2" in job.check_end(60)


@contextlib.contextmanager
def scratching(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(calling(make_scratch), env=environment, **pipes) as process:
        try:
            yield process, Path(process.stdout.readline().split()[0])
        finally:
            process.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder whose name leaves room for that of a socket in it: Linux allows 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow  # it starts four processes, one after the other
def test_folders_of_killed_processes_go_at_the_next_start(short_path):
    """Folders of live processes and folders without a known owner stay."""
    tmp_path = short_path
    marked = Marked(outside_of_jobs() | {"TMPDIR": str(tmp_path)})
    owners = {"no-owner": None, "of-another-machine": "elsewhere"}
    for name, host in owners.items():
        (tmp_path / f"megatron_vlm-{name}").mkdir()
        if host is not None:
            (tmp_path / f"megatron_vlm-{name}" / "owner.lock").write_text(host)
    with scratching(marked.environment) as (killed, left):
        killed.kill()
        killed.wait()
    marked.check_all_gone()
    assert left.is_dir() and (left / "owner.lock").is_file()
    with scratching(marked.environment) as (_, alive), scratching(marked.environment) as other:
        expected = {alive.name, other[1].name, *(f"megatron_vlm-{name}" for name in owners)}
        assert {path.name for path in tmp_path.iterdir()} - {
            f"torchinductor_{getuser()}"
        } == expected
        other[0].communicate("")
        assert not other[1].exists() and alive.exists()
    marked.check_all_gone()


@pytest.mark.full
def test_sockets_have_a_folder_of_their_own_where_the_name_of_tmpdir_is_too_long(tmp_path):
    """The other folder is as private as one in TMPDIR, and is removed with the process, too."""
    long = tmp_path / ("a-folder-of-a-job-in-a-cluster" * 4)
    long.mkdir()
    environment = outside_of_jobs() | {"TMPDIR": str(long)}
    words = calling(make_sockets)
    out = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    folders = out.stdout.removeprefix("[3, 3] ").split()
    assert Path(folders[0]).parent == long and Path(folders[1]).parent == Path("/tmp")
    assert folders[2:] == ["0o40700", folders[1], "/tmp"]
    assert not Path(folders[0]).exists() and not Path(folders[1]).exists()
