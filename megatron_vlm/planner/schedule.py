"""Megatron's 1F1B, event by event: when each stage does what, and how long it waits.

Suffixes: G micro-batches, S pipeline stages.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Task:
    """A forward or a backward of one micro-batch on one stage; times are seconds."""

    stage: int
    forward: bool
    micro: int
    start: float
    end: float


@cache
def schedule(stage: int, stages: int, count: int) -> tuple[tuple[bool, int], ...]:
    """The tasks of a stage in Megatron's 1F1B: (is it a forward, which micro-batch)."""
    warm_up = min(stages - 1 - stage, count)
    steady = [((True, warm_up + i), (False, i)) for i in range(count - warm_up)]
    return (
        *((True, i) for i in range(warm_up)),
        *itertools.chain(*steady),
        *((False, i) for i in range(count - warm_up, count)),
    )


def timeline(
    forward_GS: np.ndarray, backward_GS: np.ndarray, sent_GS: np.ndarray | None = None
) -> list[Task]:
    """Every task: a stage starts the next one in its order as soon as it is free and its neighbour
    has sent the input. `sent_GS`: seconds from a stage to the next one, and back."""
    found = _ends(forward_GS, backward_GS, sent_GS).items()
    seconds = {True: forward_GS.tolist(), False: backward_GS.tolist()}
    return [
        Task(stage, forward, micro, end - seconds[forward][micro][stage], end)
        for (forward, micro, stage), end in found
    ]


def _ends(
    forward_GS: np.ndarray, backward_GS: np.ndarray, sent_GS: np.ndarray | None
) -> dict[tuple[bool, int, int], float]:
    """When each task ends: (is it a forward, which micro-batch, which stage)."""
    count, stages = forward_GS.shape
    seconds = {True: forward_GS.tolist(), False: backward_GS.tolist()}
    sent = np.zeros((count, stages)).tolist() if sent_GS is None else sent_GS.tolist()
    done: dict[tuple[bool, int, int], float] = {}
    orders = [schedule(stage, stages, count) for stage in range(stages)]
    places, clocks = [0] * stages, [0.0] * stages
    while len(done) < 2 * count * stages:
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                forward, micro = order[places[stage]]
                neighbour = stage - 1 if forward else stage + 1
                start = clocks[stage]
                if 0 <= neighbour < stages:
                    if (forward, micro, neighbour) not in done:
                        break
                    arrives = done[forward, micro, neighbour] + sent[micro][min(stage, neighbour)]
                    start = max(start, arrives)
                clocks[stage] = start + seconds[forward][micro][stage]
                done[forward, micro, stage] = clocks[stage]
                places[stage] += 1
    return done


def one_f_one_b(
    forward_GS: np.ndarray, backward_GS: np.ndarray, sent_GS: np.ndarray | None = None
) -> float:
    """Seconds until the last backward."""
    return max(_ends(forward_GS, backward_GS, sent_GS).values())


def idle_share(tasks: Sequence[Task]) -> float:
    """The share of all stages' time in which they wait: the bubble."""
    stages, end = 1 + max(task.stage for task in tasks), max(task.end for task in tasks)
    return 1 - sum(task.end - task.start for task in tasks) / (stages * end)
