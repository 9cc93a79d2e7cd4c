# .venv/bin/python -m pytest tests/run/test_faults.py
"""Ranks that die or hang: the others end too, and the run resumes from its checkpoint.
test_checkpoint.py kills at random moments, test_retention.py during every write."""

import contextlib
import datetime
import fcntl
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_vlm.config import load_config
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.distributed.agreement import Vote, fail_together
from megatron_vlm.distributed.collectives import host_group
from megatron_vlm.distributed.process import run_guarded
from megatron_vlm.errors import ConfigError, DataError, LostError
from megatron_vlm.train import run_train, train
from tests.run.test_train import command, go_pooled, outside_of_jobs, steps_of, values
from tests.support.exit_cases import Marked
from tests.support.pool import free_port
from tests.support.process_tree import ProcessTree
from tests.support.sets import write_set
from tests.support.suites import full, slow

pytestmark = pytest.mark.alone  # it starts jobs and kills them

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_set(folder)
    return folder


def arguments(folder: Path, model: str, run: str, *more: str) -> list[str]:
    return command(folder, model, run, f"train.steps={STEPS}", "checkpoint.every=2", *more)


class Job:
    """A run at PP=2 as a user starts it."""

    def __init__(self, folder: Path, model: str, run: str, *more: str):
        self.metrics = folder / run / "metrics.jsonl"
        marked = Marked(outside_of_jobs())
        self.pid_of = marked.pid_of
        self.process = subprocess.Popen(
            arguments(folder, model, run, *more),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=marked.environment,
            text=True,
        )

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 200
        while not (self.metrics.exists() and f'"step", "step": {step}' in self.metrics.read_text()):
            assert self.process.poll() is None and time.monotonic() < until
            time.sleep(0.02)

    def end(self, seconds: float) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, err


@pytest.mark.slow  # test_checkpoint.py has kills that cost less
def test_a_killed_rank_ends_the_job_and_the_run_resumes(folder, tiny, pool):
    job = Job(folder, tiny(), "killed")
    job.wait_for_step(4)
    os.kill(job.pid_of(1), signal.SIGKILL)
    status, err = job.end(60)
    assert status == 137 and "rank 1 was killed by SIGKILL" in err
    before = [line["step"] for line in steps_of(folder / "killed")]
    saved = sorted(path.name for path in (folder / "killed" / "checkpoints").glob("step-*"))
    done, _, err = go_pooled(pool, 2, *options(folder, tiny(), "killed"))
    assert done == 0, err
    whole, _, err = go_pooled(pool, 2, *options(folder, tiny(), "whole"))
    assert whole == 0, err
    steps = steps_of(folder / "killed")
    again = steps[len(before) :]
    # The run lost the steps after its last complete checkpoint, and no others.
    complete = [name for name in saved if name.count(".") == 0]
    assert again[0]["step"] == int(complete[-1].split("-")[1]) + 1 >= before[-1] - 2
    last = {step["step"]: step for step in steps}
    assert values(list(last.values())) == values(steps_of(folder / "whole"))
    one, other = (folder / run / "export" / "model.safetensors" for run in ("killed", "whole"))
    assert one.read_bytes() == other.read_bytes()


def options(folder: Path, model: str, run: str) -> tuple:
    return folder, model, run, f"train.steps={STEPS}", "checkpoint.every=2"


@pytest.mark.slow  # it waits for the time-out
def test_a_rank_that_is_stuck_is_named(folder, tiny):
    job = Job(folder, tiny(), "stopped", "launch.timeout_minutes=0.5", "train.steps=100000")
    job.wait_for_step(3)
    os.kill(stopped := job.pid_of(1), signal.SIGSTOP)
    try:
        status, err = job.end(120)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher has killed it
            os.kill(stopped, signal.SIGKILL)
    assert status == 70
    assert "rank 0: rank 1 has not been heard from for" in err
    assert "launch.timeout_minutes=0.5" in err and "it was at step" in err


def watches_left(overrides: list[str]) -> int:
    """Return the number of watches left by a run that could not be opened: a watch that is left
    would end the process."""
    with pytest.raises((ConfigError, DataError), match=r"none\.jsonl|another rank"):
        train(load_config(overrides))
    watches = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    for thread in watches:
        thread.join(0.5)
    return sum(thread.is_alive() for thread in watches)


