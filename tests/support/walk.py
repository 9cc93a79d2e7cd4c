"""Walk of a batch: the functions of the package that a step enters on its way to the loss.

It is recorded in a process of its own. Python 3.11 may enter a function for ever where it is
profiled in a process that has done much before, as those of the pool have.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import megatron_vlm

PACKAGE = Path(megatron_vlm.__file__).parent
_STAND_IN = "distributed/cuda_stand_in.py"  # in place of CUDA's own functions
_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
_LAYERS = _PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
_NAMES = [layer.replace("|", " ").split() for layer in _LAYERS]
HEIGHT = {name: -place for place, names in enumerate(_NAMES) for name in names}


@dataclass
class Walk:
    """Functions in the order in which they are entered, each as (file, name)."""

    frames: list[tuple[str, str]] = field(default_factory=list)
    climbs: list[tuple[str, str]] = field(default_factory=list)  # (caller's file, higher file)

    @property
    def files(self) -> list[str]:
        """Files in the order in which they are first entered."""
        return list(dict.fromkeys(file for file, _ in self.frames))

    def entries(self, file: str, function: str) -> int:
        """Count how often a function was entered."""
        return self.frames.count((file, function))


@contextmanager
def walking(until: Callable[..., Any] | None = None) -> Iterator[Walk]:
    """Record the walk of the block: all of it, or up to the first return of `until`."""
    walk, last = Walk(), getattr(until, "__code__", None)

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is last:
            sys.setprofile(None)
        name = frame.f_code.co_name
        if event != "call" or name.startswith("<") or (file := _file(frame)) is None:
            return  # "<": a comprehension or a lambda
        walk.frames.append((file, name))
        caller, origin = frame.f_back, None
        while caller is not None and origin is None:
            origin, caller = _file(caller), caller.f_back
        if origin is not None and HEIGHT[_room(file)] > HEIGHT[_room(origin)]:
            walk.climbs.append((origin, file))

    sys.setprofile(see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def walk_of_step(checkpoint: str, **model: Any) -> Walk:
    """Return the walk of one train step of a worker, whose configuration has these keys of
    `model`."""
    command = [sys.executable, "-m", "tests.support.walk", checkpoint, json.dumps(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert not done.returncode, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return Walk(*([tuple(each) for each in pairs] for pairs in found))  # type: ignore[arg-type]


def _record(checkpoint: str, model: str) -> None:
    from megatron_vlm.training.losses import loss_of
    from megatron_vlm.training.worker import MegatronWorker
    from tests.support.batches import MIXED, make_rows
    from tests.support.runs import Case

    with MegatronWorker(Case(model=json.loads(model)).config(checkpoint)) as worker:
        batches = worker.micro_batches(make_rows(MIXED[:2]))
        with walking(until=loss_of) as walk:
            worker.forward_backward(batches)
    print(json.dumps([walk.frames, walk.climbs]))


def _file(frame: FrameType) -> str | None:
    """Return the file of the package that a frame runs, or None."""
    path = frame.f_code.co_filename
    file = path.removeprefix(f"{PACKAGE}/")
    return None if file in (path, _STAND_IN) else file


def _room(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


if __name__ == "__main__":
    _record(*sys.argv[1:])
