# .venv/bin/python -m pytest tests/nccl/test_lost_ranks.py
"""Tests of whole runs in which one rank is lost and no launcher ends the others, as with
`srun --kill-on-bad-exit=0`. gloo's collectives would fail. NCCL's wait, as they do here."""

import pytest

from tests.nccl.test_programs import run_judged
from tests.run.test_train import command
from tests.support.sets import write_set
from tests.support.suites import full, slow

pytestmark = pytest.mark.alone  # it waits for a time-out

FAILURE = "OSError: this machine has lost its disk"


@pytest.mark.parametrize(
    ("mutant", "own", "lost", "status", "says"),
    [
        full("last_fails", 1, 1, 1, f"rank 0: rank 1 has failed: {FAILURE}; this rank was at step"),
        slow("first_fails", 1, 0, 1, f"rank 1: rank 0 has failed: {FAILURE}; this rank was at"),
        slow("last_dies", 137, 1, 70, "rank 0: rank 1 has not been heard from for"),
        slow("last_stops", 137, 1, 70, "rank 0: rank 1 has not been heard from for"),
        slow("last_hangs", 70, 1, 70, "it was at step 3: forward and backward. Stopping;"),
    ],
)
def test_the_others_end_with_what_is_known(mutant, own, lost, status, says, tiny, tmp_path):
    write_set(tmp_path)
    minutes = "launch.timeout_minutes=" + ("2" if own == 1 else "0.3")
    words = command(tmp_path, tiny(), "run", minutes, "train.steps=6")
    done = run_judged(" ".join(words), "--mutant", mutant)
    assert done.returncode == 0, done.stderr  # the referee has no remark
    assert f"rank {lost} ended with {own}" in done.stderr, done.stderr
    assert f"rank {1 - lost} ended with {status}" in done.stderr, done.stderr
    assert says in done.stderr, done.stderr
    assert ("Traceback" in done.stderr) == (own == 1), done.stderr
    if mutant == "last_hangs":
        assert "rank 1 has been stuck for" in done.stderr, done.stderr
        assert "in begin_phase" in (tmp_path / "run/stacks/rank1.txt").read_text()
