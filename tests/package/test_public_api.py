# .venv/bin/python -m pytest tests/package/test_public_api.py
"""Public names of the package, which exist, cost nothing until they are used, and are the only ones
that docs and examples import. The modules for `python -m` exist as well."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import megatron_vlm
from megatron_vlm.errors import MegatronVLMError
from tests.package.test_docs import ROOT, blocks, notebook_cells

EXAMPLES = sorted((ROOT / "scripts" / "rl").glob("*.py"))
# These are internal tools. They may import more, but no public name from another module.
TOOLS = sorted({*(ROOT / "scripts").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")})


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield each name of the package that Python code imports, after its module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [("", alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if (module or name).partition(".")[0] == "megatron_vlm":
                yield module, name


def not_public(code: str) -> list[str]:
    """Return the names that are not public. Examples may also use the pictures and the tiny models
    of the demo."""
    return [
        f"{module}.{name}".removeprefix(".")
        for module, name in imports(code)
        if (module, name) != ("", "megatron_vlm")
        and not module.startswith(("megatron_vlm.commands.demo.", "megatron_vlm.family.tiny"))
        and not (module == "megatron_vlm" and name in megatron_vlm.__all__)
    ]


def documented() -> Iterator[tuple[str, str]]:
    """Yield the Python code of docs and examples, after its place."""
    for block in blocks("python", "python test"):
        yield block.where, block.text
    for place, cell in enumerate(notebook_cells("code")):
        lines = [line for line in cell.splitlines() if not line.startswith(("!", "%"))]
        yield f"quickstart.ipynb, cell {place}", "\n".join(lines)
    for file in EXAMPLES:
        yield file.name, file.read_text()


@pytest.mark.parametrize("name", [n for n in megatron_vlm.__all__ if n != "__version__"])
def test_a_public_name_is_that_of_its_module(name):
    value = getattr(megatron_vlm, name)
    home = value.__module__
    assert getattr(importlib.import_module(home), name) is value
    assert home.startswith("megatron_vlm.")


def test_type_checkers_know_the_public_names():
    """A stub exports a name that is imported as itself."""
    tree = ast.parse((ROOT / "megatron_vlm" / "__init__.pyi").read_text())
    exported = [alias for node in tree.body for alias in node.names]
    assert all(alias.asname == alias.name for alias in exported)
    assert megatron_vlm.__all__ == sorted(alias.name for alias in exported)
    assert set(megatron_vlm.__all__) <= set(dir(megatron_vlm))


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'megatron_vlm' has no attribute 'WorkerGrop'"):
        megatron_vlm.WorkerGrop  # noqa: B018
    with pytest.raises(ImportError, match="write_tiny is not public any more: megatron-vlm demo"):
        from megatron_vlm import write_tiny  # noqa: F401


def test_the_package_and_what_environments_import_load_no_torch():
    script = (
        "import sys, megatron_vlm; from megatron_vlm import Config, EnvStep, ConfigError;"
        "print({'torch', 'transformers', 'megatron'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_docs_and_examples_import_public_names_alone():
    code = list(documented())
    used = {name for _, text in code for module, name in imports(text) if module}
    assert {"MegatronWorker", "EnvStep", "RowMaker", "VllmSampler"} <= used
    assert {where: names for where, text in code if (names := not_public(text))} == {}


def test_tools_import_public_names_from_the_package():
    wrong = [
        f"{file.name}: {module}.{name}"
        for file in TOOLS
        for module, name in imports(file.read_text())
        if module != "megatron_vlm" and name in megatron_vlm.__all__
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["train", "rl", "serve"])
def test_entrances(name):
    """Modules start the processes of a job under torchrun, Slurm or the commands' own launcher."""
    module = f"megatron_vlm.{name}"
    texts = [file.read_text() for file in (ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"{module}(`| )", text) for text in texts)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: python -m {module} ")


def test_the_commands_are_functions():
    import megatron_vlm.train  # the module takes the name of the function

    assert callable(megatron_vlm.train) and callable(megatron_vlm.evaluate)
    with pytest.raises(MegatronVLMError, match=r"^Python, line \d: optim\.lr=-1"):
        megatron_vlm.train("model.path=x", model="tiny_cpu", data="shapes", optim={"lr": -1.0})
    with pytest.raises(MegatronVLMError, match="nowhere"):
        megatron_vlm.evaluate("nowhere", "data.seed=x")
    with pytest.raises(MegatronVLMError, match="nowhere"):
        megatron_vlm.chat("nowhere", "-What is it?", images=["a.png"])
