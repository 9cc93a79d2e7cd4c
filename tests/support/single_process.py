"""Functions of tests that run in a process of their own, because it may die or because its memory
is measured."""

import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.process_tree import ProcessTree

ROOT = Path(__file__).parents[2]
MOST = 12 * 2**30  # bytes that such a process may map, so that a bomb does not end the machine


@dataclass(frozen=True)
class Outcome:
    """The result of a function, and the largest growth of its process in MiB."""

    result: Any
    grown: float


def run_alone(tree: ProcessTree, function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call a function of a test module in a process that has imported the module."""
    with tempfile.NamedTemporaryFile() as said:
        child = tree.fork(_call, said.name, function, arguments)
        try:
            if child.connection.poll(300):
                return Outcome(*child.connection.recv())
            raise AssertionError(f"takes more than 300 s: {said.read()[-2000:].decode()}")
        except EOFError:
            raise AssertionError(f"has ended: {said.read()[-2000:].decode()}") from None
        finally:
            child.kill()


def _call(connection: Connection, said: str, function: Callable[..., Any], arguments: Any) -> None:
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
    before = _memory("VmRSS:")
    result = function(*arguments)
    connection.send((result, (_memory("VmHWM:") - before) / 1024))


def _memory(name: str) -> int:
    """Return a figure of this process alone: getrusage also knows the one that forked it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
