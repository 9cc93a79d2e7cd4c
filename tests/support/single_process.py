"""Functions of tests that run in a separate process, because it may die or because its memory is
measured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MOST = 12 * 2**30  # bytes that such a process may map, so that a bomb does not end the machine

_CALL = """
import importlib, json, resource, sys
name, module, arguments, most = sys.argv[1:]
function = getattr(importlib.import_module(module), name)
resource.setrlimit(resource.RLIMIT_AS, (int(most), int(most)))
def status(name):  # of this process alone: getrusage also knows the process that forked it
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
before = status("VmRSS:")
result = function(*json.loads(arguments))
print(json.dumps([result, (status("VmHWM:") - before) / 1024]))
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a function, and the largest growth of its process in MiB."""

    result: Any
    grown: float


def run_alone(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call a function of a test module, and pass arguments and result as JSON."""
    words = [function.__name__, function.__module__, json.dumps(arguments), str(MOST)]
    done = subprocess.run(
        [sys.executable, "-c", _CALL, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr[-2000:]}"
    return Outcome(*json.loads(done.stdout.splitlines()[-1]))
