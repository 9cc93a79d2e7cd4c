# .venv/bin/python -m pytest tests/run/test_sequences.py
"""Random sequences of commands on one run folder: train, stop, kill, resume, damage, export, and
foreign files.

After each command, every checkpoint and every export has the weights of the step that it names, no
checkpoint that is still needed is gone, and foreign files are untouched.

A step here computes nothing: it adds the run's `stride` to every weight, so that the weights show
which steps led to them. Everything else is the real run, in its own processes.
"""

import hashlib
import json
import os
import shutil
import signal
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.tensor_pieces import PieceReader
from megatron_vlm.config import load_config
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import run_guarded
from megatron_vlm.errors import CheckpointError
from megatron_vlm.io.atomic import MARK
from tests.support.chats import say, text
from tests.support.pool import Pool
from tests.support.random_runs import window
from tests.support.suites import full, slow

# Stages have one layer, because most of the time goes into starting runs.
SMALLEST = dict(layers=2, hidden=32, intermediate=32, heads=2, kv_heads=2, vocab=300)
SMALLEST |= dict(vision_depth=1, deepstack=1, vision_hidden=16, vision_intermediate=16)
SEQUENCES = 10  # per slow part
PARTS = window(50, 2)  # each has its own seed
SCALE = 2.0**-10  # strides are whole multiples, so sums are exact
LAYOUTS = {"1": (1, 1), "pp2": (1, 2), "tp2": (2, 1)}  # TP, PP
STATUS_KILLED = -9


@dataclass(frozen=True)
class Command:
    steps: int
    stride: int
    every: int | None
    keep_last: int
    export: bool
    evaluate: bool
    async_save: bool
    layout: str
    stop_at: int | None  # a signal comes in this step
    kill_at: int | None  # rank 0 is killed before this operation on the file system

    def config(self, base: Config, resume: str) -> Config:
        """Return the configuration without Hydra, which takes a quarter of the time of a run."""
        tp, pp = LAYOUTS[self.layout]
        checkpoint = replace(
            base.checkpoint,
            every=self.every,
            keep_last=self.keep_last,
            export=self.export,
            async_save=self.async_save,
            resume=resume,
            best="chats/loss" if self.evaluate else None,
        )
        return replace(
            base,
            train=replace(base.train, steps=self.steps),
            parallel=replace(base.parallel, tp=tp, pp=pp),
            data=base.data if self.evaluate else replace(base.data, eval=()),
            checkpoint=checkpoint,
        )


def base_config(root: Path, model: str) -> Config:
    chats = root / "chats.jsonl"
    keys = {
        "model": "tiny_cpu",
        "model.path": model,
        "data.train": chats,
        "data.eval": chats,
        "data.cache_dir": root / "cache",
        "data.num_workers": 0,
        "run": root / "run",
        "train.global_batch_size": 2,
        "log.report": "false",
    }
    return load_config([f"{key}={value}" for key, value in keys.items()])


def play(cfg: Config, stride: int, stop_at: int | None, kill_at: int | None) -> Any:
    """Run one rank whose steps only count, and return its exit status and output."""
    from megatron_vlm import train
    from megatron_vlm.distributed.agreement import Signals

    signals = Signals()
    saved = {name: getattr(os, name) for name in ("rename", "replace", "mkdir", "unlink", "rmdir")}
    real_step = train.train_step
    train.train_step = lambda run, step: count_up(run, step, stride, stop_at)
    try:
        if kill_at is not None and os.environ["RANK"] == "0":
            count = iter(range(kill_at))
            for name, function in saved.items():
                setattr(os, name, mortal(function, count))
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = run_guarded(lambda _: train.train(cfg, signals), [])
    finally:
        train.train_step = real_step
        for name, function in saved.items():
            setattr(os, name, function)
        signals.restore()
    return status, out.getvalue() + err.getvalue()


