"""A plugin that writes the seconds of the tests into tests/durations.json, if DURATIONS=1.

The file has the seconds of each file of tests by kind (quick, full, slow), the slowest quick tests
of the last session, and for a file of slow tests the last commit at which all of them passed.
"""

import json
from collections import Counter, defaultdict

import pytest

from tests.support.random_runs import ROOT, head_commit

RECORD = ROOT / "tests" / "durations.json"
SLOWEST = 10


class Durations:
    """Collects the reports of a session. With xdist, this is the session that starts the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = next((mark for mark in ("slow", "full") if mark in report.keywords), "quick")
        self.seconds[kind][report.nodeid] += report.duration
        if report.outcome == "failed":
            self.failed.add(report.nodeid.partition("::")[0])

    def pytest_sessionfinish(self) -> None:
        record = read_record()
        for kind in ("quick", "full", "slow"):
            record[kind] = self._merged(record.get(kind, {}), kind)
        if quick := self.seconds["quick"]:
            slowest = {name: round(seconds, 1) for name, seconds in quick.most_common(SLOWEST)}
            record["slowest"] = slowest
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

    def _merged(self, former: dict, kind: str) -> dict:
        files = Counter[str]()
        for name, seconds in self.seconds[kind].items():
            files[name.partition("::")[0]] += seconds
        merged = {name: value for name, value in former.items() if (ROOT / name).exists()}
        for name, seconds in files.items():
            merged[name] = round(seconds, 1)
            if kind == "slow":
                is_green = name not in self.failed
                commit = head_commit() if is_green else former.get(name, {}).get("commit")
                merged[name] = {"seconds": merged[name], "commit": commit}
        return merged


def read_record() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def file_seconds() -> Counter[str]:
    record = read_record()
    slow = {name: each["seconds"] for name, each in record.get("slow", {}).items()}
    return Counter(record.get("quick", {})) + Counter(record.get("full", {})) + Counter(slow)
