# .venv/bin/python -m pytest tests/nccl/test_programs.py
"""Tests of the emulator by small programs: what it must find, and a program without a mistake."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.nccl.install import install
from tests.nccl.programs import PROGRAMS
from tests.nccl.referee import Referee
from tests.run.test_train import outside_of_jobs
from tests.support.pool import free_port
from tests.support.random_runs import ROOT
from tests.support.suites import quick


def play(name: str, variables: dict[str, str]) -> None:
    """Run a program as one of its ranks."""
    os.environ.update(variables)
    install()
    dist.init_process_group("gloo")
    PROGRAMS[name].run(dist.get_rank())


KINDS = ["ring", "swapped", "both_send", "groups_in_other_order", "one_leaves", "no_wait"]
KINDS += ["written_before_wait", "read_before_wait", "not_contiguous"]


@pytest.mark.parametrize("name", quick(KINDS, PROGRAMS))
def test_programs_are_judged(own_pool, name):
    program = PROGRAMS[name]
    referee = Referee(f"release,{program.rules}")
    found = ""
    try:
        own_pool.run(play, program.world, name, referee.environment())
    except RuntimeError as error:
        found = str(error)
    found += "\n".join(referee.take_remarks())
    assert program.finds in found and bool(program.finds) == bool(found), found


def run_judged(rank: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell command as each of two ranks, without a launcher, and say how each ended."""
    job = f"WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    rank = f'{job} RANK=$rank LOCAL_RANK=$rank {rank}; echo "rank $rank ended with $?" >&2'
    ranks = f"for rank in 0 1; do ({rank}) & done; wait"
    command = [sys.executable, "-m", "tests.nccl", *options, "--", "bash", "-c", ranks]
    return subprocess.run(
        command, cwd=ROOT, env=outside_of_jobs(), capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize(("name", "status"), [("swapped", 3), ("objects", 0)])
def test_status_of_a_command(name, status):
    """torch alone starts here, and finds the rules by PYTHONPATH."""
    body = "import torch.distributed as dist; dist.init_process_group('gloo'); "
    body += f"from tests.nccl.programs import PROGRAMS; PROGRAMS['{name}'].run(dist.get_rank())"
    done = run_judged(f'{sys.executable} -c "{body}"')
    assert done.returncode == status, done.stderr
    assert ("[referee] MISMATCH: communicator 0" in done.stderr) == (status == 3), done.stderr
    assert "2 ranks with" in done.stderr
