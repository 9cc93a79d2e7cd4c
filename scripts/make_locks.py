"""Write the lock files of requirements/ with the newest versions that pyproject.toml allows.

    make lock

cpu.txt has the versions of constraints.txt, for any Python that is supported. The others are for
Python 3.12 on Linux with CUDA 13.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
_EXTRAS = ("video", "log", "ray", "serve")
# Parts of torch's build for CUDA. The CPU build has none of them.
_OF_CUDA = re.compile(r"(nvidia|cuda|triton)\b")
# transformer-engine-torch's metadata names the core for CUDA 12, whichever core is installed. Its
# file is that of the core for CUDA 13, so the lock file is installed with --no-deps.
_NOT_CUDA13 = "transformer-engine-cu12"


def compile_lock(uv: str, name: str, *arguments: str) -> None:
    """Write a lock file by `uv pip compile`."""
    extras = [word for extra in _EXTRAS for word in ("--extra", extra)]
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--upgrade",
        "--custom-compile-command",
        "make lock",
    ]
    out = ["--output-file", f"requirements/{name}"]
    with_extras = extras if "pyproject.toml" in arguments else []
    # Wheels of this machine do not belong into a lock file.
    env = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    subprocess.run([*command, *with_extras, *out, *arguments], cwd=ROOT, check=True, env=env)


def without_cuda(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a lock file without the packages of CUDA, and the comments below them."""
    dropped = False
    for line in lines:
        if not line.startswith(" "):
            dropped = bool(_OF_CUDA.match(line))
        if not dropped:
            yield line


def main() -> int:
    """Write all lock files with the uv that is given."""
    uv = sys.argv[1]
    compile_lock(
        uv, "cpu.txt", "--universal", "--constraint", "constraints.txt", "--python-version", "3.11",
        "pyproject.toml",
    )  # fmt: skip
    cpu = FOLDER / "cpu.txt"
    cpu.write_text("\n".join(without_cuda(cpu.read_text().splitlines())) + "\n")
    linux = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
    compile_lock(
        uv, "cuda13.txt", *linux, "--extra", "fla", "--no-emit-package", _NOT_CUDA13,
        "pyproject.toml", "requirements/cuda13.in",
    )  # fmt: skip
    compile_lock(uv, "vllm-cuda13.txt", *linux, "requirements/vllm-cuda13.in")
    return 0


if __name__ == "__main__":
    sys.exit(main())
