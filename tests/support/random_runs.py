"""Choice of the cases that a long test plays.

The cases of such a test are a fixed, numbered set: random inputs by their seeds, or layouts by
their place in the list. Each commit plays another window of it, and `make test-long` plays the
whole set. COMMIT=... replays the window of another commit.

`@pytest.mark.rotate(2)` makes each commit play two of a test's cases. Tests with a common `group`
rotate together. conftest.py deselects the others. With HALF=1, as in CI, a commit plays the full
cases of one half of the files, and of tests/model all.
"""

import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

LONG = os.environ.get("LONG") == "1"
HALF = os.environ.get("HALF") == "1"
ALWAYS = "tests/model/"  # parity with transformers
ROOT = Path(__file__).parents[2]


@cache
def head_commit() -> str:
    """Return the digest of the commit; an empty string for a copy without a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@cache
def commit_number() -> int:
    """Return a number that is fixed for a commit. A copy without a repository has number 0."""
    commit = os.environ.get("COMMIT", head_commit())
    return int(commit[:12] or "0", 16)


def window(total: int, size: int, commit: int | None = None) -> range:
    """Return the cases among `total` that this run plays: `size` of them, or all in a long run."""
    if LONG and commit is None:
        return range(total)
    number = commit_number() if commit is None else commit
    start = number % -(-total // size) * size
    return range(start, min(start + size, total))


def not_played(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the mark `rotate` that are outside the window of this run."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("rotate")) is not None:
            group = mark.kwargs.get("group", item.nodeid.partition("[")[0])
            groups[group].append(item)
            sizes[group] = mark.args[0]
    left = _full_of_other_commits(items) if HALF else []
    for group, members in groups.items():
        played = window(len(members), sizes[group])
        left += [item for number, item in enumerate(members) if number not in played]
    return left


def _full_of_other_commits(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the full cases of the files that have no turn in this commit: one half of them."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "full" in item.keywords and not item.nodeid.startswith(ALWAYS):
            files[item.nodeid.partition("::")[0]].append(item)
    others = sorted(files)[1 - commit_number() % 2 :: 2]
    return [item for file in others for item in files[file]]


if __name__ == "__main__":  # python -m tests.support.random_runs A B prints the one that is played
    print(*(sys.argv[1:][number] for number in window(len(sys.argv) - 1, 1)))
