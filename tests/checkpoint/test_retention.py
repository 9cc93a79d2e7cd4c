# .venv/bin/python -m pytest tests/checkpoint/test_retention.py
"""Checkpoint folders: no crash, full disk or flipped bit costs the previous checkpoint."""

import json
import logging
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron_vlm.checkpoint.manifest import Manifest, read_manifest, verify, write_file
from megatron_vlm.checkpoint.run_checkpoints import (
    check_leftovers,
    commit,
    find_checkpoint,
    held_checkpoint,
    other_lines,
    prune,
    step_folder,
)
from megatron_vlm.errors import CheckpointError
from megatron_vlm.io.atomic import MARK, begin, partial_of
from tests.support.checkpoints import find_latest
from tests.support.error_fields import raises
from tests.support.suites import slow

ROOT = Path(__file__).parents[2]
FILES = {"rank-00000.safetensors": bytes(range(256)) * 9, "state.json": b"{}", "empty": b""}


RUN = "an id"


def make(
    run: Path,
    step: int,
    files: dict[str, bytes] = FILES,
    parent: Manifest | None = None,
    writer: str | None = RUN,
) -> Path:
    """Write a complete checkpoint and return its folder."""
    folder = step_folder(run, step)
    partial = begin(folder, writer)
    records = [write_file(partial / name, [data[:99], data[99:]]) for name, data in files.items()]
    commit(folder, records, writer, parent)
    return folder


