"""The server that worker processes are forked from, see worker_processes.py. This module does
without torch. The server can thus start, and import, before this process imports its own
modules."""

from multiprocessing import forkserver, get_context

from megatron_vlm.io.scratch import keep_sockets_in_scratch


def start_server() -> None:
    """Start the server in the background unless it runs already. An early call delays nothing."""
    keep_sockets_in_scratch()
    modules = ["megatron_vlm.data.fork_server_preload", "megatron_vlm.data.batches.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()
