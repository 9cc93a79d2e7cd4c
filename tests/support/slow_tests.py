"""Play the slow tests that a commit needs:

    python -m tests.support.slow_tests          # what changed, and a part of the rest
    python -m tests.support.slow_tests --all

tests/durations.json has, for each file of slow tests, the last commit at which all of its tests
passed. A file is due if it has none, or if something has changed since then in its room, in the
code that it imports, or in a file that it names. Due files play in the order of their distance from
a change, as long as they fit into SECONDS; the rest stays due. Beside them, each commit plays
another of PARTS parts of all files. If the choice fails, all files play.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

from tests.support.durations import read_record
from tests.support.random_runs import ROOT, commit_number

PARTS = 10
SECONDS = 60.0  # for the files that are due; most run two at a time
UNKNOWN_S = 30.0  # for a file that has no duration yet
UNKNOWN = 99  # imports from a change of a file that has no green commit yet, if none is nearer
SIDE_BY_SIDE = ["-n", "2", "--dist", "loadfile"]
NO_TESTS = 5  # pytest's exit status
EVERYTHING = {"pyproject.toml", "constraints.txt", "tests/conftest.py"}  # what all tests depend on


def slow_files() -> list[str]:
    """Return the files with slow tests, relative to the root."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(re.findall(r"^(tests/\S+\.py):", done.stdout, re.MULTILINE))


def changed_since(commit: str) -> list[str]:
    """Return the files that are not as they were at a commit, those without a commit included."""
    return _git("diff", "--name-only", commit) + _git("ls-files", "-o", "--exclude-standard")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("megatron_vlm", "tests", cache_dir=None)


def _changed_modules(changed: Iterable[str]) -> set[str]:
    """Return the modules of the import graph that a change of these files touches."""
    modules: set[str] = set()
    for path in map(Path, changed):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if path.suffix == ".py" and name in _graph().modules:
            modules.add(name)
        elif path.parts[0] == "megatron_vlm":  # a template, or a file that was deleted
            package = path.parent
            while ".".join(package.parts) not in _graph().modules:
                package = package.parent
            modules.add(".".join(package.parts))
        elif path.parts[0] == "configs":
            modules.add("megatron_vlm.config.load")
        named = _named_in(path)
        for name in named - _graph().modules:  # a program in a folder of tests/support
            named = named | _named_in(Path(*name.split(".")).with_suffix(".py"))
        modules |= named & _graph().modules
    return modules


def _named_in(path: Path) -> set[str]:
    """Return the modules of the tests that name a file, or the folder of tests/support it is in."""
    in_folder = path.parts[:2] == ("tests", "support") and len(path.parts) > 3
    name = path.parts[2] if in_folder else path.name
    stem = "/".join(path.with_suffix("").parts[-2:]).replace("/", r"\.")
    pattern = re.compile(rf"\b{re.escape(name)}\b|{stem}\b")
    return {name for name, text in _sources().items() if pattern.search(text)}


@cache
def _sources() -> dict[str, str]:
    """Return the text of each module of the tests without the line that says how to run it."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py"]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return {
        name: re.sub(r"\A# .*\n", "", path.read_text())
        for name, path in zip(names, paths, strict=True)
    }


def _distances(changed: set[str]) -> dict[str, int]:
    """Return the least number of imports between each module and a changed one."""
    distances = dict.fromkeys(changed, 0)
    level, distance = changed, 0
    while level:
        distance += 1
        importers = (_graph().find_modules_that_directly_import(module) for module in level)
        level = set().union(*importers) - distances.keys()
        distances |= dict.fromkeys(level, distance)
    return distances


def due(files: Iterable[str], changed: Iterable[str]) -> dict[str, int]:
    """Return those of the files whose tests a change of other files may break, with their
    distance from it. The tests of a room depend on all of the package's code in that room."""
    if EVERYTHING & set(changed):
        return dict.fromkeys(files, 0)
    distances = _distances(_changed_modules(changed))
    found = {}
    for file in files:
        room = f"megatron_vlm.{Path(file).parts[1]}"
        test = ".".join(Path(file).with_suffix("").parts)
        of_room = (name for name in distances if name == room or name.startswith(f"{room}."))
        near = [distances[name] for name in (test, *of_room) if name in distances]
        if near:
            found[file] = min(near)
    return found


def choose(files: list[str], record: dict[str, dict], commit: int) -> dict[str, str]:
    """Return the files to play with the reason for each, and say what stays due."""
    commits: dict[str, list[str]] = {}
    for file in files:
        commits.setdefault(record.get(file, {}).get("commit", ""), []).append(file)
    some_commit = next(filter(None, commits), "HEAD")
    distances: dict[str, int] = {}
    for last_green, group in commits.items():
        if not last_green:
            distances |= dict.fromkeys(group, UNKNOWN)
        distances |= due(group, changed_since(last_green or some_commit))
    chosen = dict.fromkeys(files[commit % PARTS :: PARTS], "its turn")
    left = SECONDS
    for file in sorted(distances, key=lambda file: (distances[file], file)):
        seconds = record.get(file, {}).get("seconds", UNKNOWN_S)
        if file in chosen or left >= seconds:
            left -= 0 if file in chosen else seconds
            chosen[file] = f"{distances[file]} imports from a change"
        else:
            print(f"stays due: {file}, {distances[file]} imports from a change, {seconds:.0f} s")
    return chosen


def main() -> None:
    all_files = slow_files()
    files = dict.fromkeys(all_files, "all")
    if "--all" not in sys.argv:
        try:
            files = choose(all_files, read_record()["slow"], commit_number() // 0x1000000)
        except Exception as error:
            print(f"All slow tests play, because the choice failed: {error!r}")
    for file, reason in sorted(files.items()):
        print(f"{file}: {reason}", flush=True)
    play(sorted(files))


def play(files: list[str]) -> None:
    """Run the slow tests of files, and end this process if one of them fails."""
    pytest = [sys.executable, "-m", "pytest"]
    choices = (["-m", "slow and not alone", *SIDE_BY_SIDE], ["-m", "slow and alone"])
    commands = [[*pytest, *options, *files] for options in choices]
    statuses = {subprocess.run(words, cwd=ROOT, check=False).returncode for words in commands}
    sys.exit(max(statuses - {NO_TESTS}, default=0))


if __name__ == "__main__":
    main()