def test_a_run_that_fails_to_open_leaves_no_watch(folder, tiny, pool):
    overrides = arguments(folder, tiny(), "unopened", f"data.train={folder}/none.jsonl")[4:]
    assert pool.run(watches_left, 2, overrides) == [0, 0]


@contextlib.contextmanager
def opening_blocks(path: Path) -> Iterator[None]:
    """Make every open of the file wait for at most 45 s, as on a file system that has gone."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it announces each open of the file
    with open(path, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        try:
            yield
        finally:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            signal.signal(signal.SIGIO, before)


def run_into(_: Any, words: list[str], err: Path, variables: dict[str, str]) -> None:
    """Run a rank whose messages go to a file."""
    os.environ.update(variables)
    with open(err, "w") as file:
        os.dup2(file.fileno(), 2)
    run_guarded(run_train, words)


@pytest.mark.parametrize(
    ("name", "phase"),
    [("model.safetensors", "start"), full("preprocessor_config.json", "opening data.train")],
)
def test_a_file_that_cannot_be_opened_is_named(name, phase, folder, tiny, process_tree, tmp_path):
    """The same holds before the first step."""
    model = shutil.copytree(tiny(), tmp_path / "model")
    more = ("parallel.pp=1", "launch.timeout_minutes=0.05")
    words = arguments(folder, str(model), "blocked", *more)[4:]
    with opening_blocks(model / name):
        err = words_of_the_end(process_tree, words, tmp_path / "err")
    assert "rank 0 has been stuck for" in err and f"it was at step 0: {phase}." in err


def words_of_the_end(tree: ProcessTree, words: list[str], err: Path, **variables: str) -> str:
    """Return the messages of a rank that ends itself."""
    child = tree.fork(run_into, words, err, variables)
    assert child.connection.poll(40), "it still waits"
    child.kill()
    return err.read_text()


def test_a_meeting_place_that_says_nothing_ends_the_run(folder, tiny, process_tree, tmp_path):
    words = arguments(folder, tiny(), "alone", "launch.timeout_minutes=0.05")[4:]
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        err = words_of_the_end(process_tree, words, tmp_path / "err", **rank, **address)
    place = ":".join(address.values())
    assert "rank 1 has been stuck for" in err and f"meeting the other ranks at {place}." in err


def test_hosts_wait_for_each_other_without_a_limit(pool):
    """Loading, saving and indexing may outlast the time-out of the other groups."""
    for limit, others in pool.run(time_limits, 2):
        assert limit >= datetime.timedelta(days=1) > others


def time_limits() -> tuple[datetime.timedelta, datetime.timedelta]:
    groups = host_group(), dist.group.WORLD
    limit, others = (group._get_backend(torch.device("cpu")).options._timeout for group in groups)
    return limit, others


def outcome(body: Callable[[], None], **how: Any) -> str:
    """Return the outcome of a rank's call of fail_together."""
    try:
        with fail_together(DataError, **how):
            body()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def fail_and_vote() -> list[str]:
    rank = dist.get_rank()

    def fine() -> None: ...

    def fail() -> None:
        raise OSError(f"disk {rank}")

    only_rank_1 = fail if rank == 1 else fine
    vote = Vote.STOP if rank == 0 else Vote.OK
    outcomes = [
        outcome(fine),
        outcome(only_rank_1),
        outcome(only_rank_1, message="see rank 1"),
        outcome(fail),
        outcome(fine, vote=vote),
        outcome(only_rank_1, vote=vote),
    ]
    if rank == 1:  # rank 0 is not informed, and does not wait
        outcomes.append(outcome(fail, catches=DataError))
    return [*outcomes, outcome(fine)]


def test_ranks_fail_and_stop_together(pool):
    first, second = pool.run(fail_and_vote, 2)
    own = "OSError: disk 1"
    stopped = "Stopped: "
    assert second == ["went on", own, own, own, stopped, own, own, "went on"]
    received, pointed = "DataError: disk 1", "DataError: see rank 1"
    assert first == ["went on", received, pointed, "OSError: disk 0", stopped, received, "went on"]


