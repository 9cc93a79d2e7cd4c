"""Facts about this machine for doctor.py. A package may be missing, or installed and broken."""

import datetime
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_MODULES = {
    "flash-linear-attention": "fla",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine.pytorch",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
    "hydra-core": "hydra",
}
_TALK_S = 20.0
_START_S = 60.0  # seconds in which two processes must import torch
_TALK = (
    "import sys; from megatron_vlm.commands.machine_facts import talk_over_gloo; "
    "talk_over_gloo(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))"
)


def requirements(extras: Container[str]) -> list[tuple[str, Requirement]]:
    """Return (extra, requirement) from the checkout's pyproject.toml, which may be newer than an
    editable installation, or from the installed package. The extra "" marks packages that every run
    needs."""
    if (project := _pyproject()) is not None:
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        pairs = [(extra, Requirement(text)) for extra, lines in groups.items() for text in lines]
    else:
        pairs = []
        for text in importlib.metadata.requires("megatron_vlm") or []:
            extra = re.search(r"extra == ['\"](\w+)", text)
            pairs.append((extra[1] if extra else "", Requirement(text)))
    return [
        (extra, requirement)
        for extra, requirement in pairs
        if (extra == "" or extra in extras)
        and (requirement.marker is None or requirement.marker.evaluate({"extra": extra}))
    ]


def python_range() -> SpecifierSet:
    """Return the range of requires-python."""
    if (project := _pyproject()) is not None:
        return SpecifierSet(project["requires-python"])
    return SpecifierSet(importlib.metadata.metadata("megatron_vlm")["Requires-Python"])


def _pyproject() -> dict | None:
    path = Path(__file__).parents[2] / "pyproject.toml"
    if not path.is_file():
        return None
    project = tomllib.loads(path.read_text())["project"]
    return project if project["name"] == "megatron_vlm" else None


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_problem(name: str) -> str | None:
    """Return why a module cannot be imported, such as a missing CUDA library; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def driver_version() -> str | None:
    """Return the version that nvidia-smi reports; None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TALK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def cache_folder() -> Path:
    """Return the default of data.cache_dir, or the home folder if the schema cannot be imported."""
    try:
        from megatron_vlm.config.schema import DataConfig
    except ImportError:
        return Path.home()
    return Path(DataConfig().cache_dir or ".").expanduser()


def gloo_problem(program: str = _TALK, start_s: float = _START_S) -> str | None:
    """Start two processes that communicate; return why they could not, or None."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, f"{folder}/store"]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        processes = [
            subprocess.Popen([*command, str(rank), str(_TALK_S)], **pipes, text=True)
            for rank in (0, 1)
        ]
        end = time.monotonic() + start_s + _TALK_S
        problems = []
        for process in processes:
            try:
                stderr = process.communicate(timeout=max(0.1, end - time.monotonic()))[1]
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                problems.append(f"no answer within {start_s + _TALK_S:g} s")
                continue
            if process.returncode:
                problems.append((stderr.strip() or "no message").splitlines()[-1])
    return problems[0] if problems else None


def talk_over_gloo(store: str, rank: int, timeout_s: float) -> None:
    """Communicate with the other one of two processes."""
    import torch
    import torch.distributed as dist

    from megatron_vlm.distributed.job_store import stay_on_this_machine

    stay_on_this_machine()  # as a job of one machine does
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    if value.item() != 3:
        sys.exit(f"1 + 2 came out as {value.item():g}")
