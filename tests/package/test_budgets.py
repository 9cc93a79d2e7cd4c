# .venv/bin/python -m pytest tests/package/test_budgets.py
"""The weight of the package and of its tests: a change that needs more raises its figure here, and
says why."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from megatron_vlm.cli.parser import make_parser
from megatron_vlm.config.schema import leaves
from tests.support.durations import read_record

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_vlm"
LONG_FILE = 300  # lines
SMALL_FILE = 90  # lines; with one importer, such a file may belong into it
BUDGETS = {
    "lines of errors": 211,
    "lines of the top": 59,
    "lines of version": 3,
    "lines of train": 81,
    "lines of model": 4_252,
    "lines of config": 4_548,
    "lines of training": 5_959,
    "lines of planner": 2_422,
    "lines of lora": 1_204,
    "lines of serve": 11_098,
    "lines of engines": 2_838,
    "lines of report": 3_370,
    "lines of user_code": 1_144,
    "lines of hf": 2_419,
    "lines of cli": 600,
    "lines of data": 10_480,
    "lines of family": 5_138,
    "lines of rl": 2_887,
    "lines of distributed": 2_985,
    "lines of checkpoint": 1_380,
    "lines of run": 3_471,
    "lines of io": 899,
    "lines of controller": 1_023,
    "lines of commands": 8_095,
    "files": 538,
    "files over 300 lines": 8,
    "small files with one importer": 30,
    "keys": 211,
    "commands": 19,
    "words of docs": 58_024,
    "words of README": 468,
    "lines of tests": 67_215,
}

# Of tests/durations.json, which `.ci/run` writes: the sum of the quick tests, which two processes
# share, and that of the ten slowest of them.
QUICK_S, SLOWEST_S = 600, 75


def _modules() -> dict[str, Path]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return {
        ".".join(path.parts).removesuffix(".__init__"): ROOT / path.with_suffix(".py")
        for path in paths
    }


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (submodules & modules.keys()) or {node.module}
    return names & modules.keys()


def _words(paths: list[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


@pytest.fixture(scope="module")
def weights() -> dict[str, int]:
    modules = _modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    importers = Counter(
        imported for name, path in modules.items() for imported in _imports(path, modules) - {name}
    )
    subpackages = Counter[str]()
    for name, count in lines.items():
        subpackages[f"lines of {(name.split('.') + ['the top'])[1]}"] += count
    small = [
        name
        for name, path in modules.items()
        if importers[name] == 1 and lines[name] < SMALL_FILE and path.name != "__init__.py"
    ]
    return {
        **subpackages,
        "files": len(modules),
        "files over 300 lines": sum(count > LONG_FILE for count in lines.values()),
        "small files with one importer": len(small),
        "keys": len(leaves()),
        "commands": len(make_parser().get_default("known_commands")),
        "words of docs": _words(sorted((ROOT / "docs").rglob("*.md"))),
        "words of README": _words([ROOT / "README.md"]),
        "lines of tests": sum(
            len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
        ),
    }


def test_weights_stay_in_their_budgets(weights):
    over = {
        what: f"{weight:,} of {BUDGETS.get(what, 0):,}"
        for what, weight in weights.items()
        if weight > BUDGETS.get(what, 0)
    }
    assert not over, f"lighten the package, or raise the figures: {over}"


def test_budgets_follow_what_became_lighter(weights):
    """A budget is at most 2 % above the weight, so that it holds what a clean-up has won."""
    assert BUDGETS.keys() == weights.keys()
    loose = {
        what: f"{budget:,}, and {weights[what]:,} would do"
        for what, budget in BUDGETS.items()
        if budget > max(weights[what] * 1.02, weights[what] + 2)
    }
    assert not loose, f"lower the budgets: {loose}"


def test_quick_tests_stay_quick():
    record = read_record()
    assert sum(record["quick"].values()) <= QUICK_S
    assert sum(record["slowest"].values()) <= SLOWEST_S, record["slowest"]