def test_an_unwritable_run_folder_is_reported(tiny, folder, pool, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = go_pooled(pool, 1, folder, tiny(), tmp_path / "file" / "run", "parallel.pp=1")
    assert status == 2
    assert "cannot be written: Not a directory; give another folder" in err


class Dying:
    """Tasks, the third of which dies of a signal, as from the kernel when memory runs out."""

    def __init__(self, number: int):
        self.number = number

    def __getitem__(self, task: int) -> int:
        if task == 2:
            os.kill(os.getpid(), self.number)
            time.sleep(60)
        return task


@pytest.mark.parametrize(
    ("number", "remedy"),
    [full(signal.SIGKILL, "more memory"), slow(signal.SIGBUS, "enlarge /dev/shm")],
)
def test_a_killed_data_worker_is_named(number, remedy):
    with pytest.raises(LostError) as caught:
        list(map_in_processes(Dying(number), range(9), 2, 1))
    error = caught.value
    assert re.fullmatch(r"data worker 0 \(process \d+\)", error.place)
    assert number.name in error.problem and remedy in error.remedy
    less = "lower data.num_workers, data.prefetch, data.max_pixels or train.micro_batch_size"
    assert less in error.remedy


class Doubled:
    def __getitem__(self, task: int) -> int:
        return 2 * task


@pytest.mark.full
@pytest.mark.parametrize("before", [0, 3])
def test_tasks_that_fail_come_after_the_results_before_them(before):
    """The earlier results arrive for any number of tasks drawn ahead. No half-made DataLoader is
    left: once collected, it and a thread of torch close the same pipes, and pytest reports the
    thread's error."""

    def tasks() -> Iterator[int]:
        yield from range(before)
        raise DataError("no more tasks")

    results = []
    with pytest.raises(DataError, match="no more tasks"):
        for result in map_in_processes(Doubled(), tasks(), 2, 4):
            results.append(result)
    assert results == [2 * task for task in range(before)]
    gc.collect()
    time.sleep(0.5)
    assert not [thread for thread in threading.enumerate() if "Queue" in thread.name]


@pytest.mark.full
def test_an_error_of_a_data_worker_stays_what_it_is():
    with pytest.raises(KeyError):
        next(map_in_processes({}, range(1), 1, 1))


def lose_on_one() -> list[str]:
    """Lose a data worker on the second of two ranks, then fail on both, in different ways."""
    rank = dist.get_rank()

    def lose() -> None:
        raise LostError("killed by SIGKILL")

    def fail() -> None:
        raise DataError("wrong")

    def fine() -> None: ...

    first = outcome(lose if rank else fine, message="see the other")
    return [first, outcome(lose if rank else fail)]


def test_all_ranks_end_so_that_the_job_starts_again(pool):
    """A mistake of the user would end the job for good, whichever rank is the first to end."""
    first, second = pool.run(lose_on_one, 2)
    assert first == ["LostError: see the other", "DataError: wrong"]
    assert second == ["LostError: killed by SIGKILL"] * 2


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def data_workers(pid: int) -> list[int]:
    """Return the worker processes of a rank, which are those of its server."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid)}
    servers = [child for child, command in commands.items() if b"forkserver" in command]
    return [worker for server in servers for worker in children(server)]


@pytest.mark.slow  # test_a_killed_data_worker_is_named has the sentence
@pytest.mark.rotate(1)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_whose_data_worker_is_killed(restarts, folder, tiny):
    """The job reports it in one sentence, and starts again where it may."""
    more = ("data.num_workers=1", f"launch.max_restarts={restarts}", "train.steps=40")
    job = Job(folder, tiny(), f"killed-worker-{restarts}", "checkpoint.every=100", *more)
    job.wait_for_step(2)
    (worker,) = data_workers(job.pid_of(0))
    os.kill(worker, signal.SIGKILL)
    status, err = job.end(200)
    expected = f"megatron-vlm: rank 0: data worker 0 (process {worker}): was killed by SIGKILL"
    assert expected in err and "Traceback" not in err, err
    assert "megatron-vlm: rank 1: another rank could not load its data" in err
    assert status == (0 if restarts else 1), err


def test_started_ranks_that_disagree_about_their_number_end(folder, tiny, process_tree, tmp_path):
    """The ranks start as from two terminals."""
    words = arguments(folder, tiny(), "disagree", "parallel.pp=1")[4:]
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank, world in enumerate(("2", "3")):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
        ranks.append(process_tree.fork(run_into, words, tmp_path / str(rank), shared | own))
    for child in ranks:
        assert child.connection.poll(60), "it still waits"
        child.kill()
    for rank, (own_size, other_size) in enumerate(((2, 3), (3, 2))):
        err = (tmp_path / str(rank)).read_text()
        assert f"rank {rank}: WORLD_SIZE={own_size} " in err and "Traceback" not in err
        assert f"{other_size} of rank {1 - rank}, " in err and f" at 127.0.0.1:{port};" in err
