# .venv/bin/python -m pytest tests/distributed/test_watchdog.py
"""A process that makes no progress ends, whatever it hangs in, and says where that was."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_vlm.distributed import watchdog_process

pytestmark = pytest.mark.alone  # it starts jobs and kills them

START = """
import os, sys, time
from megatron_vlm.distributed.watchdog import Watchdog
watchdog = Watchdog(3, float(sys.argv.pop(1)), os.environ.get("STACKS", ""))
watchdog.begin_phase(5, "data")
print("ready", flush=True)
"""
GLOO = """
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
_dump_fr_trace()  # torch takes seconds for its first record
"""
FOR_EVER = "while True: watchdog.alive(); time.sleep(0.05)"


@contextmanager
def process(
    body: str, *arguments: str, timeout_s: float = 0.6, start: str = START
) -> Iterator[subprocess.Popen]:
    """A process that has begun a phase and goes on with `body`."""
    with subprocess.Popen(
        [sys.executable, "-c", start + body, str(timeout_s), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("time.sleep(3600)", "step 5: data"),
        ("open(sys.argv[1])", "step 5: data"),
        ("open(sys.argv[1])", "step 0: start"),
    ],
)
def test_no_progress_ends_it(body, where, tmp_path, monkeypatch):
    """Its stacks show the function that hangs. Without a folder that can be made, it prints
    them."""
    folder = tmp_path / ("fifo/stacks" if "0" in where else "stacks")
    monkeypatch.setenv("STACKS", str(folder))
    body = f"def hanging(): {body}\nhanging()"
    os.mkfifo(tmp_path / "fifo")  # opening it waits for a writer
    start = START if "data" in where else START.replace("watchdog.begin_phase", "# ")
    with process(body, str(tmp_path / "fifo"), start=start) as stuck:
        _, err = stuck.communicate(timeout=30)
    assert stuck.returncode == 70
    assert "rank 3: rank 3 has been stuck for" in err and f"at {where}. Stopping; {folder}" in err
    if "0" in where:
        assert "Stacks of rank 3:" in err and "in hanging" in err
    else:
        assert "in hanging" in (folder / "rank3.txt").read_text() and "in hanging" not in err


@pytest.mark.full
def test_the_last_collectives_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKS", str(tmp_path))
    with process("time.sleep(3600)", start=GLOO + START) as stuck:
        stuck.communicate(timeout=30)
    record = pickle.loads((tmp_path / "collectives_3").read_bytes())
    assert [each["profiling_name"] for each in record["entries"]] == ["gloo:barrier"]


def write_dumps(folder: Path) -> subprocess.CompletedProcess:
    """Let the watchdog's process write the dumps of a rank that has ended."""
    reading, writing = os.pipe()
    fds = reading, *(os.memfd_create(name) for name in ("stacks", "collectives"))
    for fd in fds[1:]:
        os.write(fd, b"dump")
    os.close(writing)
    words = map(str, (reading, 3, 5.0, 60.0, folder, *fds[1:]))
    command = [sys.executable, "-I", "-S", watchdog_process.__file__, *words]
    done = subprocess.run(command, pass_fds=fds, timeout=30, capture_output=True, text=True)
    for fd in fds:
        os.close(fd)
    return done


PLACES = "rank3.txt", "rank3.txt.new", "collectives_3", "collectives_3.new"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["symlink", "link", "mkfifo"])
def test_dumps_replace_what_is_in_their_place(kind, place, tmp_path):
    """A link is not followed, and nobody has to read from a pipe."""
    folder, victim = tmp_path / "stacks", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    make = getattr(os, kind)
    make(*([victim] if "link" in kind else []), folder / place)
    done = write_dumps(folder)
    assert (done.returncode, done.stderr, victim.read_text()) == (0, "", "mine")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "rank3.txt": "dump",
        "collectives_3": "dump",
    }


def test_dumps_do_not_follow_a_link_of_their_folder(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "stacks").symlink_to("victim")
    done = write_dumps(tmp_path / "stacks")
    assert (done.returncode, done.stderr) == (0, "Stacks of rank 3:\ndump\n")
    assert not [*(tmp_path / "victim").iterdir()]


BLOCKED = """
import os
from megatron_vlm.distributed import watchdog_process
watchdog_process._WRITE_S = 0.1
stacks, collectives = os.memfd_create("stacks"), os.memfd_create("collectives")
os.write(stacks, bytes(10**6))
watchdog_process.write_dumps("", 3, stacks, collectives)
"""


def test_its_process_ends_even_if_it_cannot_write():
    """Nobody reads the pipe, which has no room for the stacks."""
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stderr=subprocess.PIPE) as writing:
        assert writing.wait(60) == -signal.SIGALRM


