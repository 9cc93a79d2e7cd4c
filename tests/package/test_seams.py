# .venv/bin/python -m pytest tests/package/test_seams.py
"""Names that mean one thing in the whole package, and what only some of its parts know."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_vlm"
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
