"""A pool of processes that stay alive from case to case.

`Pool.run(fn, world, *args)` calls `fn(*args)` on ranks 0..world-1 of a fresh torch.distributed
world and returns the results of ranks 0 .. world-1. `fn` is a module-level function.
"""

import contextlib
import gc
import os
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.process_tree import Child

CASE_TIMEOUT_S = 240
END_TIMEOUT_S = 20  # seconds until the partners of a failed rank fail too


def _serve(connection: Connection) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_vlm.distributed.collectives import make_host_group

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("collectives of objects unpickle what arrives")

    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        setattr(dist, name, refuse)
    torch.set_num_threads(1)
    gc.freeze()  # modules stay, so that collections can skip them
    # The worker under test installs the stand-in, as in a real run.
    while (task := connection.recv()) is not None:
        fn, rank, world, store, port, args = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        try:
            if port is None:
                place = f"file://{store}"
                dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
                make_host_group()
            else:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            answer: tuple[bool, Any] = (True, fn(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Partners of a failed case that are inside a collective fail by this, too.
        with contextlib.suppress(Exception):
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        # A worker is a cycle, and each of its process groups has three threads. What a thread of
        # the case still refers to is collected after a later case.
        gc.collect()
        connection.send(answer)


def free_port() -> int:
    """Return a port on which no process listens now, and which the kernel does not assign to a
    process that asks for any port: the kernel's own range begins at 32768."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Pool:
    """A pool whose processes are started when they are first needed, and replaced if they hang.
    `start` makes a process that runs a function with its connection. With `as_launched` the
    processes have only the variables of a launcher, and the worker under test joins them as in
    production, which takes longer."""

    def __init__(self, start: Callable[..., Child], as_launched: bool = False) -> None:
        self.start, self.as_launched = start, as_launched
        self.members: list[Child] = []

    def run(self, fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        if not all(child.alive for child in self.members):
            self.close()
            raise RuntimeError("a case before left something behind that ended its process")
        while len(self.members) < world:
            self.members.append(self.start(_serve))
        port = free_port() if self.as_launched else None
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                store = os.path.join(folder, "store")
                self.members[rank].connection.send((fn, rank, world, store, port, args))
            answers = self._collect(world)
        return answers

    def _collect(self, world: int) -> list[Any]:
        waiting = {self.members[rank].connection: rank for rank in range(world)}
        answers: list[Any] = [None] * world
        failure = ""
        while waiting:
            ready = wait(list(waiting), timeout=END_TIMEOUT_S if failure else CASE_TIMEOUT_S)
            if not ready:
                self.close()
                hang = f"ranks {sorted(waiting.values())} hang"
                raise RuntimeError(f"{failure}\n{hang}") if failure else TimeoutError(hang)
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    ok, answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.close()
                    raise RuntimeError(f"rank {rank} of {world} has died\n{failure}") from None
                if not ok:
                    failure += f"rank {rank} of {world} failed:\n{answers[rank]}\n"
        if failure:
            raise RuntimeError(failure)
        return answers

    def close(self) -> None:
        for child in self.members:
            child.kill()
        self.members.clear()
