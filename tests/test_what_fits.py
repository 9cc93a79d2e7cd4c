# .venv/bin/python -m pytest tests/test_what_fits.py
"""docs/what-fits.md is what the planner says. Else: python scripts/make_what_fits.py"""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_what_fits")


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("2B", "all trained", 1),
        ("4B", "tower frozen", 1),
        ("8B", "adapters", 1),
        ("32B", "tower frozen", 1),
        ("30B-A3B", "all trained", 4),
    ],
)
def test_lines_of_the_page_are_up_to_date(name, kind, count, maker):
    """Some of each model, which takes seconds; all of them in the slow test."""
    assert maker.line(name, kind, count) in maker.PAGE.read_text().splitlines()


@pytest.mark.slow
def test_the_page_is_up_to_date(maker):
    page = maker.PAGE.read_text()
    assert maker.with_tables(page, maker.tables()) == page


def test_more_memory_and_more_gpus_never_fit_less(maker):
    """Every size, by the page itself."""
    lines = [
        line for line in maker.PAGE.read_text().splitlines() if "GPU" in line and "B, " in line
    ]
    assert len(lines) == 60
    fits = [["**" in cell for cell in line.split(" | ")[1:]] for line in lines]
    for row in fits:
        assert row == sorted(row)
    for start in range(0, 60, 4):
        assert all(
            list(column) == sorted(column) for column in zip(*fits[start : start + 4], strict=True)
        )
