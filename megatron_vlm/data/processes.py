"""Worker processes: a DataLoader over anything that answers `[task]`, in the order of tasks.

They are forked from a server that has neither this process's threads nor its CUDA context and that
has already done the imports: forking the trainer itself can hang, and spawning costs seconds per
process.
"""

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
    )
    return iter(loader)


def _unchanged(value: Any) -> Any:
    return value
