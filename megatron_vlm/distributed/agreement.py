"""Agreement of all ranks at every step: whether one has failed or received a signal to stop."""

import contextlib
import enum
import hashlib
import json
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.distributed import process
from megatron_vlm.distributed.collectives import all_gather_bytes, all_gather_json, host_group
from megatron_vlm.distributed.error_json import ShownValue, error_from_json, error_to_json
from megatron_vlm.distributed.job_store import SignedStore
from megatron_vlm.errors import ConfigError, LostError, MegatronVLMError

if TYPE_CHECKING:  # its import takes seconds
    from megatron_vlm.distributed.grid import RankGroups


class Vote(enum.IntEnum):
    """Vote of a rank before all continue. The highest vote decides."""

    OK = 0
    STOP = 1
    FAILED = 2
    LOST = 3  # like FAILED, but starting again may help


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal requested to save and stop, and every rank agreed."""


class Signals:
    """Handlers of SIGTERM, SIGUSR1 and Ctrl-C, which ask the run to save and stop.

    The run checks for a signal between two steps. Until it `can_save`, a signal ends the process at
    once, as a second Ctrl-C always does.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.can_save = False
        self.handling = contextlib.ExitStack()
        self.handling.enter_context(process.stop_signals_to(self._note))

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if not self.can_save:
            process.print_stopped_early()
            raise SystemExit(process.PREEMPTED)

    def restore(self) -> None:
        """Restore the previous handlers."""
        self.handling.close()


def job_store() -> SignedStore | None:
    """Return the store through which the ranks met, or None if there is only one rank."""
    store: Any = dist.distributed_c10d._get_default_store()
    return SignedStore(store) if dist.get_world_size() > 1 else None


def all_reduce_max(value: int) -> int:
    """Return the highest number of all ranks. A collective of the hosts."""
    number = torch.tensor(value)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=host_group())
    return int(number)


@contextlib.contextmanager
def fail_together(
    error_type: type[MegatronVLMError],
    message: str | None = None,
    vote: Vote = Vote.OK,
    catches: type[Exception] = Exception,
) -> Iterator[None]:
    """Make an error in the body on one rank an error on all, instead of leaving the others in a
    collective. A collective at its end.

    A rank that failed raises its own error. The others raise `error_type` with `message`, or
    without one with the fields of the first rank that failed; they raise a LostError if any rank
    had one. If no rank failed and one voted STOP, all raise Stopped. Errors other than `catches`
    are raised at once and do not reach the other ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except catches as error:
        failure = error
    error_vote = Vote.LOST if isinstance(failure, LostError) else Vote.FAILED
    decision = all_reduce_max(vote if failure is None else error_vote)
    fields: dict[str, Any] = {"problem": message or ""}
    if decision >= Vote.FAILED and message is None:
        errors_of_ranks = all_gather_json(None if failure is None else error_to_json(failure))
        fields = error_from_json(next(each for each in errors_of_ranks if each is not None))
    if decision >= Vote.FAILED:
        shared = failure or (LostError if decision == Vote.LOST else error_type)(**fields)
        setattr(shared, process.ON_ALL_RANKS, True)
        raise shared
    if decision == Vote.STOP:
        raise Stopped


# Values that must be the same on all ranks are compared before any of them is used.

_SHOWN = 5  # differences in a message
# Each machine has its own paths of local copies. The content of the model's folder is compared.
_LOCAL = ("model.path", "data.cache_dir")


def compared_keys(cfg: Config) -> dict[str, str]:
    """Return the keys whose values must be the same on all ranks."""
    return {key: repr(get(cfg, key)) for key in leaves() if key not in _LOCAL}


def check_same(values: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Raise the same error on all ranks if one has other values or digests than rank 0. A message
    shows only the names of digests. A collective."""
    local = json.dumps([dict(values), dict(digests)], sort_keys=True).encode()
    if len(set(all_gather_bytes(hashlib.sha256(local).digest()))) == 1:
        return
    first, *others = _differences(all_gather_bytes(local))
    fields = first.fields() | {
        "problem": "; ".join([first.problem, *map(str, others)]),
        "remedy": "start every rank with the same arguments, and give all machines the same model",
    }
    raise ConfigError(**fields)


def _differences(texts: list[bytes]) -> Iterator[ConfigError]:
    """Yield one error for all ranks that differ from rank 0 in the same way. Its key is the first
    difference."""
    first = json.loads(texts[0])
    for text in dict.fromkeys(texts[1:]):
        if text == texts[0]:
            continue
        part, *more = _parts(first, json.loads(text))
        differences = [part.problem, *map(str, more[: _SHOWN - 1])]
        differences += [f"{len(more) - _SHOWN + 1} more"] if len(more) >= _SHOWN else []
        ranks = [rank for rank, other in enumerate(texts) if other == text]
        place = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
        yield ConfigError(**part.fields() | {"problem": ", ".join(differences), "place": place})


def _parts(first: Any, other: Any) -> Iterator[ConfigError]:
    """Yield the differences between two ranks, the model's files first."""
    (values, digests), (other_values, other_digests) = first, other
    for name in sorted(digests.keys() | other_digests.keys()):
        if digests.get(name) != other_digests.get(name):
            yield ConfigError("differs from that of rank 0", key=f"the model's {name}")
    for name in sorted(values.keys() | other_values.keys()):
        if values.get(name) != other_values.get(name):
            yield ConfigError(
                f"instead of rank 0's {values.get(name)}",
                key=name,
                found=ShownValue(other_values.get(name)),
            )


def spans(numbers: list[int]) -> str:
    """Return [1, 2, 3, 7] as 1-3, 7."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in runs)


# Recovery after an error within a task of all ranks, if all are at the same collective.

PATIENCE_S = 10.0  # time for the slowest rank to raise its error, too


def have_all_failed(task: str, grid: "RankGroups") -> bool:
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
    texts = [_wait_for_key(board, f"{task}/{rank}", deadline) for rank in ranks]
    entered: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for name, group, count in chain.from_iterable(json.loads(text) for text in texts if text):
        entered[name, tuple(group)].add(count)
    alike = None not in texts and all(len(counts) == 1 for counts in entered.values())
    board.write(task, "alike" if alike else "apart")
    return alike


def _collectives(grid: "RankGroups") -> list[tuple[str, list[int], int]]:
    """Return each group's name, ranks, and number of collectives that this rank has entered."""
    axes = {"tp": grid.tp, "dp": grid.dp, "replica": grid.replica, "ep": grid.ep, "edp": grid.edp}
    groups: dict[str, Any] = {n: axis.group for n, axis in axes.items() if axis.size > 1}
    groups |= {"all": dist.group.WORLD, "hosts": host_group(), "replica hosts": grid.replica_hosts}
    return [
        (name, dist.get_process_group_ranks(group), group._get_sequence_number_for_group())
        for name, group in groups.items()
    ]


def _wait_for_key(board: SignedStore, key: str, ends: float) -> str | None:
    while (text := board.read(key)) is None and time.monotonic() < ends:
        time.sleep(0.02)
    return text