def go_on(run: Path, steps: Iterable[int], parent: Manifest | None = None, **rules) -> Manifest:
    """Write a line of checkpoints, which name the one before, and return the last manifest. With
    rules, each save prunes the run."""
    history = "" if parent is None else parent.id
    for step in steps:
        files = {"state.json": f"{history} {step}".encode()}
        parent = read_manifest(make(run, step, files, parent))
        if rules:
            prune(run, parent, **rules)
    assert parent is not None
    return parent


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.iterdir())


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_the_newest_is_found(tmp_path):
    assert find_latest(tmp_path / "nothing") is None
    assert find_latest(tmp_path) is None
    for step in (8, 16, 100_000_000):
        make(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert find_latest(tmp_path) == tmp_path / "step-100000000"
    verify(find_latest(tmp_path))
    make(tmp_path, 12)  # the last one written counts, even with a lower step
    assert find_latest(tmp_path) == tmp_path / "step-00000012"


def test_a_deleted_checkpoint_is_answered_with_those_that_exist(tmp_path):
    for step in (8, 16):
        make(tmp_path, step)
    with raises(CheckpointError, remedy_has="has step-00000008, step-00000016"):
        find_checkpoint(tmp_path / "step-00000004")
    with raises(CheckpointError, remedy_has="give RUN or RUN/checkpoints/step-..."):
        find_checkpoint(tmp_path / "other")


def test_partial_is_passed_over_and_goes_with_the_next_save(tmp_path, caplog):
    first = make(tmp_path, 1)
    write_file(begin(step_folder(tmp_path, 2), RUN) / "rank-00000.safetensors", [b"half"])
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == first
    assert "step-00000002.partial: it was never completed" in caplog.text
    make(tmp_path, 3)
    assert steps(tmp_path) == [1, 3]
    # Files that a crash left of the same step are not mixed with the new ones.
    write_file(begin(step_folder(tmp_path, 4), RUN) / "rank-00007.safetensors", [b"half"])
    assert {path.name for path in make(tmp_path, 4).iterdir()} == {*(*FILES, MARK, "complete.json")}


@pytest.mark.parametrize("grown_by", [None, -1, 1])
@pytest.mark.parametrize("name", [*(name for name in FILES if name != "empty"), "complete.json"])
def test_damaged_is_refused_by_name_and_passed_over(grown_by, name, tmp_path, caplog):
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    path, problem = second / name, ""
    if grown_by is None:
        path.unlink()
    else:
        size = path.stat().st_size
        path.write_bytes((path.read_bytes() + b"\0")[: size + grown_by])
        if name != "complete.json":
            problem = f"{size + grown_by:,} bytes instead of {size:,}"
    with raises(CheckpointError, place=str(path), problem_has=problem):
        verify(second)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == first
    assert f"skipped {second}" in caplog.text and name in caplog.text


def flip_a_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


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
        with raises(CheckpointError, place=str(path)):
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
    # A crash between the two renames leaves this state.
    aside = folder.rename(folder.with_name(folder.name + ".aside1"))
    begin(folder, RUN)
    assert find_latest(tmp_path) == aside
    # When the step is written again, the copy put aside is no longer needed. It stays until `keep`
    # removes it, as after a crash before its removal.
    head = read_manifest(make(tmp_path, 2))
    assert find_latest(tmp_path) == folder
    assert names(tmp_path) == ["step-00000001", "step-00000002", aside.name]
    prune(tmp_path, head, keep_last=2)
    assert steps(tmp_path) == [1, 2]
    make(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("writer", [RUN, None])
def test_only_what_belongs_to_no_run_is_replaced_by_something_else(writer, tmp_path, caplog):
    """A group's `save` overwrites the folder that it gets; the checkpoints of a run stay."""
    folder = make(tmp_path, 2, writer=writer)
    with caplog.at_level(logging.WARNING):
        make(tmp_path, 2, {"new": b"new"}, writer=writer)
    assert (folder / "new").exists() and not (folder / "state.json").exists()
    if writer is None:
        assert steps(tmp_path) == [2]
    else:
        assert (tmp_path / "step-00000002.aside1" / "state.json").exists()
        assert "step-00000002.aside1\n" in caplog.text
    # Files that no checkpoint wrote stay, too, with a writer and without one.
    (folder / "thesis.txt").write_text("mine")
    make(tmp_path, 2, {"newer": b"newer"}, writer=writer)
    [thesis] = tmp_path.glob("*/thesis.txt")
    assert thesis.read_text() == "mine"


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
    removed = prune(tmp_path, go_on(tmp_path, range(1, 11)), **kwargs)
    assert steps(tmp_path) == kept
    assert sorted(int(path.name[5:]) for path in removed) == sorted({*range(1, 11)} - {*kept})


def test_retention_does_not_count_the_damaged(tmp_path):
    head = go_on(tmp_path, (1, 2, 3, 4))
    (step_folder(tmp_path, 3) / "state.json").unlink()
    begin(step_folder(tmp_path, 5), RUN)
    prune(tmp_path, head, keep_last=2)
    assert find_latest(tmp_path) == step_folder(tmp_path, 4)
    assert names(tmp_path) == [
        *("step-00000002", "step-00000003", "step-00000004", "step-00000005.partial")
    ]


def test_what_was_just_written_is_never_removed(tmp_path):
    """A run starts anew because both checkpoints are damaged, and these have the higher steps."""
    go_on(tmp_path, range(3, 19, 3), keep_last=2)
    assert steps(tmp_path) == [15, 18]
    for step in (15, 18):
        flip_a_byte(step_folder(tmp_path, step) / "state.json")
    assert find_latest(tmp_path) is None
    head = go_on(tmp_path, (3, 6, 9), keep_last=2)
    assert steps(tmp_path) == [6, 9, 15, 18]
    assert find_latest(tmp_path) == step_folder(tmp_path, 9)
    go_on(tmp_path, (12, 15), head, keep_last=2)
    assert find_latest(tmp_path) == step_folder(tmp_path, 15)
    assert names(tmp_path) == [
        *("step-00000012", "step-00000015", "step-00000015.aside1", "step-00000018")
    ]


def test_a_line_that_was_left_stays_and_is_not_continued(tmp_path):
    go_on(tmp_path, (3, 6, 9, 12, 15, 18), keep_last=3)
    twelve = read_manifest(step_folder(tmp_path, 12))
    new = go_on(tmp_path, (15,), twelve, keep_last=3)  # other contents: another line
    assert find_latest(tmp_path) == step_folder(tmp_path, 15)
    abandoned = ["step-00000015.aside1", "step-00000018"]
    assert [path.name for path in other_lines(tmp_path, new)] == abandoned
    assert names(tmp_path) == ["step-00000012", "step-00000015", *abandoned]
    new = go_on(tmp_path, (18, 21), new, keep_last=1)
    assert names(tmp_path) == ["step-00000015.aside1", "step-00000018.aside1", "step-00000021"]
    assert other_lines(tmp_path, new) == [tmp_path / name for name in names(tmp_path)[:2]]
    assert other_lines(tmp_path, None) == [tmp_path / name for name in names(tmp_path)]


def test_what_others_wrote_is_never_removed(tmp_path, caplog):
    """Another run's checkpoints, added files and folders with similar names are never removed."""
    (tmp_path / "notes.partial").mkdir()
    make(tmp_path, 1, {"a": b"a"}, writer="another run")
    head = go_on(tmp_path, (2, 3), read_manifest(step_folder(tmp_path, 1)))
    (step_folder(tmp_path, 2) / "why.txt").write_text("good at counting")
    with caplog.at_level(logging.WARNING):
        head = go_on(tmp_path, (4, 5), head, keep_last=1)
    assert "step-00000002 is kept: this run did not write why.txt in it" in caplog.text
    assert names(tmp_path) == [
        *("notes.partial", "step-00000001", "step-00000002", "step-00000005")
    ]
    check_leftovers(tmp_path, RUN)
    (tmp_path / "step-00000006.partial").mkdir()  # a crash of this run may leave it
    check_leftovers(tmp_path, RUN)
    (tmp_path / "step-00000006.partial" / "thesis.txt").touch()
    for refusing in (
        lambda: check_leftovers(tmp_path, RUN),
        lambda: begin(step_folder(tmp_path, 6), RUN),
    ):
        with pytest.raises(CheckpointError, match=r"step-00000006.partial: is in the way"):
            refusing()
    (tmp_path / "step-00000005.partial").mkdir()
    (tmp_path / "step-00000005.partial" / "thesis.txt").touch()
    with caplog.at_level(logging.WARNING):
        go_on(tmp_path, (7,), head, keep_last=1)
    assert "step-00000005 is no longer needed, and cannot be removed" in caplog.text
    assert step_folder(tmp_path, 5).exists()


def test_checkpoints_without_a_line_are_read(tmp_path):
    """Earlier versions wrote only the list of files into complete.json."""
    old = make(tmp_path, 8)
    content = json.loads((old / "complete.json").read_text())
    assert content["serial"] == 1
    content = {"files": content["files"], "blake2b": read_manifest(old).id}
    (old / "complete.json").write_text(json.dumps(content, indent=1) + "\n")
    (old / MARK).unlink()
    assert find_latest(tmp_path) == old
    manifest = read_manifest(old)
    assert manifest.serial == 0 and other_lines(tmp_path, manifest) == []
    go_on(tmp_path, (9, 10), manifest, keep_last=1)
    assert steps(tmp_path) == [8, 10]


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be created: Not a directory; give a folder"):
        begin(step_folder(tmp_path / "run", 1), RUN)
    with raises(CheckpointError, place=str(tmp_path / "run")):
        find_latest(tmp_path / "run")
    partial_of(step_folder(tmp_path, 1)).write_text("a file")
    partial_of(step_folder(tmp_path, 2)).symlink_to("nothing")
    partial = begin(step_folder(tmp_path, 4), RUN)
    partial_of(step_folder(tmp_path, 3)).symlink_to(partial)  # emptying it would empty the other
    for step in (1, 2, 3):
        with pytest.raises(CheckpointError, match=rf"step-0000000{step}.partial: is in the way"):
            begin(step_folder(tmp_path, step), RUN)
    # Anything else at the path of a checkpoint is put aside.
    step_folder(tmp_path, 5).symlink_to("nothing")
    step_folder(tmp_path, 6).write_text("a file")
    for step in (5, 6):
        verify(make(tmp_path, step))
    assert (tmp_path / "step-00000005.aside1").is_symlink()
    assert (tmp_path / "step-00000006.aside1").read_text() == "a file"


def test_full_disk(tmp_path):
    first = make(tmp_path, 1)
    partial = begin(step_folder(tmp_path, 2), RUN)
    (partial / "rank-00000.safetensors").symlink_to("/dev/full")
    file, reason = partial / "rank-00000.safetensors", "No space left on device"
    with raises(CheckpointError, place=str(file), problem_has=f"{reason}, after 0 bytes"):
        write_file(file, [b"x" * 5000])
    (partial / "complete.json").symlink_to("/dev/full")
    with raises(CheckpointError, place=str(partial / "complete.json"), problem_has=reason):
        commit(step_folder(tmp_path, 2), [], RUN)
    assert find_latest(tmp_path) == first


def test_commit_looks_for_every_file(tmp_path):
    """A node that writes to its local disk would leave a checkpoint without files."""
    partial = begin(step_folder(tmp_path, 1), RUN)
    records = [write_file(partial / name, [data]) for name, data in FILES.items()]
    (partial / "state.json").unlink()
    with raises(CheckpointError, place=str(partial / "state.json"), problem_has="No such file"):
        commit(step_folder(tmp_path, 1), records, RUN)
    assert find_latest(tmp_path) is None


def test_no_torch():
    code = "import sys, megatron_vlm.checkpoint.run_checkpoints; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


WRITER = """
import os, signal, sys
from pathlib import Path
from megatron_vlm.checkpoint.manifest import read_manifest, write_file
from megatron_vlm.checkpoint.run_checkpoints import commit, prune, step_folder
from megatron_vlm.io.atomic import begin
from tests.support.checkpoints import find_latest
run = Path(sys.argv[1])
latest = find_latest(run)
step = 0 if latest is None else int(latest.name[5:13])
head = None if latest is None else read_manifest(latest)
left = int(sys.argv[2])
def watch(event, arguments):
    global left
    changes = event in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")
    if changes and str(arguments[0]).startswith(sys.argv[1]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
while True:
    step += step % 3 != 0 or not step_folder(run, step).exists()  # some are replaced
    print("begin", step, flush=True)
    partial = begin(step_folder(run, step), "an id")
    files = [write_file(partial / str(n), [bytes([step % 256]) * 70_000] * 3) for n in range(6)]
    head = commit(step_folder(run, step), files, "an id", head)
    print("end", step, flush=True)
    prune(run, head, 2, 5)
    step += step % 3 == 0
"""


def test_what_is_read_stays_until_then(tmp_path):
    head = go_on(tmp_path, (1, 2), keep_last=1)
    with held_checkpoint(tmp_path) as folder:
        assert folder == step_folder(tmp_path, 2)
        with held_checkpoint(folder):  # a second reader, which names the checkpoint itself
            head = go_on(tmp_path, (3,), head, keep_last=1)
        head = go_on(tmp_path, (4,), head, keep_last=1)
        assert steps(tmp_path) == [2, 4]
        verify(folder)
    go_on(tmp_path, (5,), head, keep_last=1)
    assert steps(tmp_path) == [5]


def test_a_reader_takes_the_next_where_one_is_removed_under_it(tmp_path):
    """The run does nothing but write checkpoints, and keeps only the last one."""
    writer = WRITER.replace("prune(run, head, 2, 5)", "prune(run, head, 1)")
    go_on(tmp_path, (1,))
    command, verified = [sys.executable, "-c", writer, str(tmp_path), "0"], set()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            while len(verified) < 20:
                with held_checkpoint(tmp_path) as folder:
                    verify(folder)
                verified.add(folder)
                assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("stride", [10, slow(1)])
def test_killed_at_each_step(stride, tmp_path):
    """A step opens, renames or removes something. Four checkpoints are written in 120 of them."""
    complete, cut_short = 0, set()
    for place in range(1, 120, stride):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(place)]
        killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert killed.returncode == -signal.SIGKILL
        ends = [int(line[4:]) for line in killed.stdout.splitlines() if line.startswith("end ")]
        complete = max([complete, *ends])
        cut_short.add(any(tmp_path.glob("*.partial")))
        latest = find_latest(tmp_path)
        assert (0 if latest is None else int(latest.name[5:13])) >= complete
    assert cut_short == {True, False} and complete > 4
