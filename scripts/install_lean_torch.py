"""Install the newest torch that pyproject.toml allows, without NVIDIA's libraries, for tests on the
CPU.

    .venv-newest/bin/python scripts/install_lean_torch.py

Outside Python 3.11 an index may have torch only as its build for CUDA, and pip adds 4 GB of
libraries to that, which a machine without a GPU loads and never calls. Here the process loads the
two small ones that torch calls as it is imported (cudart and cupti). In place of each other one it
gets an empty library of the same name, whose functions end the process. A build for the CPU is left
as it is. On a machine with a GPU pip installs all of torch.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLED = ("cudart", "cupti")  # torch calls these on a machine without a GPU too
NVIDIA = re.compile(r"lib(cu(?!da\.)|nccl|nv)\w*\.so\.\d+")
FUNCTIONS = re.compile(r"(cu(blas|dnn|fft|rand|sparse|solver|File)|nccl|nvrtc|nvshmem)\w+")
NOT_HERE = """
#include <stdio.h>
#include <stdlib.h>
void not_here(void) {
  fputs("This environment has no NVIDIA libraries: see scripts/install_lean_torch.py\\n", stderr);
  abort();
}
"""


def main() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch_range = next(one for one in requirements if re.match(r"torch\b", one))
    if shutil.which("nvidia-smi"):
        _pip_install(torch_range)
        return
    _pip_install("--no-deps", torch_range)
    torch = metadata.distribution("torch")
    libraries = Path(str(torch.locate_file("torch/lib")))
    if not (libraries / "libtorch_cuda.so").exists():
        return
    text = torch.read_text("METADATA")
    assert text is not None
    toolkit = re.search(r"^Requires-Dist: cuda-toolkit\S*==(\d+\.\d+)", text, re.M)
    assert toolkit, "torch does not say which CUDA it was built with"
    _pip_install(
        "--no-deps", *(f"nvidia-cuda-{part}=={toolkit[1]}.*" for part in ("runtime", "cupti"))
    )
    _make_libraries(libraries)
    # pip would install what is left out together with the next package.
    kept = (line for line in text.splitlines(keepends=True) if not _names_left_out(line))
    Path(str(torch.locate_file(f"torch-{torch.version}.dist-info/METADATA"))).write_text(
        "".join(kept)
    )


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    subprocess.run(command, check=True)


def _names_left_out(line: str) -> bool:
    return re.match(r"Requires-Dist: (nvidia-|cuda-)", line) is not None


def _make_libraries(folder: Path) -> None:
    """Write an empty library for each that torch's own need and that pip has not installed."""
    built = [str(path) for path in folder.glob("*.so")]
    needed = _matches(NVIDIA, "readelf", "--dynamic", *built)
    names = _matches(FUNCTIONS, "nm", "-D", "--undefined-only", *built)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "not_here.c"
        aliases = (f'void {name}(void) __attribute__((alias("not_here")));' for name in names)
        source.write_text(NOT_HERE + "\n".join(sorted(aliases)))
        library = Path(temporary) / "not_here.so"
        _output("cc", "-shared", "-fPIC", "-o", str(library), str(source))
        for name in needed:
            if not any(part in name for part in CALLED):
                shutil.copy(library, folder / name)


def _matches(pattern: re.Pattern[str], *command: str) -> set[str]:
    return {found[0] for found in pattern.finditer(_output(*command))}


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
