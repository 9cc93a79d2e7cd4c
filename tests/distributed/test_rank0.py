# .venv/bin/python -m pytest tests/distributed/test_rank0.py
"""Long work of rank 0 alone, with news of it for the other ranks."""

import threading

import pytest

from megatron_vlm.distributed.agreement import Stopped
from megatron_vlm.distributed.rank0 import run_in_thread
from megatron_vlm.errors import CheckpointError


def test_others_hear_of_it_until_it_is_done():
    threads, enough = [], threading.Event()

    def meanwhile() -> None:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            enough.set()

    def work() -> str:
        assert enough.wait(30)
        return threading.current_thread().name

    assert run_in_thread(work, meanwhile, 0.001) == "beside"
    assert len(threads) >= 3 and {*threads} == {threading.current_thread()}


@pytest.mark.parametrize("error", [CheckpointError("no room"), TimeoutError("a slow disk")])
def test_its_errors_are_raised(error):
    def work() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        run_in_thread(work, lambda: None, 0.001)


def test_who_is_told_to_stop_does_not_wait_for_it():
    never = threading.Event()

    def meanwhile() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        run_in_thread(never.wait, meanwhile, 0.001)
    never.set()
