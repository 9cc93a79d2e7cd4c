# .venv/bin/python -m pytest tests/planner/test_what_fits.py
"""docs/what-fits.md is what the planner says. Else: python scripts/make_what_fits.py. And each
recipe of a model finds a layout on its GPUs."""

import importlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.config import load_config
from megatron_vlm.config.searched_keys import SEARCHED
from megatron_vlm.family import read_sizes
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.constraints import check_config
from megatron_vlm.planner.auto_layout import machine_of_gpu, with_candidate
from megatron_vlm.planner.row_sizes import assumed_mix
from megatron_vlm.planner.search import Cluster, search
from tests.support.random_runs import LONG, window

ROOT = Path(__file__).parents[2]
GPUS = {  # of 80 GiB, with which the recipe of each size is named
    **{"0_8b": 1, "2b": 1, "4b": 2, "8b": 4, "9b": 4, "27b": 8, "31b": 16, "32b": 16},
    **{"26b_a4b": 16, "30b_a3b": 16, "35b_a3b": 16},
    **{"122b_a10b": 64, "235b_a22b": 128, "397b_a17b": 192},
}
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*[0-9]_*b.yaml"))


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
        assert comparable(read_sizes(path.parent)) == comparable(known), path


def comparable(sizes: ModelSizes) -> dict[str, Any]:
    """Return all sizes, with what a partial function is given in its place."""
    given = sizes.vision.patch_inputs
    vision = replace(sizes.vision, patch_inputs=getattr(given, "keywords", given))
    return asdict(replace(sizes, vision=vision))


def test_more_memory_never_fits_less(maker):
    """Each way of training each size, by the page itself."""
    page = maker.PAGE.read_text().splitlines()
    lines = [line for line in page if line.startswith("| ") and "B, a" in line]
    assert len(lines) == len(list(maker.machine_lines()))
    fits = [[cell.strip() != "no" for cell in line.split("|")[2:6]] for line in lines]
    assert all(row == sorted(row) for row in fits) and not all(map(all, fits))


def size_of(recipe: str) -> str:
    """Return the end of a recipe's name, by which GPUS has its number."""
    return max((size for size in GPUS if recipe.endswith(f"_{size}")), key=len)


@pytest.mark.full
@pytest.mark.rotate(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_of_a_model_finds_its_layout(recipe, maker):
    cfg, gpus = load_config([f"model={recipe}", "model.path=x"]), GPUS[size_of(recipe)]
    assert cfg.parallel.auto == SEARCHED
    sizes = maker.sizes_of_model(maker.RECIPES[recipe])
    cluster = Cluster(gpus, 80 * 2**30, machine_of_gpu())
    [best, *_] = search(cfg, sizes, assumed_mix(sizes, cfg.data.max_tokens), cluster).fitting
    planned = with_candidate(cfg, best)
    assert planned.parallel.auto == () and best.dims.world_size == gpus
    check_config(planned, sizes, best.dims)
