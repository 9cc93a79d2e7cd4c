# .venv/bin/python -m pytest tests/package/test_random_runs.py
"""The windows of random tests cover all cases and are fixed for a commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.random_runs import commit_number, window
from tests.support.suites import full

ROOT = Path(__file__).parents[2]


def test_commits_play_all_cases_between_them():
    assert sorted(case for commit in range(5) for case in window(20, 4, commit)) == [*range(20)]
    assert [[*window(5, 2, commit)] for commit in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_commit_plays_the_same_window_again(monkeypatch):
    monkeypatch.setenv("COMMIT", "00000000000a77")
    assert commit_number.__wrapped__() == 0xA
    assert window(20, 4, 0xA) == range(0, 4) and window(20, 4, 0xB) == range(4, 8)


PLAYED = """
import pytest

@pytest.mark.rotate(2)
@pytest.mark.parametrize("case", range(5))
def test_cases(case): pass

@pytest.mark.rotate(1, group="pages")
def test_first(): pass

@pytest.mark.rotate(1, group="pages")
def test_second(): pass

def test_plain(): pass

@pytest.mark.full
def test_full(): pass
"""


def collected(folder: Path, **environment: str) -> list[str]:
    """Return the names of the tests in a folder that run in this environment."""
    options = ["-p", "tests.conftest", "--collect-only", "--rootdir", str(folder), str(folder)]
    # What CI and whoever runs the tests have set is for this process alone.
    own = {"HALF", "LONG", "PYTEST_ADDOPTS"}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.partition("::test_")[2] for line in result.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    ("environment", "cases", "others"),
    [
        ({"COMMIT": "1"}, [2, 3], ["second", "plain", "full"]),
        full({"COMMIT": "1", "HALF": "1"}, [2, 3], ["second", "plain"]),
        full({"COMMIT": "2", "HALF": "1"}, [4], ["first", "plain", "full"]),
        full({"LONG": "1"}, [*range(5)], ["first", "second", "plain", "full"]),
    ],
)
def test_marked_cases_rotate(environment, cases, others, tmp_path):
    """The hook of conftest.py deselects the cases that another commit plays."""
    (tmp_path / "test_played.py").write_text(PLAYED)
    names = collected(tmp_path, **environment)
    assert names == [*(f"cases[{case}]" for case in cases), *others]
