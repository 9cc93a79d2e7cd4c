"""The server that worker processes are forked from, see processes.py. Without torch, so that it can
be started, and can import, before this process imports what it needs itself."""

from multiprocessing import forkserver, get_context

from megatron_vlm.data.scratch import keep_sockets_in_scratch


def start_server() -> None:
    """Start it in the background unless it runs already; called early, it delays nobody."""
    keep_sockets_in_scratch()
    modules = ["megatron_vlm.data.detached", "megatron_vlm.data.batch.loader"]
    get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()
