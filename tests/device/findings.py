"""What the emulated device finds: what it was, in which phase of a step, and where in our code."""

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.distributed_c10d as c10d

ROOT = Path(__file__).parents[2]
EMULATOR = {
    str(Path(__file__).with_name(f"{name}.py")) for name in ("emulator", "findings", "streams")
}
_WAIT = c10d.Work.wait


class Kind(StrEnum):
    sync = "sync"
    mixed = "mixed devices"
    collective = "host tensor in a collective"
    race = "race between streams"


class Phase(StrEnum):
    """What a step was doing, by the functions on the stack."""

    forward = "forward"  # of a micro-batch
    backward = "backward"
    exchange = "exchange"  # between pipeline stages
    optimizer = "optimizer"
    step = "step"  # once for all micro-batches of a step
    sharing = "sharing"  # of a step's batch, among the ranks of a replica
    other = "other"


# The innermost function on the stack that is listed decides. (file, function): phase.
_PHASES = {
    ("training/stage_inputs.py", "arrivals"): Phase.forward,
    ("pipeline_parallel/schedules.py", "forward_step"): Phase.forward,
    ("pipeline_parallel/schedules.py", "backward_step"): Phase.backward,
    ("pipeline_parallel/p2p_communication.py", "_communicate"): Phase.exchange,
    ("training/optimizer.py", "finalize_grads"): Phase.step,
    ("megatron_vlm/training/worker.py", "optim_step"): Phase.optimizer,
    ("megatron_vlm/training/worker.py", "forward_backward"): Phase.step,
    ("training/broadcast.py", "share_batch"): Phase.sharing,
}


@dataclass(frozen=True)
class Finding:
    kind: Kind
    phase: Phase
    what: str
    where: str  # file:line of ours, and of the library that it called

    def __str__(self) -> str:
        return f"{self.kind} ({self.phase}): {self.what} at {self.where}"


@dataclass
class Findings:
    """All that was found, in order."""

    all: list[Finding] = field(default_factory=list)
    is_waiting: bool = False  # for gloo, which moves what arrives about on the host

    def add(self, kind: Kind, what: str) -> None:
        if not self.is_waiting:
            phase, where = _look_around()
            self.all.append(Finding(kind, phase, what, where))

    def wait(self, work: Any, *args: Any) -> bool:
        """In place of `Work.wait`."""
        self.is_waiting = True
        try:
            return _WAIT(work, *args)
        finally:
            self.is_waiting = False


def _look_around() -> tuple[Phase, str]:
    """The phase, and the nearest line of ours, with the one of a library that it had called."""
    phase, library, ours = Phase.other, "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (phase is Phase.other or not ours):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if phase is Phase.other:
            found = (p for (end, n), p in _PHASES.items() if n == name and file.endswith(end))
            phase = next(found, Phase.other)
        _, installed, within = file.rpartition("site-packages/")
        if installed:
            if not library and not within.startswith("torch/"):
                library = f" (in {within}:{frame.f_lineno})"
        elif not ours and file.startswith(str(ROOT)) and file not in EMULATOR:
            ours = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}{library}"
        frame = frame.f_back
    return phase, ours
