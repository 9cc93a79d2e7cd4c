# .venv/bin/python -m pytest tests/planner/test_what_fits.py
"""docs/what-fits.md is what the planner says. Else: python scripts/make_what_fits.py"""

import importlib
from pathlib import Path

import pytest

from tests.support.random_runs import LONG, window

ROOT = Path(__file__).parents[2]


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_what_fits")


def test_lines_of_the_page_are_up_to_date(maker):
    """Each commit computes some lines anew."""
    lines = maker.PAGE.read_text().splitlines()
    configurations = [each for name in maker.NAMES for each in maker.configurations(name)]
    for number in window(len(configurations), 4):
        assert maker.line(*configurations[number]) in lines


@pytest.mark.slow
def test_the_page_is_up_to_date(maker):
    page, lines = maker.PAGE.read_text(), []
    if LONG:
        with_machines = maker.with_part(page, "machines", maker.table_of_machines())
        assert maker.with_part(with_machines, "fits", maker.tables()) == page
        return
    machine_lines = list(maker.machine_lines())
    for number in window(len(machine_lines), 1):
        name, way = machine_lines[number]
        assert maker.machine_line(name, maker.sizes_of_model(name), way) in page.splitlines()
    for name in maker.NAMES:
        lines += maker.configurations(name)
    for number in window(len(lines), 12):
        assert maker.line(*lines[number]) in page.splitlines()


def test_more_memory_and_more_gpus_never_fit_less(maker):
    """Every size, by the page itself."""
    lines = [
        line for line in maker.PAGE.read_text().splitlines() if "GPU" in line and "B, " in line
    ]
    assert len(lines) == 132
    fits = [["**" in cell for cell in line.split(" | ")[1:]] for line in lines]
    for row in fits:
        assert row == sorted(row)
    for start in range(0, len(lines), 4):
        assert all(
            list(column) == sorted(column) for column in zip(*fits[start : start + 4], strict=True)
        )
