"""Worker processes: a DataLoader over anything that answers `[task]`, in the order of tasks.

They are forked from a server that has neither this process's threads nor its CUDA context and that
has already done the imports: forking the trainer itself can hang, and spawning costs seconds per
process.
"""

import os
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, get_context
from typing import Any

from torch.utils.data import DataLoader


def start_server() -> None:
    """Start the server in the background unless it runs already; called early, it delays nobody."""
    modules = ["megatron_vlm.data.detached", "megatron_vlm.data.batch.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


def in_processes(
    work: Any, tasks: Iterable[Any] | None, processes: int, prefetch: int
) -> Iterator[Any]:
    """work[task] for each task, or, with `tasks` None, all that the IterableDataset `work` yields.
    Each process has at most `prefetch` tasks in flight; tasks are drawn as there is room."""
    if processes:
        start_server()
    loader = DataLoader(
        work,
        sampler=tasks,  # type: ignore[arg-type]
        batch_size=None,
        # The default turns tuples into lists, and arrays into tensors.
        collate_fn=_unchanged,
        num_workers=processes,
        prefetch_factor=prefetch if processes else None,
        multiprocessing_context="forkserver" if processes else None,
        worker_init_fn=_let_server_end,
    )
    return iter(loader)


def _let_server_end(_: int) -> None:
    """In a new worker: drop its copy of the pipe by which the server sees that the trainer is gone.
    Python gives it to every worker, so that a worker can start others; but then a killed trainer
    leaves the server and its workers alive for ever, each because of the other."""
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009 - typeshed does not know it
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _unchanged(value: Any) -> Any:
    return value
