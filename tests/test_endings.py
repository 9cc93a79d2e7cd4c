# .venv/bin/python -m pytest tests/test_endings.py
"""However a process of ours ends, everything that it has started ends with it."""

import signal
import subprocess
import sys
import time

import pytest

from megatron_vlm.data.processes import in_processes
from tests.endings import END_S, Marked
from tests.test_train import outside_of_jobs


class Work:
    """The first task is done at once, the others never."""

    def __getitem__(self, task: int) -> int:
        if task:
            time.sleep(3600)
        return task


def hold() -> None:
    """A trainer that waits for its data workers."""
    found = in_processes(Work(), range(8), 2, 1)
    print(next(found), flush=True)
    next(found)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_data_workers_end_with_a_killed_trainer(number):
    """They hold its output open, too: `train | tee log` would never end."""
    marked = Marked(outside_of_jobs())
    code = "from tests.test_endings import hold; hold()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        env=marked.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    trainer.stdout.readline()
    assert len(marked.alive()) == 5  # with the server of the workers and Python's own tracker
    trainer.send_signal(number)
    try:
        trainer.communicate(timeout=END_S)  # until all that hold its output are gone
    finally:
        marked.check_all_gone()
