# .venv/bin/python -m pytest tests/package/test_budgets.py
"""The weight of the package and of its tests. The budget of lines is the last row of the table in
CHANGELOG.md: whoever raises it writes there what left in exchange, or what granted the lines. The
lines of each subpackage are information: python -m tests.package.test_budgets"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron_vlm.cli.parser import make_parser
from megatron_vlm.config.schema import leaves
from tests.support.durations import read_record

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_vlm"
LONG_FILE = 450  # lines
SMALL_FILE = 90  # lines; with one importer, such a file may belong into it
BUDGETS = {
    "files": 452,
    "files over 450 lines": 0,
    "small files with one importer": 14,
    "longest function": 80,
    "90 % of functions": 25,
    "keys": 217,
    "commands": 19,
    "words of docs": 64_200,
    "words of README": 466,
    "lines of tests": 78_565,
}
ROW = re.compile(r"^\| ([\d,]+) \| \S.{20,} \|$", re.MULTILINE)  # of the table in CHANGELOG.md

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


def _lengths_of_functions(trees: list[ast.Module]) -> list[int]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return sorted(node.end_lineno - node.lineno + 1 for node in nodes if node.end_lineno)


def lines_of_subpackages() -> dict[str, int]:
    lines = Counter[str]()
    for name, path in _modules().items():
        lines[(name.split(".") + ["the top"])[1]] += len(path.read_text().splitlines())
    return dict(lines)


@pytest.fixture(scope="module")
def weights() -> dict[str, int]:
    modules = _modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    importers = Counter(
        imported for name, path in modules.items() for imported in _imports(path, modules) - {name}
    )
    small = [
        name
        for name, path in modules.items()
        if importers[name] == 1 and lines[name] < SMALL_FILE and path.name != "__init__.py"
    ]
    functions = _lengths_of_functions([ast.parse(path.read_text()) for path in modules.values()])
    return {
        "files": len(modules),
        "files over 450 lines": sum(count > LONG_FILE for count in lines.values()),
        "small files with one importer": len(small),
        "longest function": functions[-1],
        "90 % of functions": functions[len(functions) * 9 // 10],
        "keys": len(leaves()),
        "commands": len(make_parser().get_default("known_commands")),
        "words of docs": _words(sorted((ROOT / "docs").rglob("*.md"))),
        "words of README": _words([ROOT / "README.md"]),
        "lines of tests": sum(
            len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
        ),
    }


def test_package_stays_in_its_lines():
    """The budget follows what became lighter, so that it keeps what a clean-up has won."""
    rows = ROW.findall((ROOT / "CHANGELOG.md").read_text())
    budget, lines = int(rows[-1].replace(",", "")), sum(lines_of_subpackages().values())
    assert budget - 50 <= lines <= budget, "write a row of CHANGELOG.md with the reason"


def test_weights_stay_in_their_budgets(weights):
    over = {
        what: f"{weight:,} of {BUDGETS.get(what, 0):,}"
        for what, weight in weights.items()
        if weight > BUDGETS.get(what, 0)
    }
    assert not over, f"lighten the package, or raise the figures: {over}"


def test_budgets_follow_what_became_lighter(weights):
    """A budget is at most 2 % above the weight, so that it keeps what a clean-up has won. Those of
    functions are limits."""
    assert BUDGETS.keys() == weights.keys()
    loose = {
        what: f"{budget:,}, and {weights[what]:,} would do"
        for what, budget in BUDGETS.items()
        if "function" not in what and budget > max(weights[what] * 1.02, weights[what] + 2)
    }
    assert not loose, f"lower the budgets: {loose}"


def test_quick_tests_stay_quick():
    record = read_record()
    assert sum(record["quick"].values()) <= QUICK_S
    assert sum(record["slowest"].values()) <= SLOWEST_S, record["slowest"]


if __name__ == "__main__":
    for room, count in sorted(lines_of_subpackages().items(), key=lambda item: -item[1]):
        print(f"{count:7,} {room}")
