# .venv/bin/python -m pytest tests/planner/test_what_fits.py
"""docs/what-fits.md is what the planner says. Else: python scripts/make_what_fits.py"""

import importlib
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_vlm.family import read_sizes
from tests.support.random_runs import LONG, window

ROOT = Path(__file__).parents[2]


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_what_fits")


@pytest.mark.slow
def test_lines_of_the_page_are_up_to_date(maker):
    """Each commit computes a line anew."""
    page, machine_lines = maker.PAGE.read_text(), list(maker.machine_lines())
    if LONG:
        assert maker.with_part(page, "machines", maker.table_of_machines()) == page
        return
    [number] = window(len(machine_lines), 1)
    name, way = machine_lines[number]
    assert maker.machine_line(name, maker.sizes_of_model(name), way) in page.splitlines()


def test_sizes_beside_recipes_are_up_to_date(maker, tmp_path, monkeypatch):
    """By them `megatron-vlm plan model=NAME` needs no checkpoint."""
    before = {path: path.read_text() for path in (ROOT / "configs" / "model").glob("*/config.json")}
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(maker, "config_dir", lambda: tmp_path)
    maker.write_configs()
    assert {path.parent.name: text for path, text in before.items()} == {
        path.parent.name: path.read_text() for path in tmp_path.glob("model/*/config.json")
    }
    for path in before:
        known = maker.sizes_of_model(maker.RECIPES[path.parent.name])
        assert asdict(read_sizes(path.parent)) == asdict(known), path


def test_more_memory_never_fits_less(maker):
    """Each way of training each size, by the page itself."""
    page = maker.PAGE.read_text().splitlines()
    lines = [line for line in page if line.startswith("| ") and "B, a" in line]
    assert len(lines) == len(list(maker.machine_lines()))
    fits = [[cell.strip() != "no" for cell in line.split("|")[2:6]] for line in lines]
    assert all(row == sorted(row) for row in fits) and not all(map(all, fits))
