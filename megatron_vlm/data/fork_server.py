"""The server that worker processes are forked from, see worker_processes.py. Without torch, so that
it can be started, and can import, before this process imports what it needs itself."""

from multiprocessing import forkserver, get_context

from megatron_vlm.io.scratch import keep_sockets_in_scratch


def start_server() -> None:
    """Start it in the background unless it runs already; called early, it delays nobody."""
    keep_sockets_in_scratch()
    modules = ["megatron_vlm.data.fork_server_preload", "megatron_vlm.data.batches.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()
