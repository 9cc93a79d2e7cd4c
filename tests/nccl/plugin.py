"""A plugin that has the tests' ranks meet under the rules of NCCL, if NCCL_RULES is set. A remark
of the referee fails the test during which it comes."""

import os
from collections.abc import Generator

import pytest

from tests.nccl.referee import Referee


class Judged:
    """Starts a referee for the processes of this session, before any of them starts."""

    def __init__(self, rules: str) -> None:
        self.referee = Referee(rules)
        os.environ.update(self.referee.environment())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if remarks := self.referee.take_remarks():
            report.outcome = "failed"
            report.longrepr = "\n".join([*remarks, str(report.longrepr or "")])
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"referee: {self.referee.summary()}")