def mortal(function: Any, count: Any) -> Any:
    """Return a wrapper of `function` that kills the process when the count is exhausted."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def count_up(run: Any, step: int, stride: int, stop_at: int | None) -> None:
    """Take a step without a forward pass.

    The head's first row counts twice, so that the loss of an evaluation depends on the weights.
    """
    from megatron_vlm.family.spec import Part
    from megatron_vlm.training.worker import StepMetrics

    if step == stop_at:
        run.signals.received = signal.SIGTERM
    batch = run.next_batch()
    for entry, param in run.worker.held.items():
        before = param.data.flatten()[-1].item() if step else 0.0
        param.data.fill_(before + stride * SCALE)
        if entry.part is Part.head and run.worker.grid.tp.rank == 0:
            param.data[0] *= 2
    run.record(step, batch, StepMetrics(1.0, 1), 1.0, 1.0)


@dataclass
class Known:
    id: str
    step: int
    value: int
    line: tuple[str, ...]  # ids of the checkpoints before it, in any folder
    content: str  # digest of its files, which damage changes
    damaged: bool = False
    counts: bool = True  # False after damage other than a flip, which only a resume notices
    foreign: bool = False  # has a foreign file
    number: int = 0  # position in the order of writing


@dataclass
class Notes:
    checkpoints: dict[str, Known] = field(default_factory=dict)  # on the disk, by id
    past: dict[str, Known] = field(default_factory=dict)  # all that ever existed
    foreign: dict[Path, str] = field(default_factory=dict)
    output: str = ""
    head: Known | None = None  # last checkpoint of the last run
    mixed: bool = False  # metrics.jsonl has steps of several lines: runs went back and forth


COMMANDS = st.builds(
    Command,
    steps=st.just(0),
    stride=st.integers(1, 9),
    every=st.sampled_from([1, 2, 3, None]),
    keep_last=st.integers(1, 3),
    export=st.booleans(),
    evaluate=st.booleans(),
    async_save=st.booleans(),
    layout=st.sampled_from(["1", "1", "1", *LAYOUTS]),
    stop_at=st.just(None),
    kill_at=st.just(None),
)


class Sequences(RuleBasedStateMachine):
    """A run folder, the commands on it, and the checks after each of them."""

    def __init__(self, pool: Pool, model: str, template: Path):
        super().__init__()
        self.pool, self.root = pool, Path(tempfile.mkdtemp(dir=template))
        self.run = self.root / "run"
        self.base = replace(base_config(template, model), run=str(self.run))
        self.notes, self.number = Notes(), 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # ---- commands

    @initialize(steps=st.integers(2, 5), every=st.sampled_from([1, 2, None]))
    def begin(self, steps: int, every: int | None) -> None:
        self.train(Command(steps, 1, every, 3, True, False, True, "1", None, None), "auto")

    @rule(more=st.integers(-1, 5), command=COMMANDS)
    def go_on(self, more: int, command: Command) -> None:
        self.train(replace(command, steps=max(self.done() + more, 1)), "auto")

    @rule(after=st.integers(0, 3), command=COMMANDS)
    def stop(self, after: int, command: Command) -> None:
        steps, moment = self.done() + 4, self.done() + after
        self.train(replace(command, steps=steps, stop_at=moment), "auto")

    @rule(more=st.integers(1, 5), moment=st.integers(0, 90), command=COMMANDS)
    def kill(self, more: int, moment: int, command: Command) -> None:
        self.train(replace(command, steps=self.done() + more, kill_at=moment), "auto")

    @precondition(lambda self: len(self.whole_ones()) > 1)
    @rule(more=st.integers(0, 3), which=st.integers(0, 99), command=COMMANDS)
    def go_back(self, more: int, which: int, command: Command) -> None:
        """Resume from an earlier checkpoint by name."""
        *earlier, _ = self.whole_ones()
        origin = earlier[which % len(earlier)]
        command = replace(command, steps=max(origin.step + more, 1))
        self.train(command, str(self.folder_of(origin)))

    @precondition(lambda self: self.notes.checkpoints)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["flip", "cut", "remove", "manifest"]))
    def damage(self, which: int, how: str) -> None:
        known = list(self.notes.checkpoints.values())[which % len(self.notes.checkpoints)]
        folder = self.folder_of(known)
        name = "complete.json" if how == "manifest" else "rank-00000.safetensors"
        path = folder / name
        if known.damaged:  # the same flip again would repair it
            return
        if how == "remove":
            path.unlink()
        else:
            data = path.read_bytes()
            if not data:
                return
            path.write_bytes(data[:-1] if how == "cut" else data[:-1] + bytes([data[-1] ^ 255]))
        known.damaged, known.content = True, digest(folder)
        known.counts = known.counts and how == "flip"

    @rule(
        where=st.sampled_from(
            ["checkpoints/notes.partial", "checkpoints", "export", "", "checkpoint", "export"]
        )
    )
    def put_a_file(self, where: str) -> None:
        folder = self.run / where
        if where == "checkpoint":
            if not self.notes.checkpoints:
                return
            known = next(iter(self.notes.checkpoints.values()))
            folder, known.foreign = self.folder_of(known), True
        if where == "export" and not folder.exists():
            return
        folder.mkdir(exist_ok=True, parents=True)
        self.number += 1
        path = folder / f"thesis-{self.number}.txt"
        path.write_text(f"years of work {self.number}")
        self.notes.foreign[path] = path.read_text()
        if where == "checkpoint":
            known.content = digest(folder)

    @precondition(lambda self: self.foreign_in_export())
    @rule()
    def take_the_files_out_of_the_export(self) -> None:
        for path in self.foreign_in_export():
            path.unlink()
            del self.notes.foreign[path]

    @rule(which=st.integers(0, 99), newest=st.booleans())
    def export_by_command(self, which: int, newest: bool) -> None:
        whole, out = self.whole_ones(), self.root / "by-command"
        shutil.rmtree(out, ignore_errors=True)
        if newest:
            source, known = self.run, whole[-1] if whole else None
        elif self.notes.checkpoints:
            every = list(self.notes.checkpoints.values())
            known = every[which % len(every)]
            source = self.folder_of(known)
            known = None if known.damaged else known
        else:
            return
        if known is None:
            with pytest.raises(CheckpointError):
                export_checkpoint(str(source), str(out))
            assert not out.exists()
            return
        export_checkpoint(str(source), str(out))
        assert exported(out) == (known.step, known.id, known.value)

    # ---- checks

    @invariant()
    def nothing_of_others_is_touched(self) -> None:
        for path, content in self.notes.foreign.items():
            moved = [path] if path.exists() else list(self.run.rglob(path.name))
            assert [each.read_text() for each in moved] == [content], path

    def train(self, command: Command, resume: str) -> None:
        """Run the command, and compare the folder after it with the folder before it."""
        notes = self.notes
        before = dict(notes.checkpoints)
        export_before = exported(self.run / "export")
        whole = self.whole_ones()
        origin = whole[-1] if whole else None
        if resume != "auto":
            [origin] = [known for known in whole if str(self.folder_of(known)) == resume]
        refused = command.export and bool(self.foreign_in_export())
        if refused:  # rank 0 refuses; a launcher would end the others
            command = replace(command, layout="1")
        status = self.start(command, resume)
        assert status in (0, 2, 75, STATUS_KILLED), notes.output
        assert (status == 2) == refused or (refused and status == STATUS_KILLED), notes.output
        done = origin.step if origin else 0
        former, notes.head = notes.head, origin
        if former and origin and origin.id not in (*former.line, former.id):
            notes.mixed = True
        head = notes.head = self.check_checkpoints(command, origin, before, status)
        if refused:
            assert head is origin and exported(self.run / "export") == export_before
            return
        if status == 0:
            assert (head.step if head else 0) == max(command.steps, done)
        if status == 75:
            assert head is not None and head.step >= min(command.stop_at or 0, done)
        self.check_export(command, head, export_before, status)
        if status == 0 and command.evaluate and head is not None and not notes.mixed:
            self.check_best(command, head)

    def start(self, command: Command, resume: str) -> int:
        cfg = command.config(self.base, resume)
        world = cfg.parallel.tp * cfg.parallel.pp
        args = (cfg, command.stride, command.stop_at, command.kill_at)
        self.notes.output = ""
        try:
            answers = self.pool.run(play, world, *args)
        except RuntimeError as error:
            assert command.kill_at is not None and "rank 0 of" in str(error), error
            assert "has died" in str(error), error
            self.notes.output = str(error)
            return STATUS_KILLED
        self.notes.output = answers[0][1]
        return int(answers[0][0])

    def check_checkpoints(
        self, command: Command, origin: Known | None, before: dict[str, Known], status: int
    ) -> Known | None:
        """Check that new checkpoints have the right weights and that removed ones were not needed.

        Return the newest checkpoint of the line that was trained.
        """
        notes, first = self.notes, origin.step if origin else 0
        line = (*origin.line, origin.id) if origin else ()
        current: dict[str, Known] = {}
        new = []
        for folder in sorted((self.run / "checkpoints").glob("step-*")):
            if folder.name.endswith(".partial"):
                continue
            here = digest(folder)
            same = [known for known in before.values() if known.content == here]
            if same:
                current[same[0].id] = same[0]
                continue
            id_, step, value = read(folder)
            assert int(folder.name[5:13]) == step and step <= command.steps
            assert first < step or origin is None
            start = origin.value if origin else 0
            assert value == start + command.stride * (step - first), (folder, notes.output)
            new.append(Known(id_, step, value, line, here))
        for known in sorted(new, key=lambda known: known.step):
            self.number += 1
            # The content may exist already, when a line is trained twice.
            current[known.id] = replace(known, line=line, number=self.number)
            line = (*line, known.id)
            notes.past[known.id] = current[known.id]
        head = current[line[-1]] if new else origin
        usable = [current[id_] for id_ in line if id_ in current and current[id_].counts]
        for id_, known in before.items():
            if id_ in current:
                continue
            assert known.counts and not known.foreign, f"{known} is gone: {notes.output}"
            assert id_ in line or any(new_.id == id_ for new_ in new), f"{known} is gone"
            assert status == STATUS_KILLED or len(usable) >= command.keep_last, f"{known} is gone"
            newer = [k for k in usable if k.step > known.step]
            assert len(newer) >= command.keep_last, f"{known} is gone, and only {usable} are there"
        notes.checkpoints = current
        return head

    def check_export(self, command: Command, head: Known | None, before: Any, status: int) -> None:
        export = exported(self.run / "export")
        if export is not None:
            known = self.notes.past[export[1]]
            assert export == (known.step, known.id, known.value)
        if status == 0 and command.export:
            assert head is not None and export == (head.step, head.id, head.value)
            aside = [path.name for path in self.run.glob("export?*")]
            assert aside == [], aside
        elif status != STATUS_KILLED:
            assert export == before

    def check_best(self, command: Command, head: Known) -> None:
        """Check that the best step has the line's lowest loss in the metrics and a checkpoint."""
        from megatron_vlm.report.run.metrics_arrays import read_metrics

        path = self.folder_of(head) / "state.json"
        if head.damaged:
            return
        best = json.loads(path.read_text())["progress"]["best_step"]
        scores = {e.step: e.loss for e in read_metrics(self.run / "metrics.jsonl").evaluations}
        if best is not None and head.step in scores and best in scores:
            assert scores[best] == min(loss for step, loss in scores.items() if step <= head.step)
            existing = [k for k in self.notes.checkpoints.values() if k.step == best]
            gone = [k for k in self.notes.past.values() if k.step == best and k.damaged]
            assert existing or gone

    # ---- state

    def done(self) -> int:
        """Return the number of steps of the checkpoint that `auto` resumes from."""
        whole = self.whole_ones()
        return whole[-1].step if whole else 0

    def whole_ones(self) -> list[Known]:
        """Return the checkpoints that are not damaged, in the order of writing."""
        whole = [known for known in self.notes.checkpoints.values() if not known.damaged]
        return sorted(whole, key=lambda known: known.number)

    def folder_of(self, known: Known) -> Path:
        folders = (self.run / "checkpoints").glob("step-*")
        [folder] = [path for path in folders if digest(path) == known.content][:1]
        return folder

    def foreign_in_export(self) -> list[Path]:
        return [path for path in self.notes.foreign if path.parent == self.run / "export"]


