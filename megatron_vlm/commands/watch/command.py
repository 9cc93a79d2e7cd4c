"""`megatron-vlm watch RUNS`: its arguments, and the server on loopback."""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls

if TYPE_CHECKING:
    from megatron_vlm.commands.watch.web_server import WatchServer

_PORT = 8686


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    runs = "a folder with the folders of runs, at any depth up to 4; or the folder of one run"
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=runs)
    port = f"where to listen on 127.0.0.1 (default: {_PORT}; 0 for a port that is free)"
    parser.add_argument("--port", type=int, default=_PORT, metavar="N", help=port)


def watch(args: argparse.Namespace) -> int:
    """show runs in the browser while they train

    Serve the report of each run below RUNS, and a list of them, on this machine alone. The pages
    grow with the runs: state, time left, curves, samples, memory, time. Runs that
    begin later appear by themselves. Ctrl-C ends it, and no run ends with it.

    example: megatron-vlm watch runs --port 8686

    docs/watch.md says how to reach it from another machine.
    """
    from megatron_vlm.commands.watch.watched_runs import watched_folders

    folders = watched_folders(args.runs)
    with open_server(args.port, folders) as server:
        print(escape_controls(f"watching {', '.join(map(str, folders))}"))
        print(f"open http://127.0.0.1:{server.server_address[1]}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def open_server(port: int, folders: Sequence[Path]) -> "WatchServer":
    """Return the server at a port of loopback; refuse a port that is taken."""
    from megatron_vlm.commands.watch.web_server import WatchServer

    try:
        return WatchServer(port, folders)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise ConfigError(
            f"cannot be used: {reason}",
            key="--port",
            found=port,
            allowed="another, or 0 for a port that is free",
        ) from error
