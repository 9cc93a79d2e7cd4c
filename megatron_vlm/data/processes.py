"""Worker processes: a DataLoader over anything that answers `[task]`, in the order of tasks.

They are forked from a server that is clean of this process's threads and CUDA context, and whose
imports are done once: forking the trainer itself can hang, spawning costs seconds a process.
"""

from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, get_context
from typing import Any

from torch.utils.data import DataLoader


def start_server() -> None:
    """Start the server in the background, if it does not run yet. Early, it costs nobody time."""
    modules = ["megatron_vlm.data.detached", "megatron_vlm.data.batch.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


def in_processes(work: Any, tasks: Iterable[Any], processes: int, prefetch: int) -> Iterator[Any]:
    """work[task] for each task. With processes, tasks are asked for as there is room: at most
    `prefetch` for each are under way."""
    if processes:
        start_server()
    return iter(
        DataLoader(
            work,
            sampler=tasks,  # type: ignore[arg-type]
            batch_size=None,
            # Otherwise tuples become lists, and arrays tensors.
            collate_fn=as_it_is,
            num_workers=processes,
            prefetch_factor=prefetch if processes else None,
            multiprocessing_context="forkserver" if processes else None,
        )
    )


def as_it_is(value: Any) -> Any:
    """For a DataLoader that is to change nothing."""
    return value