def digest(folder: Path) -> str:
    hasher = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


def read(folder: Path) -> tuple[str, int, int]:
    """Return a checkpoint's id, step and weights, without verification."""
    manifest = json.loads((folder / "complete.json").read_text())
    files = dict(sorted(manifest["files"].items()))
    id_ = hashlib.blake2b(json.dumps(files).encode(), digest_size=32).hexdigest()
    step = json.loads((folder / "state.json").read_text())["progress"]["step"]
    reader = PieceReader(folder, json.loads((folder / "index.json").read_text()))
    names = [name for name in reader.index if not name.startswith("exp_avg")]
    if step == 0:
        return id_, 0, 0  # weights before any step
    return id_, step, value_of({name: reader.read_tensor(name) for name in names})


def exported(folder: Path) -> tuple[int, str, int] | None:
    if not (folder / "config.json").exists():
        return None
    mark = json.loads((folder / MARK).read_text())
    return mark["step"], mark["checkpoint"], value_of(load_file(folder / "model.safetensors"))


def value_of(tensors: dict[str, Any]) -> int:
    """Return how often SCALE was added to every weight."""
    values = {float(value) / SCALE for tensor in tensors.values() for value in tensor[1:].unique()}
    [value] = values
    assert value == int(value)
    return int(value)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Return a folder with four short chats and a cache of their tokens."""
    folder = tmp_path_factory.mktemp("sequences")
    lines = [
        json.dumps({"messages": [say("user", text(f"{n}?")), say("assistant", "word " * (n + 1))]})
        for n in range(4)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "cache").mkdir()
    return folder


@pytest.fixture(scope="module")
def own_pool(process_tree):
    """Yield a separate pool, because its processes are killed."""
    pool = Pool(process_tree.fork)
    yield pool
    pool.close()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("part", "sequences"), [full(0, 2), *(slow(part + 1, SEQUENCES) for part in PARTS)]
)
def test_any_sequence_of_commands(part, sequences, own_pool, tiny, template):
    @seed(part)
    def machine() -> Sequences:
        return Sequences(own_pool, tiny(**SMALLEST), template)

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=8,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
