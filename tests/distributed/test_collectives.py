# .venv/bin/python -m pytest tests/distributed/test_collectives.py
"""Messages between ranks arrive as they were sent, and a pickle among them runs nothing."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # the pool refuses its collectives of objects

from megatron_vlm.controller.rank_worker import BrokenError, FailedElsewhereError, WorkerError
from megatron_vlm.controller.torchrun import result_from_bytes, result_to_bytes
from megatron_vlm.distributed.collectives import (
    all_gather_json,
    broadcast_bytes,
    broadcast_json,
    gather_json,
    host_group,
    receive_json,
    send_json,
)
from megatron_vlm.distributed.rendezvous import MeetingError
from megatron_vlm.errors import NOT_GIVEN, CheckpointError, DataError
from megatron_vlm.training.worker import StepMetrics

CPU = torch.device("cpu")
VALUES = [{"text": "a word \N{SNOWMAN}" * 99, "numbers": [1, 0.1, 1e-300, 2**60]}, None]


def exchange() -> dict[str, Any]:
    rank = dist.get_rank()
    value, other = VALUES[rank], 1 - rank
    received = {
        "all": all_gather_json(value),
        "first": gather_json(value),
        "from 1": broadcast_json(value, 1),
        "from 0": broadcast_json(value, 0),
        "nothing": broadcast_bytes(b"" if rank == 0 else None, 0),
        "bytes": broadcast_bytes(b"\0\xff" if rank == 1 else None, 1),
    }
    if rank == 0:
        send_json(value, other, None, CPU)
        return received
    return received | {"sent": receive_json(other, None, CPU)}


def test_messages_arrive_as_they_were_sent(pool):
    first, second = pool.run(exchange, 2)
    same = {"all": VALUES, "from 1": None, "from 0": VALUES[0]}
    same |= {"bytes": b"\0\xff", "nothing": b""}
    assert first == {**same, "first": VALUES}
    assert second == {**same, "first": [], "sent": VALUES[0]}


class Evil:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.path, "owned")


def attack(folder: Path) -> list[str]:
    """Send from rank 1 what torch's collectives for objects send; return what rank 0 takes."""
    if dist.get_rank() == 1:
        c10d.broadcast_object_list([Evil(folder / "by torch")], 1)
        c10d.broadcast_object_list([Evil(folder / "broadcast")], 1, group=host_group())
        data = torch.frombuffer(bytearray(pickle.dumps(Evil(folder / "gather"))), dtype=torch.uint8)
        # These are the collectives of all_gather_object, without unpickling the results here.
        sizes, group = [torch.empty(1, dtype=torch.long) for _ in range(2)], host_group()
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        dist.all_gather([torch.empty_like(data) for _ in range(2)], data, group=group)
        return []
    c10d.broadcast_object_list([None], 1)
    return [outcome(lambda: broadcast_json(None, 1)), outcome(lambda: all_gather_json("fine"))]


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"took {call()}"
    except ValueError:  # UnicodeDecodeError, JSONDecodeError
        return "not JSON"


def test_a_pickle_from_another_rank_is_not_run(pool, tmp_path):
    outcomes, _ = pool.run(attack, 2, tmp_path)
    assert outcomes == ["not JSON", "not JSON"]
    assert [path.name for path in tmp_path.iterdir()] == ["by torch"]  # the attack works on torch


ANSWERS = {
    "log-probs": [torch.tensor([0.5, -1e-30]), torch.empty(0)],
    "no rows": [],
    "metrics": StepMetrics(0.1, 7, [torch.tensor([-0.25])], {"ratio": float("inf")}),
    "metrics alone": StepMetrics(0.1, 7),
    "norm and rate": (1e300, 1e-5),
    "tokens": [[1, 2], []],
    "progress": {"step": 7, "name": None},
    "nothing": None,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_ranks_are_whole(name):
    answer = ANSWERS[name]
    back = result_from_bytes(result_to_bytes(answer))
    assert type(back) is type(answer) and repr(back) == repr(answer)


class OwnError(CheckpointError):
    """An error class of a user's program."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError, DataError),
        (FailedElsewhereError, FailedElsewhereError),
        (MeetingError, MeetingError),
        (OwnError, CheckpointError),
        (BrokenError, WorkerError),
        (KeyError, WorkerError),
    ],
)
def test_errors_keep_their_type_and_words(error, expected):
    back = result_from_bytes(result_to_bytes(error("rank 1: no")))
    assert type(back) is expected and "rank 1: no" in str(back)


PLAIN = [3, 0.5, "two words", None, False, [1, "a b"], {"a": [1.5, None]}, float("inf"), "x" * 300]
SHOWN = [Path("a b"), {1: 2}, {3}, torch.float32, torch.zeros(2), [Path("a")], b"bytes"]


@pytest.mark.parametrize("found", [*PLAIN, *SHOWN], ids=repr)
@pytest.mark.parametrize("allowed", [range(1, 9), ("a b", 2), {"a"}, "more", None], ids=repr)
def test_errors_keep_their_fields(found, allowed):
    """The fields survive from rank to rank, and on to another process."""
    error = DataError("is wrong", place="x.jsonl:3", key="n", found=found, allowed=allowed)
    ranks = result_from_bytes(result_to_bytes(error)).within("rank 1")
    back = result_from_bytes(result_to_bytes(ranks))
    assert str(back) == f"rank 1: {error}" and type(back) is DataError
    assert (back.place, back.key, back.problem) == ("rank 1: x.jsonl:3", "n", "is wrong")
    if any(found is each for each in PLAIN):
        assert back.found == found and type(back.found) is type(found)
    assert result_from_bytes(result_to_bytes(DataError("is missing", key="n"))).found is NOT_GIVEN
