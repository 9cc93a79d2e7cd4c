# .venv/bin/python -m pytest tests/nccl/test_programs.py
"""Tests of the emulator by small programs: what it must find, and a program without a mistake."""

import os

import pytest
import torch.distributed as dist

from tests.nccl.install import install
from tests.nccl.programs import PROGRAMS
from tests.nccl.referee import Referee
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
