# .venv/bin/python -m pytest tests/package/test_fuzz.py
"""About 21,000 mutated files of every kind (see fuzz.py): none causes a traceback, a hang or
gigabytes of memory. Each commit runs a quarter of them, `make test-long` runs all."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import fuzz
from tests.support.random_runs import window
from tests.support.single_process import run_alone
from tests.support.suites import full, slow

# Inputs of each kind in the slow tests, with fewer of those that take long to read.
SLOW = {
    **dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), 500),
    **dict.fromkeys(("safetensors index", "parquet", "arrow", "metrics.jsonl"), 500),
    **dict.fromkeys(("cache", "safetensors header", "mp4"), 600),
    **dict.fromkeys(("save_to_disk", "gz", "zst"), 400),
    **{"checkpoint texts": 300, "config.json": 900, "records": 1500, "lines of JSON": 1100},
}
COUNT = 720  # inputs of each other kind
MOST_GROWN = 700  # MiB
# Groups of the quick tests, with one process for each.
GROUPS = {
    "model": list(fuzz.KINDS)[:10],
    "own": ["complete.json", "checkpoint texts", "cache", "card of the base", "metrics.jsonl"],
    "data": ["eval.candidates", "records", "lines of JSON", "jsonl", "json", "gz", "zst", "tar"],
    "tables": ["parquet", "arrow", "save_to_disk"],
    "media": [*fuzz.PICTURES, "mp4"],
}
OTHERS = ("own", "data")  # a few inputs of these take as long as those of all the rest
QUICK = 6


def check(found: dict[str, Any], count: int) -> None:
    assert not found["failed"], "\n\n".join(found["failures"])
    assert sum(found["outcomes"].values()) == count
    assert found["grown"] < MOST_GROWN, found


def some(kinds: list[str], folder: str) -> list[dict[str, Any]]:
    results = []
    for number, kind in enumerate(kinds):
        place = Path(folder) / str(number)
        place.mkdir()
        results.append(fuzz.run(kind, str(place), 0, QUICK))
    return results


def test_every_kind_is_in_a_group():
    assert sorted(kind for kinds in GROUPS.values() for kind in kinds) == sorted(fuzz.KINDS)
    assert sum(SLOW.get(kind, COUNT) for kind in fuzz.KINDS) >= 19_900


@pytest.mark.parametrize(
    "group",
    ["media", *(full(group) for group in ("model", "tables")), *(slow(group) for group in OTHERS)],
)
def test_some_mutated_files(group, tmp_path, process_tree):
    for result in run_alone(process_tree, some, GROUPS[group], str(tmp_path)).result:
        check(result, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_files(kind, tmp_path, process_tree):
    total = SLOW.get(kind, COUNT)
    numbers = window(total, total // 4)
    result = run_alone(
        process_tree, fuzz.run, kind, str(tmp_path), numbers.start, len(numbers)
    ).result
    check(result, len(numbers))
