# .venv/bin/python -m pytest tests/commands/test_doctor.py
"""`doctor` separates what runs here from what does not, and names the remedy for the rest."""

import io
import resource
import tomllib
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_vlm.commands import doctor
from megatron_vlm.commands.doctor import (
    EXTRAS,
    MISSING,
    OK,
    WARNING,
    Check,
    all_checks,
    compiler_check,
    disk_check,
    files_check,
    gloo_check,
    gpu_checks,
    import_problem,
    installed_version,
    nccl_check,
    package_check,
    python_check,
    requirements,
    run_doctor,
    shm_check,
    torchvision_check,
    try_group,
    variables_check,
)
from megatron_vlm.distributed.device import Gpu, find_gpus
from tests.support.tables import in_one_test

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, True, 989e12)
T4 = Gpu("Tesla T4", 15 * GIB, False, None)
TORCH = Requirement("torch>=2.9,<2.14")
TE = Requirement("transformer-engine[pytorch]>=2.9")


@pytest.fixture(scope="module")
def real_run():
    """Return (exit status, output, checks) of a real run in 80 columns."""
    checks = []

    def recorded():
        for check in all_checks():
            checks.append(check)
            yield check

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setattr(doctor, "all_checks", recorded)
        patch.setenv("COLUMNS", "80")
        status = run_doctor()
    return status, output.getvalue(), checks


@pytest.fixture(scope="module")
def here(real_run):
    """Return the checks of this machine by name."""
    return {check.name: check for check in real_run[2]}


@pytest.mark.full
def test_this_machine_can_train(here):
    """This machine runs these tests, so no requirement of a run can be missing."""
    assert [check for check in here.values() if check.status == MISSING] == []
    assert here["torch"] == Check("torch", OK, version("torch"))
    assert here["gloo"].found.startswith("2 processes: all-reduce, ring, pair, split in ")
    for name in ("Python", "megatron-core", "transformers", "datasets", "pyarrow", "GPU"):
        assert here[name].status == OK
    assert {"transformer-engine", "ray", "av", "torchvision", "/dev/shm", "open files"} <= set(here)
    assert {"disk for data.cache_dir", "disk for run", "C compiler"} <= set(here)
    if not torch.cuda.is_available():
        assert here["GPU"].found == "none: CPU with gloo, in fp32" and "NCCL" not in here


def test_what_is_missing_makes_the_exit_status(monkeypatch, capsys):
    for checks, status, verdict in (
        ([Check("torch", MISSING, "[not] there", "pip 'x[y]'")] * 2, 1, "Missing: torch, torch."),
        ([Check("ray", WARNING, "not installed")], 0, "Training can run here."),
    ):
        monkeypatch.setattr(doctor, "all_checks", lambda checks=checks: iter(checks))
        assert run_doctor() == status
        output = capsys.readouterr().out
        assert verdict in output
        for check in checks:
            assert check.name in output and check.found in output and check.advice in output


@pytest.mark.full
def test_a_real_run_prints_every_check(real_run):
    status, output, checks = real_run
    assert status == 0 and output.rstrip().endswith("Training can run here.")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for check in checks:
        assert f"{check.status} {check.name} {check.found}"[:60] in " ".join(lines)
    assert max(map(len, output.splitlines())) <= 80


def test_without_torch_the_rest_is_still_checked(monkeypatch):
    def fails(name):
        return "ImportError: libcudart.so.12: cannot open" if name == "torch" else None

    monkeypatch.setattr(doctor, "import_problem", fails)
    checks = {check.name: check for check in all_checks()}
    assert checks["torch"].status == checks["GPU and gloo"].status == MISSING
    assert "libcudart" in checks["torch"].found
    assert checks["transformers"].status == OK and "gloo" not in checks and "open files" in checks


