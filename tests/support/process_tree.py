"""Processes that start with all imports done. Importing torch, megatron and transformers takes 12
seconds in a new process, and no time in a fork of a process that has imported them.

    child = process_tree.fork(fn, *args)  # runs fn(connection, *args) there; fn is of a module
    child.connection.recv()

The tree itself imports and forks, and does nothing else: it has no threads and no CUDA.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

# Our modules import the others.
IMPORTED = (
    "megatron_vlm.controller",
    "megatron_vlm.run.run",
    "tests.support.reference",
    "tests.support.runs",
    "pytest",
)


@dataclass(frozen=True)
class Child:
    pid: int
    connection: Connection

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError, OSError):  # its end closes when it has ended
            while True:
                self.connection.recv_bytes()
        self.connection.close()


class ProcessTree:
    """A process that has imported the modules and forks children. It starts with the first fork."""

    def __init__(self) -> None:
        self.process: Any = None
        self.listener = Listener()

    def fork(self, fn: Callable[..., None], *args: Any) -> Child:
        if self.process is None:
            context = get_context("spawn")
            self.pipe, child_end = context.Pipe()
            self.process = context.Process(target=_fork_children, args=(child_end,), daemon=True)
            self.process.start()
        self.pipe.send(self.listener.address)
        connection = self.listener.accept()
        child = Child(connection.recv(), connection)
        connection.send((fn, args))
        return child

    def printed(self, fn: Callable[..., None], *args: Any) -> str:
        """Return the output of fn(*args) in a separate process."""
        child = self.fork(_print, fn, args)
        ok, text = child.connection.recv()
        child.kill()
        assert ok, text
        return str(text)

    def close(self) -> None:
        """End the process. The children have been closed before."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.listener.close()


def _fork_children(pipe: Connection) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # later collections skip the imported objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end do not stay as zombies
    while True:
        try:
            address = pipe.recv()
        except EOFError:
            return
        if os.fork() == 0:
            pipe.close()
            _run_child(address)


def _run_child(address: Any) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 1
    try:
        with Client(address) as connection:
            connection.send(os.getpid())
            fn, args = connection.recv()
            fn(connection, *args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _print(connection: Connection, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    with contextlib.redirect_stdout(StringIO()) as out:
        try:
            fn(*args)
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return
    connection.send((True, out.getvalue()))
