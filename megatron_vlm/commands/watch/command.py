"""`megatron-vlm watch RUNS`: its arguments, and the server on loopback."""

import argparse
import contextlib
import importlib.util
import socket
from pathlib import Path

from megatron_vlm.commands.watch.run_finder import watched_folders
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls

_PORT = 8686
_ADDRESS = "127.0.0.1"


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    runs = "a folder with the folders of runs, at any depth up to 4; or the folder of one run"
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=runs)
    port = f"where to listen on 127.0.0.1 (default: {_PORT}; 0 for a port that is free)"
    parser.add_argument("--port", type=int, default=_PORT, metavar="N", help=port)
    control = "show buttons that stop and resume runs, to who has the token in this file; it is "
    control += "made if there is none"
    parser.add_argument("--control", metavar="FILE", help=control)


def watch(args: argparse.Namespace) -> int:
    """show runs in the browser while they train

    Serve the report of each run below RUNS, and a list of them, on this machine alone. The pages
    grow with the runs: state, time left, curves, samples, load of experts, memory, time. Runs that
    begin later appear by themselves. Ctrl-C ends it, and no run ends with it.

    example: megatron-vlm watch runs --port 8686

    docs/watch.md says how to reach it from another machine, and what --control allows.
    """
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"needs {name}", place="watch", remedy="run pip install 'megatron_vlm[serve]'"
            )
    folders = watched_folders(args.runs)
    from megatron_vlm.commands.watch.control import read_token

    token = None if args.control is None else read_token(args.control)
    with contextlib.closing(listen(args.port)) as listener:
        _serve(folders, token, listener)
    return 0


def listen(port: int) -> socket.socket:
    """Return a socket at a port of loopback; refuse one that is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise ConfigError(
            f"cannot be used: {reason}",
            key="--port",
            found=port,
            allowed="another, or 0 for a port that is free",
        ) from error
    return listener


def _serve(folders: list[Path], token: str | None, listener: socket.socket) -> None:
    from megatron_vlm.commands.watch.monitor import Monitor
    from megatron_vlm.commands.watch.watch_routes import Watch, make_watch_app
    from megatron_vlm.commands.watch.web_server import make_server

    port = listener.getsockname()[1]
    secret = "" if token is None else f"#token={token}"
    shown = ", ".join(map(str, folders))
    print(escape_controls(f"watching {shown}"))
    print(f"open http://{_ADDRESS}:{port}/{secret}", flush=True)
    monitor = Monitor(folders)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its end
        make_server(make_watch_app(Watch(monitor, token)), monitor).run([listener])
