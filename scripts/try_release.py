"""Install a built wheel in a clean environment of each Python, and run the quickstart there.

    python scripts/try_release.py UV WHEEL PYTHON ...

Each PYTHON is an interpreter. A line says what was installed. UV also installs the wheel as a tool,
and runs it without installing it. The exit status is 0 if all of that works.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.package.test_docs import blocks, run_block  # noqa: E402

_VERSIONS = """
import platform
from importlib.metadata import version
packages = ("megatron_vlm", "megatron-core", "torch", "transformers")
print(platform.python_version(), *(f"{name} {version(name)}" for name in packages))
"""


def try_python(uv: str, wheel: Path, python: str, folder: Path) -> None:
    """Run the blocks of the quickstart with the wheel in an environment of this Python."""
    env = folder / "env"
    subprocess.run([uv, "venv", "--quiet", "--python", python, env], check=True)
    own = env / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", own, wheel], check=True)
    subprocess.run([own, "-c", _VERSIONS], check=True)
    here = folder / "here"
    here.mkdir()
    for block in blocks("bash test", "python test"):
        if block.page.name == "quickstart.md":
            run_block(block, here, own)
    print("the quickstart runs", flush=True)


def try_tool(uv: str, wheel: Path, python: str, folder: Path) -> None:
    """Install the wheel as a tool, and run its command; then run it without installing it."""
    places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    env = {**os.environ, **places}
    subprocess.run(
        [uv, "tool", "install", "--quiet", "--python", python, wheel], check=True, env=env
    )
    subprocess.run([folder / "bin" / "megatron-vlm", "--version"], check=True, env=env)
    once = [uv, "tool", "run", "--quiet", "--python", python, "--from", str(wheel), "megatron-vlm"]
    subprocess.run([*once, "--version"], check=True, env=env)


def main() -> int:
    """Try the wheel with each Python; return the exit status."""
    uv, wheel, *pythons = sys.argv[1:]
    assert pythons
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            try_python(uv, Path(wheel), python, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        try_tool(uv, Path(wheel), pythons[-1], Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
