# .venv/bin/python -m pytest tests/package/test_wheel.py
"""What `pip install` of the wheel gives: everything that the quickstart needs, far from the
checkout. The packages that it depends on are those of this environment, so no network is needed."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.package.test_docs import ROOT, Block, blocks, notebook_cells, run_block

pytestmark = pytest.mark.slow

_WHERE = """
import json, sys
import megatron_vlm.cli.parser, megatron_vlm.config, megatron_vlm.train
ours = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "megatron_vlm"]
print(json.dumps([ours, str(megatron_vlm.config.config_dir()), sys.path]))
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel."""

    wheel: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    alone = ["--no-deps", "--no-index"]
    built = [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(root), str(ROOT)]
    subprocess.run(built, check=True, timeout=300)
    (wheel,) = root.glob("megatron_vlm-*.whl")
    made = Installed(wheel, root / "venv")
    venv.create(made.folder, with_pip=False)
    subprocess.run(
        [*pip, "--python", str(made.python), "install", *alone, str(wheel)], check=True, timeout=300
    )
    # The paths of a .pth file are taken as they are: that of the checkout, which an editable
    # install has left in such a file of its own, is not among them.
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = made.folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
    return made


def test_the_wheel_has_every_file(installed):
    """Of the package, and the recipes, which a checkout has beside it."""
    listed = subprocess.run(
        ["git", "ls-files", "megatron_vlm", "configs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    wanted = {name.replace("configs/", "megatron_vlm/configs/") for name in listed.stdout.split()}
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    found = {name for name in names if ".dist-info/" not in name}
    assert len(wanted) > 200 and wanted <= found, wanted - found
    assert all("__pycache__" not in name for name in found)


def test_it_is_imported_from_the_wheel(installed, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [installed.python, "-c", _WHERE],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, configs, paths = json.loads(done.stdout.splitlines()[-1])
    assert len(ours) > 50
    for file in (*ours, configs):
        assert Path(file).is_relative_to(installed.folder), file
    assert str(ROOT) not in paths


@pytest.mark.rotate(1, group="walks of the quickstart")
@pytest.mark.timeout(1800)  # two minutes on a machine that has nothing else to do
def test_the_quickstart_runs(installed, tmp_path):
    """Ten commands, each of which imports everything; and the examples of rl.md."""
    runnable = blocks("bash test", "python test")
    assert {block.page.name for block in runnable} == {"quickstart.md", "rl.md"}
    assert sum("# writes" in block.text for block in runnable) >= 6
    for block in runnable:
        run_block(block, tmp_path, installed.python)


_SHELL = """
import subprocess
def shell(line):
    subprocess.run(line, shell=True, check=True)
"""


@pytest.mark.rotate(1, group="walks of the quickstart")
@pytest.mark.timeout(1800)
def test_the_notebook_runs(installed, tmp_path):
    """Its cells in one process, as a kernel does: a line that begins with ! goes to the shell. The
    last cell asserts that 9 of 10 answers about other pictures are right."""
    lines = "\n".join(notebook_cells("code")).splitlines()
    script = [f"shell({line[1:]!r})" if line.startswith("!") else line for line in lines]
    assert sum(line.startswith("shell") for line in script) >= 5
    notebook = ROOT / "docs" / "quickstart.ipynb"
    block = Block(notebook, 1, "python test", _SHELL + "\n".join(script))
    said = run_block(block, tmp_path, installed.python)
    assert "step 121" in said and "What shape is the" in said, said
