"""Findings of the emulated device: the kind, the phase of a step and the place in our code."""

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
    """The phase of a step, derived from the functions on the stack."""

    forward = "forward"  # one micro-batch
    backward = "backward"
    exchange = "exchange"  # between pipeline stages
    optimizer = "optimizer"
    step = "step"  # once for all micro-batches of a step
    sharing = "sharing"  # the batch of a step, among the ranks of a replica
    other = "other"


# The innermost listed function on the stack decides. The entries are (file, function): phase.
_PHASES = {
    ("training/stage_inputs.py", "arrivals"): Phase.forward,
    ("pipeline_parallel/schedules.py", "forward_step"): Phase.forward,
    ("pipeline_parallel/schedules.py", "backward_step"): Phase.backward,
    ("pipeline_parallel/p2p_communication.py", "_communicate"): Phase.exchange,
    ("training/data_parallel.py", "finalize_grads"): Phase.step,
    ("megatron_vlm/training/worker.py", "optim_step"): Phase.optimizer,
    ("megatron_vlm/training/worker.py", "forward_backward"): Phase.step,
    ("training/data_feed.py", "share_batch"): Phase.sharing,
}


@dataclass(frozen=True)
class Finding:
    kind: Kind
    phase: Phase
    what: str
    where: str  # file:line in our code, and in the library that it called

    def __str__(self) -> str:
        return f"{self.kind} ({self.phase}): {self.what} at {self.where}"


@dataclass
class Findings:
    """The findings, in order."""

    all: list[Finding] = field(default_factory=list)
    to_host: int = 0  # bytes that were copied to pinned memory without a wait
    is_waiting: bool = False  # while gloo waits, it moves received data on the host

    def add(self, kind: Kind, what: str) -> None:
        if not self.is_waiting:
            phase, where = _look_around()
            self.all.append(Finding(kind, phase, what, where))

    def wait(self, work: Any, *args: Any) -> bool:
        """Wait for the work without recording findings; this replaces `Work.wait`."""
        self.is_waiting = True
        try:
            return _WAIT(work, *args)
        finally:
            self.is_waiting = False


def _look_around() -> tuple[Phase, str]:
    """Return the phase and the nearest line of our code, with that of the library."""
    phase, library, our_line = Phase.other, "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (phase is Phase.other or not our_line):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if phase is Phase.other:
            phases = (p for (end, n), p in _PHASES.items() if n == name and file.endswith(end))
            phase = next(phases, Phase.other)
        _, installed, within = file.rpartition("site-packages/")
        if installed:
            if not library and not within.startswith("torch/"):
                library = f" (in {within}:{frame.f_lineno})"
        elif not our_line and file.startswith(str(ROOT)) and file not in EMULATOR:
            our_line = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}{library}"
        frame = frame.f_back
    return phase, our_line
