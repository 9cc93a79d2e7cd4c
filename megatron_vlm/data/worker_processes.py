"""Worker processes: a DataLoader over any object that returns `[task]`, in the order of tasks. They
are forked from a server without this process's threads and CUDA context that has done the imports
already: forking the trainer can hang, and spawning costs seconds per process."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, get_context
from typing import Any

from megatron_vlm.errors import LostError
from megatron_vlm.io.atomic import keep_sockets_in_scratch

_END = object()
_NICER = 10  # above the trainer's niceness; the maximum is 19
_GONE_S = 2.0  # after a failed read, until the system shows that the process is gone
_LESS = "lower data.num_workers, data.prefetch, data.max_pixels or train.micro_batch_size"
_SIGNALS = {
    signal.SIGKILL: (
        ", as the kernel does where memory runs out",
        f"give the job more memory, or {_LESS}",
    ),
    signal.SIGBUS: (
        ", as happens where shared memory runs out, or where a file became shorter while it was "
        "read",
        f"enlarge /dev/shm (`docker run --shm-size`), or {_LESS}",
    ),
}


def start_server() -> None:
    """Start the server in the background unless it runs already. An early call delays nothing."""
    keep_sockets_in_scratch()
    modules = ["megatron_vlm.data.fork_server_preload", "megatron_vlm.data.batches.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


def map_in_processes(
    work: Any, tasks: Iterable[Any] | None, processes: int, prefetch: int
) -> Iterator[Any]:
    """Yield work[task] for each task or, with `tasks` None, all items of the IterableDataset
    `work`. Each process has at most `prefetch` tasks in flight, drawn as there is room."""
    from torch.utils.data import DataLoader

    if processes:
        start_server()
    drawn = None if tasks is None else _Tasks(tasks)
    loader = DataLoader(
        work,
        sampler=drawn,  # type: ignore[arg-type]
        batch_size=None,
        # The default turns tuples into lists, and arrays into tensors.
        collate_fn=_identity,
        num_workers=processes,
        prefetch_factor=prefetch if processes else None,
        multiprocessing_context="forkserver" if processes else None,
        worker_init_fn=_stand_back,
    )
    return _raise_at_end(_watch_workers(iter(loader)) if processes else iter(loader), drawn)


class _Tasks:
    """Tasks up to an error in drawing them, which is kept until the results before it were taken:
    raised while a DataLoader starts, it would leave a half-made one."""

    def __init__(self, tasks: Iterable[Any]):
        self.tasks = tasks
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.tasks
        except Exception as error:
            self.error = error


def _raise_at_end(results: Iterator[Any], drawn: _Tasks | None) -> Iterator[Any]:
    yield from results
    if drawn is not None and drawn.error is not None:
        raise drawn.error


def _watch_workers(results: Any) -> Iterator[Any]:
    """Yield the results until a process is gone; the error names it and the cause."""
    try:
        while (result := _next(results)) is not _END:
            yield result
    finally:
        # The garbage collector would close the pipes of the queues twice: by itself, and by the
        # threads that torch starts meanwhile. The second time could hit other files, which have
        # the same numbers by then.
        results._shutdown_workers()


def _next(results: Any) -> Any:
    try:
        return next(results, _END)
    except Exception as error:
        # torch reports only that the process ended, or the error of reading half a result.
        until = time.monotonic() + _GONE_S
        while (lost := _lost_worker_error(results)) is None and time.monotonic() < until:
            time.sleep(0.05)
        if lost is None:
            raise
        raise lost from error


def _lost_worker_error(results: Any) -> LostError | None:
    """Make the error of the first worker process that failed."""
    for number, worker in enumerate(results._workers):
        if worker.exitcode is not None and worker.exitcode != 0:
            name = f"data worker {number} (process {worker.pid})"
            if worker.exitcode > 0:
                status = f"ended with exit status {worker.exitcode}"
                return LostError(status, place=name, remedy="see its messages above")
            number_of_signal = signal.Signals(-worker.exitcode)
            why, remedy = _SIGNALS.get(number_of_signal, ("", ""))
            killed = f"was killed by {number_of_signal.name}{why}"
            return LostError(killed, place=name, remedy=remedy)
    return None


def _stand_back(_: int) -> None:
    """Lower the priority of a new worker, which torch has given a single thread: it takes the
    moments of a core that the step leaves. A worker is steps ahead, and each step waits for its
    slowest thread."""
    os.nice(_NICER)
    # Close its copy of the pipe by which the server sees that the trainer is gone. Python gives the
    # copy to every worker, so that a worker can start others. With it, a killed trainer would leave
    # the server and its workers alive for ever, each because of the other.
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009 - typeshed does not know it
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _identity(value: Any) -> Any:
    return value
