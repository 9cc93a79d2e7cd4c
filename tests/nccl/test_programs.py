# .venv/bin/python -m pytest tests/nccl/test_programs.py
"""Tests of the emulator by small programs: what it must find, and a program without a mistake."""

import os

import pytest
import torch.distributed as dist

from tests.nccl.install import install
from tests.nccl.programs import PROGRAMS, STRICTER, Program
from tests.nccl.referee import Referee
from tests.support.pool import Pool
from tests.support.suites import quick


def play(name: str, variables: dict[str, str], is_stricter: bool) -> None:
    """Run a program as one of its ranks."""
    os.environ.update(variables)
    install()
    dist.init_process_group("gloo")
    (STRICTER if is_stricter else PROGRAMS)[name].run(dist.get_rank())


def findings(pool: Pool, program: Program, is_stricter: bool = False) -> str:
    """Return what the referee and the ranks say about a program."""
    referee = Referee(f"release,{program.rules}")
    error = ""
    try:
        pool.run(play, program.world, program.run.__name__, referee.environment(), is_stricter)
    except RuntimeError as failure:
        error = str(failure)
    return "\n".join([*referee.take_remarks(), error])


KINDS = ["ring", "swapped", "both_send", "groups_in_other_order", "one_leaves", "no_wait"]
KINDS += ["written_before_wait", "read_before_wait", "not_contiguous"]


@pytest.mark.parametrize("name", quick(KINDS, PROGRAMS))
def test_programs_are_judged(own_pool, name):
    found = findings(own_pool, PROGRAMS[name])
    assert PROGRAMS[name].finds in found and bool(PROGRAMS[name].finds) == bool(found), found


@pytest.mark.full
@pytest.mark.parametrize("name", STRICTER)
def test_stricter_rules_find_more(own_pool, name):
    assert STRICTER[name].finds in findings(own_pool, STRICTER[name], True)
