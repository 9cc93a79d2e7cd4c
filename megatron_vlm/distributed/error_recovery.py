"""After an error within a task of all ranks: whether they stand at one place, and can go on."""

import json
import time
from typing import Any

import torch.distributed as dist

from megatron_vlm.distributed.agreement import job_store
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.job_store import SignedStore

PATIENCE_S = 10.0  # until the slowest rank has raised its error, too


def failed_alike(task: str, grid: RankGroups) -> bool:
    """Whether every rank has raised an error in this task, after as many collectives as the others
    of each of its groups: then nobody waits in one for anybody. Called by the ranks that have.
    False after some seconds where another rank has not. Each `task` has a name of its own."""
    board = job_store()
    if board is None:
        return True
    if grid.pp.size > 1:
        return False  # what a stage has sent may not have been received
    board.write(f"{task}/{grid.rank}", json.dumps(_collectives(grid)))
    if grid.rank > 0:
        return _awaited(board, task, time.monotonic() + 2 * PATIENCE_S) == "alike"
    ends = time.monotonic() + PATIENCE_S
    ranks = range(dist.get_world_size())
    said = [_awaited(board, f"{task}/{rank}", ends) for rank in ranks]
    alike = _at_one_place([json.loads(each) for each in said if each is not None], len(said))
    board.write(task, "alike" if alike else "apart")
    return alike


Counts = list[tuple[str, list[int], int]]  # of each group its name, its ranks, and the collectives


def _collectives(grid: RankGroups) -> Counts:
    """How many this rank has entered."""
    axes = {"tp": grid.tp, "dp": grid.dp, "replica": grid.replica, "ep": grid.ep, "edp": grid.edp}
    groups: dict[str, Any] = {n: axis.group for n, axis in axes.items() if axis.size > 1}
    groups["all"] = dist.group.WORLD
    return [
        (name, dist.get_process_group_ranks(group), group._get_sequence_number_for_group())
        for name, group in groups.items()
    ]


def _at_one_place(counts: list[Counts], ranks: int) -> bool:
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for of_rank in counts:
        for name, group, entered in of_rank:
            found.setdefault((name, tuple(group)), set()).add(entered)
    return len(counts) == ranks and all(len(entered) == 1 for entered in found.values())


def _awaited(board: SignedStore, key: str, ends: float) -> str | None:
    while (text := board.read(key)) is None and time.monotonic() < ends:
        time.sleep(0.02)
    return text