@pytest.mark.parametrize("progress", ["busy", "alive"])
def test_progress_goes_on(progress, tmp_path, monkeypatch):
    monkeypatch.setenv("STACKS", str(tmp_path / "stacks"))
    body = f"for _ in range(50): watchdog.{progress}(); time.sleep(0.05)\nwatchdog.stop()"
    with process(body, timeout_s=1.5) as working:
        working.communicate(timeout=30)
    assert working.returncode == 0 and not (tmp_path / "stacks").exists()


def test_a_call_that_keeps_pythons_lock_is_ended_from_outside(tmp_path, monkeypatch):
    """A signal makes it dump its stacks."""
    monkeypatch.setenv("STACKS", str(tmp_path / "stacks"))
    with process("def hanging(): sum(range(10**15))\nhanging()") as stuck:
        _, err = stuck.communicate(timeout=30)
    assert "in hanging" in (tmp_path / "stacks" / "rank3.txt").read_text()
    assert stuck.returncode == -signal.SIGKILL
    assert "rank 3 has not run for" in err and "at step 5: data. Killing it;" in err


def test_a_stopped_process_is_ended_from_outside():
    with process(FOR_EVER) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        _, err = stopped.communicate(timeout=30)
    assert stopped.returncode == -signal.SIGKILL
    assert "rank 3 has not run for" in err


@pytest.mark.slow
def test_a_pause_of_all_its_processes_does_not_count():
    """As by Ctrl-Z."""
    body = "for _ in sys.stdin: watchdog.alive()"
    with process(body, timeout_s=4) as paused:
        for seconds, number in ((0.5, signal.SIGSTOP), (6, signal.SIGCONT), (0.5, signal.SIGCONT)):
            paused.stdin.write("\n")
            paused.stdin.flush()
            time.sleep(seconds)
            os.killpg(paused.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            paused.wait(1)


IMPORTING = """
while time.process_time() < float(sys.argv[1]): pass
watchdog.stop()
"""


@pytest.mark.parametrize(("began", "status"), [("", 0), ("watchdog.begin_phase(5, 'data')", 70)])
def test_work_is_progress_at_the_start(began, status):
    """Imports read little where libraries are mapped, and take long on a machine under load."""
    with process(
        began + IMPORTING, "2", start=START.replace("watchdog.begin_phase", "# ")
    ) as importing:
        _, err = importing.communicate(timeout=120)
    assert importing.returncode == status, err


READING = """
for _ in range(50):
    with open(sys.argv[1], "rb") as file: file.read()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("files", "status"), [(True, 0), (False, 70)])
def test_bytes_that_move_are_progress_where_files_are_read(files, status, tmp_path):
    (tmp_path / "file").write_bytes(bytes(2**17))
    body = f"watchdog.begin_phase(5, 'opening', files={files})" + READING + "watchdog.stop()"
    with process(body, str(tmp_path / "file"), timeout_s=1.5) as reading:
        reading.communicate(timeout=30)
    assert reading.returncode == status


def read(path: str) -> None:
    """What a data worker does: read for two seconds."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        Path(path).read_bytes()
        time.sleep(0.05)


WORKER = """
from multiprocessing import get_context
from tests.distributed.test_watchdog import read
worker = get_context("forkserver").Process(target=read, args=(sys.argv[1],))
worker.start()
worker.join()
watchdog.stop()
"""


def test_bytes_that_data_workers_move_are_progress(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2**17))
    body = "watchdog.begin_phase(5, 'opening', files=True)" + WORKER
    with process(body, str(tmp_path / "file"), timeout_s=1.5) as reading:
        _, err = reading.communicate(timeout=30)
    assert reading.returncode == 0, err


def test_it_ends_even_if_nobody_reads_what_it_says(tmp_path):
    """`train 2>&1 | less`, paused: the pipe is full, and writing to it never returns."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    code = START + "time.sleep(3600)"
    stuck = subprocess.Popen(
        [sys.executable, "-c", code, "0.6"], stdout=subprocess.DEVNULL, stderr=writing
    )
    try:
        assert stuck.wait(30) == 70
    finally:
        stuck.kill()
        stuck.wait()
        os.close(reading)
        os.close(writing)


def test_a_rank_that_does_not_end_after_its_launcher_is_ended(monkeypatch):
    """However much progress it makes."""
    monkeypatch.setenv("MEGATRON_VLM_LAUNCHER", "1")  # is not its parent: that one has died
    with process(FOR_EVER) as orphan:
        _, err = orphan.communicate(timeout=30)
    assert orphan.returncode == 70
    assert "rank 3: the launcher has been dead for" in err


def test_what_it_started_ends_with_it():
    with process(FOR_EVER) as killed:
        until = time.monotonic() + 20
        task = Path(f"/proc/{killed.pid}/task/{killed.pid}")
        (sentinel,) = (task / "children").read_text().split()
        killed.kill()
    while Path(f"/proc/{sentinel}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