@in_one_test(
    ("extra", "requirement", "found", "problem", "status", "says"),
    [
        ("", TORCH, "2.13.0+cpu", None, OK, "2.13.0+cpu"),
        ("", TORCH, "2.9.0", None, OK, "2.9.0"),
        ("", TORCH, "2.8.1", None, MISSING, "2.8.1, outside <2.14,>=2.9"),
        ("", TORCH, "2.14.0", None, MISSING, "2.14.0, outside"),
        ("", TORCH, None, None, MISSING, "not installed"),
        ("", TORCH, "2.13.0", "OSError: x.so", MISSING, "its import fails: OSError: x.so"),
        ("te", TE, "2.9", None, OK, "2.9"),
        ("te", TE, "2.8", None, WARNING, "2.8, outside >=2.9"),
        ("te", TE, None, None, WARNING, "not installed"),
        ("te", TE, "2.10", "ImportError: y", WARNING, "its import fails: ImportError: y"),
    ],
)
def test_packages(extra, requirement, found, problem, status, says):
    check = package_check(extra, requirement, found, problem)
    assert check.status == status and says in check.found
    if status == OK:
        assert check.advice == ""
    elif extra:
        assert check.advice == f"{EXTRAS['te']}: install it as docs/install.md describes"
    else:
        assert check.advice == "pip install 'torch<2.14,>=2.9'"


def test_ranges_are_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    pairs = requirements(EXTRAS)
    required = [str(requirement) for extra, requirement in pairs if not extra]
    assert required == [str(Requirement(t)) for t in project["project"]["dependencies"]]
    names = ["flash-linear-attention", "transformer-engine", "ray", "av", "gguf", "tensorboard"]
    names += ["wandb", "fastapi", "uvicorn", "protobuf", "zstandard", "llguidance"]
    assert [r.name for extra, r in pairs if extra] == names
    assert [r.name for extra, r in requirements(()) if extra] == []
    assert str(doctor.python_range()) == project["project"]["requires-python"]


def test_without_a_checkout_the_installed_ranges_count(monkeypatch):
    monkeypatch.setattr(doctor, "__file__", "/no/such/folder/machine.py")
    pairs = requirements(EXTRAS)
    assert ("", "megatron-core") in [(extra, r.name) for extra, r in pairs]
    assert ("ray", "ray") in [(extra, r.name) for extra, r in pairs]
    assert "pytest" not in [r.name for _, r in pairs]
    assert doctor.python_range() == SpecifierSet(">=3.11")


def test_what_is_installed_and_imports():
    assert installed_version("torch") == version("torch")
    assert installed_version("no-such-package") is None
    for name in ("pillow", "megatron-core", "protobuf"):
        assert import_problem(name) is None
    assert import_problem("no-such-package") == (
        "ModuleNotFoundError: No module named 'no_such_package'"
    )


def test_gpus_and_what_they_compute_in():
    checks = {check.name: check for check in gpu_checks([H100] * 8, "550.54", "2.27.5")}
    assert {check.status for check in checks.values()} == {OK}
    assert checks["GPU"].found == "8 x NVIDIA H100 80GB HBM3, 80 GiB; driver 550.54"
    assert checks["NCCL"].found == "2.27.5" and checks["peak FLOP/s"].found == "989 TFLOP/s"
    checks = {check.name: check for check in gpu_checks([H100, T4], None, None)}
    assert checks["GPU"].found.endswith("1 x Tesla T4, 15 GiB; driver unknown")
    statuses = {name: check.status for name, check in checks.items()}
    assert statuses == {"GPU": OK, "NCCL": MISSING, "bf16": WARNING, "peak FLOP/s": WARNING}
    assert checks["bf16"].found == "not in the hardware of Tesla T4"
    assert "CARDS" in checks["peak FLOP/s"].advice


def test_no_gpu_is_fine_and_one_that_torch_misses_is_wrong(tmp_path, monkeypatch):
    (check,) = gpu_checks([], None, None)
    assert (check.status, check.found) == (OK, "none: CPU with gloo, in fp32")
    if torch.cuda.is_available():
        return
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "requirements", lambda extras: [])
    monkeypatch.setattr(doctor, "try_group", lambda: (True, GLOO))
    checks = {check.name: check for check in all_checks()}
    assert checks["GPU"].status == MISSING and "NCCL" not in checks
    assert checks["GPU"].found == f"torch sees none, though {program} is there; driver 550.54"
    assert checks["GPU"].advice.endswith("; on the CPU: platform=cpu")


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_the_devices_of_this_machine(here):
    gpus = find_gpus()
    assert len(gpus) == torch.cuda.device_count() and gpus[0].memory > GIB
    assert gpus[0].name in here["GPU"].found and here["NCCL"].status == OK
    assert doctor.driver_version() in here["GPU"].found


