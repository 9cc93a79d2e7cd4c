# .venv/bin/python -m pytest tests/checkpoint/test_full_disk.py
"""A disk without room ends a run with one sentence at any point. Once there is room, the same
command ends as if nothing had happened."""

import errno
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from megatron_vlm.errors import sentences
from tests.run.test_train import command, outside_of_jobs
from tests.serve.test_serve import STEPS, VOCAB, data_of
from tests.support.pool import free_port
from tests.support.serve_client import Client, FailedError, Running, wait_for
from tests.support.sets import write_set

# The disk is memory in a namespace of its own, which needs no privileges and leaves nothing behind.
NAMESPACE = ["unshare", "--map-root-user", "--mount"]
RUN = """
mount -t tmpfs -o $1 tmpfs disk || exit 99
shift
"$@" >first 2>&1
echo $? >status
mount -o remount,size=100m,nr_inodes=1000 disk
"$@" >second 2>&1 || exit 98
mv disk/run/export disk/run/report.html .
"""


def run_on_disk(folder: Path, model: str, room: str) -> tuple[int, str]:
    """Return exit status and output on a disk with this room, then finish with more room."""
    write_set(folder)
    (folder / "disk").mkdir()
    words = command(
        folder,
        model,
        "disk/run",
        *("parallel.pp=1", "train.steps=4", "checkpoint.every=2", "log.trackers=[tensorboard]"),
        *(f"data.eval={folder}/train.jsonl", "eval.samples=3", "eval.generate=true"),
    )
    shell = [*NAMESPACE, "sh", "-c", RUN, "sh", room]
    done = subprocess.run(
        [*shell, *words], cwd=folder, env=outside_of_jobs(), timeout=300, check=False
    )
    assert not done.returncode, (folder / "second").read_text()
    return int((folder / "status").read_text()), (folder / "first").read_text()


@cache
def has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return not subprocess.run(mount, capture_output=True, check=False).returncode


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> bytes:
    """Return the weights of a run with enough room."""
    folder = tmp_path_factory.mktemp("room")
    status, output = run_on_disk(folder, tiny(), "nr_inodes=1000")
    assert status == 0, output
    return (folder / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="unshare cannot make a disk of memory here")
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    "room",
    [
        "size=12k",  # the first files
        "size=3m",  # a checkpoint
        "nr_inodes=4",  # config.yaml
        "nr_inodes=6",  # TensorBoard's file
        "nr_inodes=8",  # predictions
        "nr_inodes=10",  # the folder of the checkpoints
        "nr_inodes=25",  # the export
    ],
)
def test_a_full_disk_is_a_sentence(room, tiny, tmp_path, undisturbed):
    status, output = run_on_disk(tmp_path, tiny(), room)
    assert status == 2 and "Traceback" not in output, output
    *_, last = output.splitlines()
    assert last.startswith("megatron-vlm: rank 0: ") and "No space left on device" in last
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == undisturbed
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")


def test_our_own_mistakes_keep_their_traceback(tmp_path):
    for call in (tmp_path.read_text, (tmp_path / "nothing").read_text, lambda: [][0]):
        with pytest.raises((OSError, IndexError)) as error:
            call()
        assert not sentences(error.value)
    full = OSError(errno.ENOSPC, "in any language", str(tmp_path))
    assert sentences(full) == [
        f"{tmp_path} cannot be used: No space left on device; free space there, and start again"
    ]


SERVICE = 'mount -t tmpfs -o size=16m tmpfs "$1" || exit 99; shift; exec "$@"'


def fill(disk: Path) -> Path:
    """Fill all free room with one file, and return its path."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="unshare cannot make a disk of memory here")
def test_a_service_waits_for_room_on_its_disk(tiny, tmp_path):
    """A request that cannot be stored gets a 503, and nothing is lost after SIGTERM."""
    path, port, disk = tiny(vocab=VOCAB), free_port(), tmp_path / "disk"
    disk.mkdir()
    words = [sys.executable, "-m", "megatron_vlm.cli", "serve", f"model.path={path}"]
    words += [f"run={disk}/run", f"serve.port={port}", "platform=cpu"]
    command = [*NAMESPACE, "sh", "-c", SERVICE, "sh", str(disk), *words]
    running = Running(subprocess.Popen(command), f"http://127.0.0.1:{port}")
    try:
        wait_for(running)
        mounted = Path(f"/proc/{running.process.pid}/root{disk}")
        with Client(running.url, path) as client:
            first, second = client.model(2, seed=1), client.model(2, seed=1)
            data = data_of(path, 0)
            first.gradients(data)
            second.gradients(data)
            filler = fill(mounted)
            with pytest.raises(FailedError, match="503"):
                for _ in range(100):  # until the pages that SQLite has in reserve are full
                    first.ask_gradients(data)
            assert client.http.get(f"{running.url}/healthz").status_code == 200
            filler.unlink()
            assert second.step(**STEPS[0])["grad_norm"] > 0
            assert second.gradients(data)[0]["loss:sum"]
            fill(mounted)
        assert running.stop() == 75
    finally:
        running.kill()
