"""A plugin that has the tests' ranks meet under the rules of NCCL, if NCCL_RULES is set. A remark
of the referee fails the test during which it comes."""

import os
from collections.abc import Generator
from typing import Any

import pytest

from tests.nccl.referee import Referee


class RemarksError(Exception):
    """Remarks of the referee."""


class Judged:
    """Starts a referee for the processes of this session, before any of them starts."""

    def __init__(self, rules: str) -> None:
        self.referee = Referee(rules)
        os.environ.update(self.referee.environment())

    def _judge(self) -> Generator[None, Any, Any]:
        error: BaseException | None = None
        try:
            result = yield
        except BaseException as raised:
            error = raised
        if remarks := self.referee.take_remarks():
            raise RemarksError("\n".join(remarks)) from error
        if error is not None:
            raise error
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        return (yield from self._judge())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        return (yield from self._judge())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        return (yield from self._judge())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"referee: {self.referee.summary()}")
