# .venv/bin/python -m pytest tests/package/test_random_runs.py
"""The windows of random tests cover all cases and are fixed for a commit."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.random_runs import commit_number, in_other_parts, window

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
"""


def collected(folder: Path, **environment: str) -> list[str]:
    """Return the names of the tests in a folder that run in this environment."""
    options = ["-p", "tests.conftest", "--collect-only", "--rootdir", str(folder), str(folder)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.partition("::test_")[2] for line in result.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    ("environment", "cases", "others"),
    [
        ({"COMMIT": "1"}, [2, 3], ["second"]),
        ({"LONG": "1"}, [*range(5)], ["first", "second"]),
    ],
)
def test_marked_cases_rotate(environment, cases, others, tmp_path):
    """The hook of conftest.py deselects the cases that another commit plays."""
    (tmp_path / "test_played.py").write_text(PLAYED)
    names = collected(tmp_path, **environment)
    assert names == [*(f"cases[{case}]" for case in cases), *others, "plain"]


def test_commits_play_all_files_of_slow_tests_between_them(monkeypatch):
    """A quick test runs with every commit, also one in a file with slow tests."""

    def test_of(name: str, *marks: str) -> SimpleNamespace:
        return SimpleNamespace(
            path=Path(name), get_closest_marker=lambda mark: mark in marks or None
        )

    slow = [test_of(name, "slow") for name in "abcd"]
    items = [*slow, *(test_of(name) for name in "abcd")]
    played = []
    for part in range(3):
        monkeypatch.setattr("tests.support.random_runs.commit_number", lambda part=part: part << 24)
        others = in_other_parts(items, 3)
        played.append([item.path.name for item in slow if item not in others])
        assert all(item in slow for item in others)
    assert played == [["a", "d"], ["b"], ["c"]]
    assert in_other_parts(items, 1) == []


def test_a_part_of_the_slow_files_is_collected(tmp_path):
    for name in "ab":
        slow = f"@pytest.mark.slow\ndef test_slow_{name}(): pass"
        lines = ["import pytest", slow, f"def test_quick_{name}(): pass"]
        (tmp_path / f"test_{name}.py").write_text("\n".join(lines))
    names = collected(tmp_path, COMMIT="1000000", SLOW_PARTS="2")
    assert names == ["quick_a", "slow_b", "quick_b"]
