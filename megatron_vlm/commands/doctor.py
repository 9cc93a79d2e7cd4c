"""`megatron-vlm doctor`: what this machine can run, and how to install what is missing. Each check
is a pure function of facts about the machine. A package may be missing, or installed and broken;
not even torch needs to be there."""

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_vlm.errors import ConfigError, DataError, show_value
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import folder_of, pin
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.training.preflight import check_model

if TYPE_CHECKING:
    from megatron_vlm.distributed.device import Gpu

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
_TRIAL = "from megatron_vlm.distributed.group_trial import try_as_rank; try_as_rank()"


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


def try_group(
    backend: str = "gloo", world: int = 2, program: str = _TRIAL, start_s: float = _START_S
) -> tuple[bool, str]:
    """Start processes that communicate. Return whether they could, and their summary or why not."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, f"{folder}/store"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes = [
            subprocess.Popen([*command, str(rank), f"{_TALK_S}", f"{world}", backend], **pipes)
            for rank in range(world)
        ]
        end = time.monotonic() + start_s + _TALK_S
        problems, summaries = [], []
        for process in processes:
            try:
                output = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                problems.append(f"no answer within {start_s + _TALK_S:g} s")
                continue
            summary, errors = (text.decode(errors="replace").strip() for text in output)
            summaries.append(summary)
            if process.returncode:
                problems.append((errors or "no message").splitlines()[-1])
    return not problems, (problems or summaries)[0]


OK, WARNING, MISSING = "ok", "warning", "missing"
_COLOURS = {OK: "green", WARNING: "yellow", MISSING: "red"}
# Purpose of the extras of pyproject.toml; the others are for developers.
EXTRAS = {
    "te": "for model.backend=te, on CUDA",
    "fla": "for faster linear attention of Qwen3.5, on CUDA",
    "ray": "to start training over Ray",
    "video": "for video files",
    "log": "for log.trackers=[tensorboard,wandb]",
    "serve": "for megatron-vlm serve",
    "gguf": "for megatron-vlm export --as gguf",
}
# An extra that pip does not install alone.
_OWN_STEPS = {"te": "install it as docs/install.md describes"}
_OF_RANKS = re.compile("(TORCH_)?NCCL_|GLOO_|TORCH_DISTRIBUTED_|CUDA_(LAUNCH|DEVICE_MAX)_")
_SLOW = re.compile(  # see docs/clusters.md
    "NCCL_((P2P|SHM|IB)_DISABLE=1|ALGO=|PROTO=)|.*(BLOCKING(_WAIT)?=1|HANDLING=0|DEBUG=DETAIL)"
)
_GIB = 2**30
_LITTLE_SHM = 1 * _GIB
_LITTLE_DISK = 20 * _GIB
_FEW_FILES = 4096
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Check:
    """A line of the table. Training can run with a warning, but not if something is missing."""

    name: str
    status: str  # ok | warning | missing
    found: str
    advice: str = ""


def run_doctor(model: str | None = None) -> int:
    """Print every check, also that of model.path=PATH. Return 0 if training can run, else 1."""
    key, _, path = (model or "").partition("=")
    if model is not None and (key != "model.path" or not path):
        raise ConfigError(
            f": {show_value(model)} is not model.path=PATH, the only argument",
            place="doctor",
            remedy="for other keys, see what a run would do: megatron-vlm train --dry-run",
        )
    console = Console(highlight=False)
    with console.status("importing the installed packages, starting two processes"):
        checks = list(all_checks())
        if path:
            checks.append(model_check(path))
    missing = [check.name for check in checks if check.status == MISSING]
    console.print(checks_table(checks))
    if missing:
        console.print(f"Training cannot run here. Missing: {', '.join(missing)}.", markup=False)
        return 1
    console.print("Training can run here.")
    return 0


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table with one line per check, with its advice below."""
    table = plain_table("status", "what", "found", first=3)
    for check in checks:
        detail = Text(escape_controls(check.found))
        if check.advice:
            detail.append(f"\n{check.advice}", "dim")
        table.add_row(Text(check.status, _COLOURS[check.status]), Text(check.name), detail)
    return table


