# .venv/bin/python -m pytest tests/test_checkpoint_store.py
"""Checkpoint folders: a crash, a full disk or a flipped bit never costs the checkpoint before."""

import logging
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_vlm.checkpoint.store import (
    begin,
    commit,
    find_latest,
    keep,
    partial_of,
    step_folder,
    verify,
    write_file,
)
from megatron_vlm.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parent.parent
FILES = {"rank-00000.safetensors": bytes(range(256)) * 9, "state.json": b"{}", "empty": b""}


def make(run: Path, step: int, files: dict[str, bytes] = FILES) -> Path:
    """A complete checkpoint."""
    folder = step_folder(run, step)
    partial = begin(folder)
    commit(
        folder, [write_file(partial / name, [data[:99], data[99:]]) for name, data in files.items()]
    )
    return folder


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.iterdir())


def test_the_newest_is_found(tmp_path):
    assert find_latest(tmp_path / "nothing") is None
    assert find_latest(tmp_path) is None
    for step in (8, 100_000_000, 16):  # by number, not by name
        make(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert find_latest(tmp_path) == tmp_path / "step-100000000"
    verify(find_latest(tmp_path))


def test_partial_is_passed_over_and_goes_with_the_next_save(tmp_path, caplog):
    first = make(tmp_path, 1)
    write_file(begin(step_folder(tmp_path, 2)) / "rank-00000.safetensors", [b"half"])
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == first
    assert "step-00000002.partial: it was never completed" in caplog.text
    make(tmp_path, 3)
    assert steps(tmp_path) == [1, 3]
    # The same step: what a crash left of it is not mixed with what is written now.
    write_file(begin(step_folder(tmp_path, 4)) / "rank-00007.safetensors", [b"half"])
    assert {path.name for path in make(tmp_path, 4).iterdir()} == {*FILES, "complete.json"}


def missing(path: Path) -> str:
    path.unlink()
    return "cannot be"


def truncated(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "complete.json has changed" if path.name == "complete.json" else "instead of"


def grown(path: Path) -> str:
    path.write_bytes(path.read_bytes() + b"\0")
    return "complete.json has changed" if path.name == "complete.json" else "instead of"


@pytest.mark.parametrize("damage", [missing, truncated, grown])
@pytest.mark.parametrize("name", [*(name for name in FILES if name != "empty"), "complete.json"])
def test_damaged_is_refused_by_name_and_passed_over(damage, name, tmp_path, caplog):
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    reason = damage(second / name)
    with pytest.raises(CheckpointError, match=name) as caught:
        verify(second)
    assert reason in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == first
    assert f"skipped {second}" in caplog.text and name in caplog.text


@pytest.mark.parametrize("name", [*(name for name in FILES if name != "empty"), "complete.json"])
def test_every_flipped_bit_is_found(name, tmp_path):
    folder = make(tmp_path, 1)
    path = folder / name
    data = path.read_bytes()
    bits = range(8 * len(data))
    for bit in random.Random(0).sample(bits, min(len(bits), 500)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"{name} has changed since"):
            verify(folder)
    path.write_bytes(data)
    verify(folder)


def test_a_share_is_part_of_the_files(tmp_path):
    folder = make(tmp_path, 1)
    (folder / "state.json").write_bytes(b"[]")
    verify(folder, slice(0, None, 3))
    verify(folder, slice(1, None, 3))
    verify(folder, slice(3, None, 4))  # more ranks than files
    with pytest.raises(CheckpointError, match=r"state\.json"):
        verify(folder, slice(2, None, 3))


def test_replacing_a_checkpoint_survives_a_crash_in_between(tmp_path):
    make(tmp_path, 1)
    folder = make(tmp_path, 2)
    # As a crash between the two renames leaves it.
    folder.rename(folder.with_name(folder.name + ".old"))
    begin(folder)
    assert find_latest(tmp_path).name == "step-00000002.old"
    assert find_latest(make(tmp_path, 2, {"new": b"new"}).parent) == folder
    assert (folder / "new").exists() and not (folder / "state.json").exists()
    assert steps(tmp_path) == [1, 2]
    make(tmp_path, 2)
    assert (folder / "state.json").exists() and steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"keep_last": 1}, [10]),
        ({"keep_last": 3}, [8, 9, 10]),
        ({"keep_last": 99}, list(range(1, 11))),
        ({"keep_last": 1, "keep_every": 4}, [4, 8, 10]),
        ({"keep_last": 2, "best": 3}, [3, 9, 10]),
        ({"keep_last": 1, "keep_every": 5, "best": 10}, [5, 10]),
        ({"keep_last": 1, "best": 77}, [10]),
    ],
)
def test_retention(kwargs, kept, tmp_path):
    for step in range(1, 11):
        make(tmp_path, step, {"a": b"a"})
    removed = keep(tmp_path, **kwargs)
    assert steps(tmp_path) == kept
    assert sorted(int(path.name[5:]) for path in removed) == sorted({*range(1, 11)} - {*kept})