def test_the_driver_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_version() is None
    for script, expected in (("echo 550.54; echo 550.54", "550.54"), ("echo no; exit 9", None)):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert doctor.driver_version() == expected


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("pass", ""),
        ("raise SystemExit('gloo: no interface')", "gloo: no interface"),
        ("import sys; sys.exit(int(sys.argv[2]))", "no message"),  # one of the two processes
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_two_processes_that_cannot_talk(program, problem, monkeypatch):
    monkeypatch.setattr(doctor, "_TALK_S", 0.0)
    start_s = 0.5 if "sleep" in program else 60
    assert try_group("gloo", 2, program, start_s) == (not problem, problem)


GLOO, UNLIMITED = "all-reduce, ring, pair, split in 0.1 s", resource.RLIM_INFINITY
# The check of a fact, its status, what was found, and words of the advice.
FOR_FAULTS = {
    **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    **{"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "CUDA_LAUNCH_BLOCKING": "1"},
    **{"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    **{"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}
FACTS = [
    (python_check("3.11.7", SpecifierSet(">=3.11")), OK, "3.11.7", None),
    (python_check("3.14.0", SpecifierSet(">=3.11")), OK, "3.14.0", None),
    (python_check("3.10.12", SpecifierSet(">=3.11")), MISSING, "3.10.12", "needs >=3.11"),
    (torchvision_check("0.28.0", None), OK, "0.28.0", None),
    (torchvision_check(None, None), WARNING, "not installed", "AutoProcessor"),
    (
        torchvision_check("0.20.0", "RuntimeError: nms"),
        *(WARNING, "0.20.0, but its import fails: RuntimeError: nms", "AutoProcessor"),
    ),
    (gloo_check(True, GLOO), OK, GLOO, None),
    (gloo_check(False, "timed out"), MISSING, "timed out", "ip link show lo"),
    (nccl_check(8, False, "ring: 1 came out as 0"), MISSING, "ring: 1 came out as 0", "NCCL_DEBUG"),
    (variables_check({"HOME": "/", "RANK": "0"}), OK, "none", None),
    (
        variables_check({"NCCL_SOCKET_IFNAME": "eth0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        *(OK, "CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_SOCKET_IFNAME=eth0", None),
    ),
    *(
        (
            variables_check({name: value}),
            WARNING,
            f"{name}={value}",
            f"{name}={value}: only to find",
        )
        for name, value in FOR_FAULTS.items()
    ),
    (compiler_check("/usr/bin/cc", True), OK, "/usr/bin/cc", None),
    (compiler_check(None, False), OK, "none, and training on the CPU needs none", None),
    (compiler_check(None, True), MISSING, "none", "apt-get install gcc"),
    (shm_check(8 * GIB), OK, "8.0 GiB free", None),
    (shm_check(64 * 2**20), WARNING, "0.1 GiB free", "--shm-size"),  # Docker's default
    (shm_check(None), WARNING, "does not exist", "--shm-size"),
    (disk_check("run", Path("/a"), 100 * GIB, True), OK, "100.0 GiB free at /a", None),
    (disk_check("run", Path("/a"), 3 * GIB, True), WARNING, "3.0 GiB free at /a", "set run to a"),
    (disk_check("x", Path("/a"), 100 * GIB, False), WARNING, "/a cannot be written", "set x to"),
    (files_check(20_000), OK, "20,000", None),
    (files_check(UNLIMITED), OK, "unlimited", None),
    (files_check(1024), WARNING, "1,024", "ulimit -n 65536"),
]


@in_one_test(("check", "status", "found", "advice"), FACTS)
def test_a_fact_has_its_status_and_advice_only_where_it_is_not_good(check, status, found, advice):
    assert (check.status, check.found) == (status, found)
    assert check.advice == "" if advice is None else advice in check.advice
