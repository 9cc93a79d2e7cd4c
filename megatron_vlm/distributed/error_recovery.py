"""Recovery after an error within a task of all ranks, if all are at the same collective."""

import json
import time
from typing import Any

import torch.distributed as dist

from megatron_vlm.distributed.agreement import job_store
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.job_store import SignedStore

PATIENCE_S = 10.0  # time for the slowest rank to raise its error, too


def have_all_failed(task: str, grid: RankGroups) -> bool:
    """Return whether every rank has raised an error in this task, after equally many collectives of
    each of its groups. Then no rank waits for another in a collective.

    The ranks that have raised an error call it. It returns False after some seconds if another rank
    has not. Each `task` has its own name.
    """
    board = job_store()
    if board is None:
        return True
    if grid.pp.size > 1:
        return False  # a message of a stage may not have been received
    board.write(f"{task}/{grid.rank}", json.dumps(_collectives(grid)))
    if grid.rank > 0:
        return _wait_for_key(board, task, time.monotonic() + 2 * PATIENCE_S) == "alike"
    deadline = time.monotonic() + PATIENCE_S
    ranks = range(dist.get_world_size())
    messages = [_wait_for_key(board, f"{task}/{rank}", deadline) for rank in ranks]
    alike = _at_one_place(
        [json.loads(each) for each in messages if each is not None], len(messages)
    )
    board.write(task, "alike" if alike else "apart")
    return alike


Counts = list[tuple[str, list[int], int]]  # name, ranks, and number of collectives of each group


def _collectives(grid: RankGroups) -> Counts:
    """Return the number of collectives of each group that this rank has entered."""
    axes = {"tp": grid.tp, "dp": grid.dp, "replica": grid.replica, "ep": grid.ep, "edp": grid.edp}
    groups: dict[str, Any] = {n: axis.group for n, axis in axes.items() if axis.size > 1}
    groups["all"] = dist.group.WORLD
    return [
        (name, dist.get_process_group_ranks(group), group._get_sequence_number_for_group())
        for name, group in groups.items()
    ]


def _at_one_place(counts: list[Counts], ranks: int) -> bool:
    entered_by_group: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for groups_of_rank in counts:
        for name, group, entered in groups_of_rank:
            entered_by_group.setdefault((name, tuple(group)), set()).add(entered)
    return len(counts) == ranks and all(len(entered) == 1 for entered in entered_by_group.values())


def _wait_for_key(board: SignedStore, key: str, ends: float) -> str | None:
    while (text := board.read(key)) is None and time.monotonic() < ends:
        time.sleep(0.02)
    return text