def test_retention_does_not_count_the_damaged(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    (step_folder(tmp_path, 3) / "state.json").unlink()
    begin(step_folder(tmp_path, 4))
    keep(tmp_path, keep_last=1)
    assert find_latest(tmp_path) == step_folder(tmp_path, 2)
    assert not step_folder(tmp_path, 1).exists()
    with pytest.raises(ConfigError, match="keep_last=0 must be at least 1"):
        keep(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="keep_every=0 must be at least 1"):
        keep(tmp_path, keep_last=1, keep_every=0)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be created: Not a directory; give a folder"):
        begin(step_folder(tmp_path / "run", 1))
    with pytest.raises(CheckpointError, match="is a file"):
        find_latest(tmp_path / "run")
    partial_of(step_folder(tmp_path, 1)).write_text("a file")
    with pytest.raises(CheckpointError, match=r"step-00000001.partial cannot be created"):
        begin(step_folder(tmp_path, 1))


def test_full_disk(tmp_path):
    first = make(tmp_path, 1)
    partial = begin(step_folder(tmp_path, 2))
    (partial / "rank-00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"rank-00000.*No space left on device, after 0 b"):
        write_file(partial / "rank-00000.safetensors", [b"x" * 5000])
    (partial / "complete.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"complete.json.*No space left on device"):
        commit(step_folder(tmp_path, 2), [])
    assert find_latest(tmp_path) == first


def test_commit_looks_for_every_file(tmp_path):
    """A node that writes to a disk of its own would leave a checkpoint without its files."""
    partial = begin(step_folder(tmp_path, 1))
    records = [write_file(partial / name, [data]) for name, data in FILES.items()]
    (partial / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json cannot be found.*share the folder"):
        commit(step_folder(tmp_path, 1), records)
    assert find_latest(tmp_path) is None


def test_no_torch():
    code = "import sys, megatron_vlm.checkpoint.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


WRITER = """
import sys
from pathlib import Path
from megatron_vlm.checkpoint.store import *
run = Path(sys.argv[1])
latest = find_latest(run)
step = 0 if latest is None else int(latest.name[5:13])
while True:
    step += step % 3 != 0 or not step_folder(run, step).exists()  # some are replaced
    print("begin", step, flush=True)
    partial = begin(step_folder(run, step))
    files = [write_file(partial / str(n), [bytes([step % 256]) * 70_000] * 3) for n in range(6)]
    commit(step_folder(run, step), files)
    print("end", step, flush=True)
    keep(run, 2, 5)
    step += step % 3 == 0
"""


@pytest.mark.parametrize("kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills, tmp_path):
    rng, cut_short = random.Random(kills), 0
    for _ in range(kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            times = [(writer.stdout.readline(), time.monotonic()) for _ in range(3)]
            time.sleep(rng.uniform(0, times[1][1] - times[0][1]))
            writer.send_signal(signal.SIGKILL)
            said = [line for line, _ in times] + writer.stdout.readlines()
        complete = max(int(line[4:]) for line in said if line.startswith("end "))
        cut_short += any(tmp_path.glob("*.partial"))
        latest = find_latest(tmp_path)
        assert latest is not None and int(latest.name[5:13]) >= complete
    assert cut_short > kills // 4