def all_checks() -> Iterator[Check]:
    """Yield the checks of this machine, in the order in which one would fix them."""
    yield python_check(platform.python_version(), python_range())
    for extra, requirement in requirements(EXTRAS):
        version = installed_version(requirement.name)
        problem = None if version is None else import_problem(requirement.name)
        yield package_check(extra, requirement, version, problem)
    version = installed_version("torchvision")
    problem = None if version is None else import_problem("torchvision")
    yield torchvision_check(version, problem)
    if import_problem("torch") is None:
        from megatron_vlm.distributed.device import (
            find_gpus,
            find_unseen_gpu,
            nccl_version,
            why_unseen,
        )

        gpus = find_gpus()
        driver = driver_version()
        if (sign := None if gpus else find_unseen_gpu()) is None:
            yield from gpu_checks(gpus, driver, nccl_version())
        else:
            # A run refuses to fall back to the CPU by itself.
            detail = f"torch sees none, though {sign} is there; driver {driver or 'unknown'}"
            yield Check("GPU", MISSING, detail, f"{why_unseen()}; on the CPU: platform=cpu")
        if len(gpus) > 1:
            yield nccl_check(len(gpus), *try_group("nccl", len(gpus)))
        yield gloo_check(*try_group())
        yield variables_check(os.environ)
        compilers = map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))
        yield compiler_check(next(filter(None, compilers), None), bool(gpus))
    else:
        yield Check("GPU and gloo", MISSING, "cannot be checked without torch")
    shm = Path("/dev/shm")
    yield shm_check(shutil.disk_usage(shm).free if shm.is_dir() else None)
    for key, folder in (("data.cache_dir", cache_folder()), ("run", Path.cwd())):
        place = next(path for path in (folder, *folder.parents) if path.is_dir())
        writable = os.access(place, os.W_OK)
        yield disk_check(key, folder, shutil.disk_usage(place).free, writable)
    yield files_check(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _check(name: str, good: bool, found: str, advice: str, otherwise: str = WARNING) -> Check:
    """Return a check, which has advice only if it is not good."""
    return Check(name, OK, found) if good else Check(name, otherwise, found, advice)


def python_check(version: str, allowed: SpecifierSet) -> Check:
    """Check the interpreter against requires-python."""
    return _check("Python", version in allowed, version, f"needs {allowed}", MISSING)


def package_check(
    extra: str, requirement: Requirement, installed: str | None, problem: str | None
) -> Check:
    """Check that a package is installed, has a version in the range, and can be imported. `extra`
    is empty for packages that every run needs; packages of extras are never missing."""
    get = f"pip install 'megatron_vlm[{extra}]'" if extra else f"pip install '{requirement}'"
    advice = f"{EXTRAS[extra]}: {_OWN_STEPS.get(extra, get)}" if extra else get
    if installed is None:
        fault = "not installed"
    elif not requirement.specifier.contains(installed, prereleases=True):
        fault = f"{installed}, outside {requirement.specifier}"
    elif problem is not None:
        fault = f"{installed}, but its import fails: {problem}"
    else:
        return Check(requirement.name, OK, installed)
    return Check(requirement.name, WARNING if extra else MISSING, fault, advice)


def torchvision_check(installed: str | None, problem: str | None) -> Check:
    """Check the package without which exports load in parts alone. Its compiled operators fit one
    release of torch, so it cannot have a range of its own."""
    detail = f"{installed}, but its import fails: {problem}" if problem else installed
    advice = (
        "for AutoProcessor of transformers, which loads exports; training needs none: pip install "
        "torchvision, from the index and of the release that belong to the installed torch"
    )
    is_good = installed is not None and problem is None
    return _check("torchvision", is_good, detail or "not installed", advice)


def gpu_checks(gpus: "Sequence[Gpu]", driver: str | None, nccl: str | None) -> Iterator[Check]:
    """Check the devices, the types that they compute in, and their interconnect."""
    if not gpus:
        yield Check("GPU", OK, "none: CPU with gloo, in fp32")
        return
    kinds = Counter((gpu.name, round(gpu.memory / _GIB)) for gpu in gpus)
    names = ", ".join(f"{count} x {name}, {size} GiB" for (name, size), count in kinds.items())
    yield Check("GPU", OK, f"{names}; driver {driver or 'unknown'}")
    detail, advice = nccl or "not in this torch", "install a CUDA build of torch"
    yield _check("NCCL", nccl is not None, detail, advice, MISSING)
    without = ", ".join(sorted({gpu.name for gpu in gpus if not gpu.bf16}))
    detail = f"not in the hardware of {without}" if without else "in the hardware"
    advice = "set train.precision=fp32; bf16 needs compute capability 8.0"
    yield _check("bf16", not without, detail, advice)
    unknown = ", ".join(sorted({gpu.name for gpu in gpus if gpu.peak_flops is None}))
    peaks = sorted({gpu.peak_flops / 1e12 for gpu in gpus if gpu.peak_flops is not None})
    known = ", ".join(f"{peak:,.0f} TFLOP/s" for peak in peaks)
    detail = f"not known of {unknown}" if unknown else known
    advice = "MFU will not be shown; add the device to CARDS in distributed/device.py"
    yield _check("peak FLOP/s", not unknown, detail, advice)


def nccl_check(count: int, works: bool, found: str) -> Check:
    """Check that a process for each GPU can send what a run sends."""
    advice = "NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 avoids direct access"
    return _check(f"NCCL on {count} GPUs", works, found, advice, MISSING)


def gloo_check(works: bool, found: str) -> Check:
    """Check that two processes can communicate: hosts do so over gloo, on GPUs, too."""
    advice = (
        "loopback must be up (`ip link show lo`) and nothing may filter it; "
        "GLOO_SOCKET_IFNAME names another interface"
    )
    return _check("gloo", works, found, advice, MISSING)


def variables_check(variables: Mapping[str, str]) -> Check:
    """Show the variables that change how ranks communicate, and warn about slow values."""
    found = [f"{name}={variables[name]}" for name in sorted(variables) if _OF_RANKS.match(name)]
    slow = " ".join(each for each in found if _SLOW.match(each))
    advice = f"{slow}: only to find a fault, as it slows runs or hides errors"
    return _check("variables of ranks", not slow, " ".join(found) or "none", advice)


def compiler_check(path: str | None, has_gpu: bool) -> Check:
    """Check the C compiler. On GPUs, Triton compiles the launchers of Megatron's fused kernels when
    it first runs them. On the CPU nothing is compiled."""
    if path is None and not has_gpu:
        return Check("C compiler", OK, "none, and training on the CPU needs none")
    advice = "Triton needs one: apt-get install gcc, or set CC"
    return _check("C compiler", path is not None, path or "none", advice, MISSING)


def model_check(path: str) -> Check:
    """Check that a checkpoint is available and can be trained here: a folder, or a name on the Hub,
    for which the settings are downloaded, but no weights."""
    try:
        name = pin(path)
        check_model(str(folder_of(name)))
        sizes = read_sizes(name)
    except ImportError as error:
        return Check("model.path", MISSING, f"{path} cannot be checked: {error}")
    except (ConfigError, DataError) as error:
        return Check("model.path", MISSING, str(error))
    found = f"{name}: {sizes.num_values:,} parameters"
    has_weights = any(os.path.lexists(Path(path) / file) for file in _WEIGHTS)
    if Path(path).is_dir() and not has_weights:  # names on the Hub are downloaded later
        advice = "megatron-vlm plan needs none, but a run does: hf download ORG/NAME"
        return Check("model.path", WARNING, f"{found}, and no weights in it", advice)
    return Check("model.path", OK, found)


def shm_check(free: int | None) -> Check:
    """Check the shared memory, through which workers pass their batches."""
    detail = "does not exist" if free is None else f"{free / _GIB:,.1f} GiB free"
    advice = "docker run --shm-size=8g (or --ipc=host); or data.num_workers=0"
    return _check("/dev/shm", (free or 0) >= _LITTLE_SHM, detail, advice)


def disk_check(key: str, folder: Path, free: int, writable: bool) -> Check:
    """Check the disk space for the files of a key: encoded text or checkpoints."""
    name, detail = f"disk for {key}", f"{free / _GIB:,.1f} GiB free at {folder}"
    if not writable:
        return Check(name, WARNING, f"{folder} cannot be written", f"set {key} to another folder")
    advice = (
        "a checkpoint of the 2B model with its optimizer takes about 30 GiB; "
        f"set {key} to a folder on a larger disk"
    )
    return _check(name, free >= _LITTLE_DISK, detail, advice)


def files_check(limit: int) -> Check:
    """Check the limit of open files. Sockets, workers and shards are all open files."""
    if limit == resource.RLIM_INFINITY:
        return Check("open files", OK, "unlimited")
    return _check("open files", limit >= _FEW_FILES, f"{limit:,}", "ulimit -n 65536")
