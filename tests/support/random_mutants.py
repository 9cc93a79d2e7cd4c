"""Random mutants of the package against the tests of their room:

    python -m tests.support.random_mutants --seed 41 --count 50 > mutants.txt

A mutant is one change of the code: another operator, another constant, a condition that says the
opposite, a return of nothing, a statement less. It lives in a clone of the last commit. The tests
of the room of its module and those that import this module play without the slow ones, the nearest
by imports first. A time-out kills. `--skip 20` goes on after the first 20.
"""

import argparse
import ast
import copy
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
TEST_S, MUTANT_S = 240, 1500
PAIRS = "Add Sub, Mult Div, FloorDiv Mod, Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or"
SWAPS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
# Nothing changes in imports, annotations, docstrings, our own asserts and what these calls say.
SPEECH = re.compile(r"_?log\.\w+|print|warnings\.warn|(\w+\.)*\w*Error")
UNCHANGED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


def is_unchanged(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or is_unchanged(node.value)
    is_speech = isinstance(node, ast.Call) and SPEECH.fullmatch(ast.unparse(node.func))
    return bool(is_speech) or isinstance(node, UNCHANGED)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each place of a tree that may change, with the text that replaces it."""
    if is_unchanged(node):
        return
    yield from own_change(node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from changes(child)


def own_change(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
            if type(op).__name__ in SWAPS:
                new, changed = getattr(ast, SWAPS[type(op).__name__])(), copy.copy(node)
                vars(changed).update(op=new, ops=[new])
                yield node, f"({ast.unparse(changed)})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.If() | ast.IfExp() | ast.While():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.Constant(value=str(value)) if value.isidentifier():
            yield node, repr("other_" + value)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.AugAssign()
            | ast.Expr()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
            | ast.Delete()
        ):
            yield node, "pass"


def choose(seed: int) -> Iterator[tuple[Path, ast.AST, str]]:
    """Yield mutants, one for each of some random lines. The seed and the code decide."""
    lines = defaultdict(list)
    for path in sorted((ROOT / "megatron_vlm").rglob("*.py")):
        for node, text in changes(ast.parse(path.read_text())):
            lines[path.relative_to(ROOT), node.lineno].append((node, text))
    chance = random.Random(seed)
    places = sorted(lines)
    chance.shuffle(places)
    for path, line in places:
        yield path, *chance.choice(lines[path, line])


def replaced(source: bytes, node: ast.AST, text: str) -> tuple[bytes, str]:
    """Return the source with the text in place of a node, and what stood there."""
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return source[:start] + text.encode() + source[end:], source[start:end].decode()


def tests_of(path: Path, graph: grimp.ImportGraph) -> list[str]:
    """Return the files of tests for a module. Tests that import its neighbours in a folder of the
    room are near as well."""
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    room = f"tests.{path.parts[1] if len(path.parts) > 2 else 'package'}."
    group = module.rpartition(".")[0] + "." if len(path.parts) > 3 else module
    near: dict[str, int] = {}
    for name in graph.modules:
        if ".test_" in name:
            imported = graph.find_modules_directly_imported_by(name)
            if module in imported:
                near[name] = 0
            elif any(each.startswith(group) for each in imported):
                near[name] = 1
            elif name.startswith(room):
                near[name] = len(graph.find_shortest_chain(name, module) or "no chain")
    return [f"{name.replace('.', '/')}.py" for name in sorted(near, key=lambda n: (near[n], n))]


def play(clone: str, files: list[str]) -> str:
    """Return what the tests say: that the mutant survived, or which of them killed it."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", f"--timeout={TEST_S}"]
    environment = os.environ | {"PYTHONPATH": clone}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    how |= {"cwd": clone, "env": environment, "start_new_session": True}
    tests = subprocess.Popen([*command, *files], **how)
    try:
        said, _ = tests.communicate(timeout=MUTANT_S)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        return f"killed by a time-out after {MUTANT_S} s"
    if tests.returncode in (0, 5):  # all passed, or there are none
        return "SURVIVED"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return f"killed by {failed[1] if failed else said.strip()[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--seed", 0), ("--count", 50), ("--skip", 0)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    graph = grimp.build_graph("megatron_vlm", "tests", cache_dir=None)
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
        chosen = enumerate(islice(choose(given.seed), given.count))
        for number, (path, node, text) in islice(chosen, given.skip, None):
            file, began = Path(clone) / path, time.monotonic()
            source = file.read_bytes()
            mutant, old = replaced(source, node, text)
            file.write_bytes(mutant)
            said = play(clone, tests_of(path, graph))
            file.write_bytes(source)
            change = f"{path}:{node.lineno}: {' '.join(old.split())} -> {text}"
            print(f"{number} {change}: {said}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
