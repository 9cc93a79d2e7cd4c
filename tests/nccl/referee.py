"""The referee receives every operation of every rank, lets those run that NCCL would run, and says
why the others do not.

A rank reports an operation when its host issues it. The referee keeps a queue for each communicator
and rank, like a stream of the device, and an operation runs when it is at the head of the queues of
all members. Since the referee knows all queues, it finds a deadlock exactly, without a time-out.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STALL_S = 20.0  # seconds without an operation after which a person wants to know who waits
LEFT, ENDED = "has left its groups", "its process has ended without leaving its groups"
ROOT = Path(__file__).parents[2]


@dataclass(eq=False)
class Queued:
    """An operation in a queue. Parts of a batch run one by one; a collective is its own part 0."""

    rank: int
    id: int
    comm: str
    name: str
    signature: list[Any]
    transfers: list[list[Any]]  # [send or recv, peer, count, dtype]
    where: str
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        parts = [
            f"{direction} {count} {dtype} {'to' if direction == 'send' else 'from'} rank {peer}"
            + " (matched)" * (index in self.begun)
            for index, (direction, peer, count, dtype) in enumerate(self.transfers)
        ]
        of = f"of {', '.join(parts)}" if parts else json.dumps(self.signature)
        return f"{self.name} {of} at {self.where}"


class Job:
    """The queues of all ranks of a world."""

    def __init__(self, world: int, rules: set[str], remark: Callable[[str], None]) -> None:
        self.world, self.rules, self.remark = world, rules, remark
        self.lock = threading.RLock()
        self.connections: dict[int, socket.socket] = {}
        self.members: dict[str, list[int]] = {}
        self.new_groups: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
        self.queues: dict[Any, deque[Queued]] = defaultdict(deque)
        self.queued: dict[tuple[int, int], Queued] = {}
        self.blocked: dict[int, tuple[int, str]] = {}  # what the host of a rank waits for
        self.gone: dict[int, str] = {}
        self.operations: Counter[str] = Counter()  # by communicator
        self.transfers = 0
        self.last = time.monotonic()
        self.is_stalled = self.is_stuck = False
        self.verdict = ""  # with which the job is over

    def join(self, rank: int, connection: socket.socket) -> None:
        with self.lock:
            self.connections[rank] = connection
            if self.verdict:
                self._tell(rank, kind="verdict", text=self.verdict)

    def receive(self, rank: int, kind: str, message: dict[str, Any]) -> None:
        with self.lock:
            if kind == "bye":
                self.leave(rank, LEFT)
                self._tell(rank, kind="bye")
            elif kind == "remark":
                self.remark(f"{message['text']} (rank {rank})")
            elif not self.verdict:
                getattr(self, f"_{kind}")(rank, **message)
                self._look_for_end()

    def leave(self, rank: int, how: str) -> None:
        with self.lock:
            if rank not in self.gone:
                self.gone[rank] = how
                self.blocked.pop(rank, None)
                self._look_for_end()

    def _new_group(self, rank: int, ranks: list[int], where: str) -> None:
        """Compare with the other ranks: a split of NCCL's is a collective of all."""
        number = len(self.new_groups[rank])
        self.new_groups[rank].append((ranks, where))
        for other, calls in self.new_groups.items():
            if number < len(calls) and calls[number][0] != ranks:
                self.end(
                    "GROUP ORDER",
                    f"group number {number} has ranks {ranks} on rank {rank} ({where}), "
                    f"and {calls[number][0]} on rank {other} ({calls[number][1]})",
                )
                return

    def _issue(self, rank: int, ranks: list[int], **fields: Any) -> None:
        self.last = time.monotonic()
        operation = Queued(rank, **fields)
        self.members[operation.comm] = ranks
        self.queued[rank, operation.id] = operation
        self._queue(operation).append(operation)
        self.operations[operation.comm] += operation.name != "new_group"
        self._match(operation.comm)

    def _done(self, rank: int, id: int, index: int) -> None:
        self.last = time.monotonic()
        operation = self.queued[rank, id]
        operation.ended.add(index)
        if len(operation.ended) < max(1, len(operation.transfers)):
            return
        queue = self._queue(operation)
        assert queue.popleft() is operation
        del self.queued[rank, id]
        if self.blocked.get(rank, (None,))[0] == id:
            del self.blocked[rank]
        self._tell(rank, kind="finished", id=id)
        for comm in {operation.comm, *(each.comm for each in list(queue)[:1])}:
            self._match(comm)

    def _block(self, rank: int, id: int, where: str) -> None:
        if (rank, id) in self.queued:  # else it has ended while the message was on its way
            self.blocked[rank] = id, where

    def _unblock(self, rank: int) -> None:
        self.blocked.pop(rank, None)

    def _queue(self, operation: Queued) -> deque[Queued]:
        comm = "" if "one-queue" in self.rules else operation.comm
        return self.queues[operation.rank, comm]

    # Matching

    def _match(self, comm: str) -> None:
        """Begin what can run at the heads of the queues of a communicator."""
        ranks = self.members[comm]
        queues = (self.queues[r, "" if "one-queue" in self.rules else comm] for r in ranks)
        heads = {queue[0].rank: queue[0] for queue in queues if queue and queue[0].comm == comm}
        waiting = [each for each in heads.values() if not each.transfers and not each.begun]
        problem = next(filter(None, (_difference(waiting[0], each) for each in waiting)), None)
        if len(waiting) == len(ranks):
            problem = problem or _difference_of_splits(waiting, ranks)
        if problem is not None:
            self.end("MISMATCH", f"communicator {comm} of ranks {ranks}: {problem}")
        elif len(waiting) == len(ranks):
            self._begin(*((each, 0) for each in waiting))
        for operation in heads.values():
            for index, transfer in enumerate(operation.transfers):
                other = heads.get(transfer[1])
                if index not in operation.begun and other is not None:
                    self._match_transfer(comm, operation, index, other)

    def _match_transfer(self, comm: str, operation: Queued, index: int, other: Queued) -> None:
        direction, _, *size = operation.transfers[index]
        wanted = ["recv" if direction == "send" else "send", operation.rank]
        for at, (their_direction, their_peer, *their_size) in enumerate(other.transfers):
            if at in other.begun or [their_direction, their_peer] != wanted:
                continue
            if size == their_size:
                self._begin((operation, index), (other, at))
            else:
                both = f"rank {operation.rank}: {operation}\n  rank {other.rank}: {other}"
                problem = "size or type of a send and its receive differ"
                self.end("MISMATCH", f"communicator {comm}: {problem}\n  {both}")
            return

    def _begin(self, *parts: tuple[Queued, int]) -> None:
        self.transfers += 1
        for operation, index in parts:
            operation.begun.add(index)
        for operation, index in parts:
            self._tell(operation.rank, kind="go", id=operation.id, index=index, tag=self.transfers)

    # Ends

    def _look_for_end(self) -> None:
        """Find out whether every rank waits, or is gone, while nothing runs. A rank whose process
        has ended has failed or was stopped: its launcher ends the others."""
        if self.verdict or not self.blocked or len(self.blocked) + len(self.gone) < self.world:
            return
        if any(op.begun - op.ended for op in self.queued.values() if op.rank not in self.gone):
            return
        if not self.gone:
            self.end("DEADLOCK", f"every rank waits, and nothing can run\n{self.state()}")
        elif not self.is_stuck and LEFT in self.gone.values():
            self.is_stuck = True
            text = f"all ranks that are left wait for one that is gone\n{self.state()}"
            if "release" in self.rules:
                self.end("STUCK", text)
            else:
                self.remark(f"STUCK: {text}")

    def stall(self) -> str | None:
        """Return the queues, once, if ranks have waited for long. This is no remark: a rank may
        have other work to do."""
        with self.lock:
            idle = time.monotonic() - self.last
            if self.is_stalled or self.verdict or not self.blocked or idle < STALL_S:
                return None
            self.is_stalled = True
            return f"STALL: nothing has run for {idle:.0f} s\n{self.state()}"

    def state(self) -> str:
        """Return the queues of all ranks, as text."""
        lines = []
        for rank in range(self.world):
            at = self.gone.get(rank) or self.blocked.get(rank, (0, "its host is busy"))[1]
            lines.append(f"  rank {rank}: {at}")
            for (owner, _), queue in self.queues.items():
                for place, each in enumerate(queue if owner == rank else ()):
                    of = f"{each.comm} of {self.members[each.comm]}"
                    lines.append(f"    [{of}] {'behind' if place else 'head'}: {each}")
        return "\n".join(lines)

    def end(self, kind: str, text: str) -> None:
        """Report a broken rule, with which the job is over: each wait of a rank raises it."""
        with self.lock:
            if not self.verdict:
                self.verdict = f"{kind}: {text}"
                self.remark(self.verdict)
                for rank in self.connections:
                    self._tell(rank, kind="verdict", text=self.verdict)

    def _tell(self, rank: int, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the process may have ended
            self.connections[rank].sendall(json.dumps(message).encode() + b"\n")


def _difference(first: Queued, other: Queued) -> str | None:
    """Return how two members of a collective differ."""
    # Counts that go to other ranks are compared crosswise.
    is_split = first.name == "all_to_all_single"
    if first.name != other.name:
        problem = "the operations differ"
    elif first.signature[: 1 if is_split else None] == other.signature[: 1 if is_split else None]:
        return None
    else:
        problem = "size, type, root or reduction differ"
    return f"{problem}\n  rank {first.rank}: {first}\n  rank {other.rank}: {other}"


def _difference_of_splits(operations: list[Queued], ranks: list[int]) -> str | None:
    """Return where a rank sends another count than its peer expects."""
    if operations[0].name != "all_to_all_single":
        return None
    for i, sender in enumerate(operations):
        for j, receiver in enumerate(operations):
            sent, expected = sender.signature[1][j], receiver.signature[2][i]
            if sent != expected:
                return (
                    f"rank {ranks[i]} sends {sent} values to rank {ranks[j]}, which expects "
                    f"{expected}\n  rank {ranks[i]}: {sender}\n  rank {ranks[j]}: {receiver}"
                )
    return None


class Referee:
    """A server for the ranks of all jobs of a command or of a test session."""

    def __init__(self, rules: str = "", show: Callable[[str], None] = lambda text: None) -> None:
        self.rules, self.show = rules, show
        self.jobs: dict[str, Job] = {}
        self.remarks: list[str] = []
        self.lock = threading.Lock()
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Return the variables of a command whose ranks this referee judges."""
        paths = [str(Path(__file__).parent / "inject"), str(ROOT), os.environ.get("PYTHONPATH")]
        return {
            "NCCL_RULES": self.rules,
            "NCCL_RULES_PORT": str(self.server.getsockname()[1]),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def take_remarks(self) -> list[str]:
        """Return the remarks since the last call."""
        with self.lock:
            remarks, self.remarks = self.remarks, []
        return list(dict.fromkeys(remarks))

    def _remark(self, text: str) -> None:
        with self.lock:
            self.remarks.append(text)
        self.show(text)

    def _accept(self) -> None:
        while True:
            connection, _ = self.server.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile() as lines:
            if not (line := lines.readline()):
                return  # the process has ended before it knew the name of its job
            hello = json.loads(line)
            rank = hello["rank"]
            with self.lock:
                made = Job(hello["world"], set(self.rules.split(",")), self._remark)
                job = self.jobs.setdefault(hello["job"], made)
            job.join(rank, connection)
            try:
                for line in lines:
                    message = json.loads(line)
                    job.receive(rank, message.pop("kind"), message)
            except ConnectionError:
                pass
            except Exception as error:
                job.end("REFEREE", f"it has failed: {error!r}")
                raise
            job.leave(rank, ENDED)

    def summary(self) -> str:
        """Return what the jobs have done, for a person."""
        jobs = list(self.jobs.values())
        count = sum(sum(job.operations.values()) for job in jobs)
        text = f"{len(jobs)} jobs with {count:,} operations"
        for job in sorted(jobs, key=lambda job: -job.world)[:1]:
            calls = max(map(len, job.new_groups.values()), default=0)
            text += f"; {job.world} ranks with {calls} calls of new_group and {len(job.members)} "
            text += f"communicators of several ranks, of which {len(+job.operations)} are used"
        return text
