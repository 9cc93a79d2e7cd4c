# .venv/bin/python -m pytest tests/package/test_seams.py
"""Names that mean one thing in the whole package, and what only some of its parts know."""

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_vlm"
# Modules that their folder gives a meaning, such as `commands.plan.page` or `family.qwen3_5.model`.
OF_EACH_FOLDER = {"__init__", "__main__", "command", "fields", "model", "page", "terminal"}


def test_one_name_means_one_thing():
    """No two modules and no two public classes, functions or constants of modules share a name."""
    modules, names = defaultdict(set), defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        if file.stem == "python_api":  # its functions have the names of commands
            continue
        where, path = str(file.relative_to(PACKAGE)), file.relative_to(PACKAGE)
        if path.parts[0] == "family" and len(path.parts) == 3:
            # The folders of families have the same modules, with the same names in them.
            where = "the families"
        elif file.stem not in OF_EACH_FOLDER:
            modules[file.stem].add(where)
        for node in ast.parse(file.read_text()).body:
            for name in defined(node):
                if not name.startswith("_") and len(name) > 1:
                    names[name].add(where)
    for table in (modules, names):
        assert {name: files for name, files in table.items() if len(files) > 1} == {}


def defined(node: ast.stmt) -> list[str]:
    """Return the name of a class or function, or the names of the constants that are assigned."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name.isupper()]


# They know settings of vLLM by themselves: benchmarks run its own server, model cards tell how to
# serve an export, and configurations of other trainers name it.
WITH_VLLM = ("engines/", "commands/bench/", "commands/import_config/", "hf/model_card.py")


def words_of(node: ast.AST) -> list[str]:
    """Return what code calls a thing by: names, modules, and texts that are a single word."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if " " not in name:
            return [name]
        case ast.ImportFrom(module=str(module), names=aliases):
            return [module, *(alias.name for alias in aliases)]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
    return []


def test_only_engines_know_vllm():
    """Other code asks for an engine by its name. Messages to users may show it as an example."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        where = str(file.relative_to(PACKAGE))
        if not where.startswith(WITH_VLLM) and "other_trainers" not in where:
            tree = ast.parse(file.read_text())
            names = [name for node in ast.walk(tree) for name in words_of(node)]
            found[where] = [name for name in names if "vllm" in name.lower() and "=" not in name]
            found[where] += ["its file"] * ("vllm" in file.name)
    assert {where: names for where, names in found.items() if names} == {}


FOLDERS = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
A_PATH = re.compile(rf"[\w./]*\w\.py\b|(?<![\w/.])(?:{FOLDERS})/[\w/]*\w")
# Files of Megatron, of other trainers and of examples, and figures of a run.
NO_PATHS = {"optimizer_param_scheduler.py", "train_qwen.py", "FILE.py", "my.py", "rewards.py"}
NO_PATHS |= {"rl/reward", "rl/NAME", "rl/figures/NAME"}


def test_the_files_that_prose_names_exist(monkeypatch):
    """Comments, docstrings and docs/architecture.md name a file by its path or the end of it. The
    list of subpackages has words with an underscore for modules alone, without backquotes."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    prose = importlib.import_module("prose")
    paths = [path.with_suffix("") for path in PACKAGE.rglob("*")]
    ends = {"/".join(path.parts[-n:]) for path in paths for n in range(1, len(path.parts))}

    def missing(text: str) -> set[str]:
        names = {*A_PATH.findall(text)} - NO_PATHS
        return {n for n in names if n.removesuffix(".py") not in ends and not (ROOT / n).exists()}

    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = "".join(re.findall(r"^ {4}.*\n", page, re.MULTILINE))
    words = {*re.findall(r"\b[a-z]+_\w+", re.sub("`.*?`", "", listed))} - ends
    found = {"architecture.md": missing(page), "its list": words}
    for file in PACKAGE.rglob("*.py"):
        if missing(source := file.read_text()):
            texts = [*prose.docstrings(ast.parse(source)), *prose.comments(source)]
            found[file.name] = set[str]().union(*(missing(text) for _, text in texts))
    assert {file: names for file, names in found.items() if names} == {}
