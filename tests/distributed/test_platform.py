# .venv/bin/python -m pytest tests/distributed/test_platform.py
"""The platform, and the stand-in for CUDA on the CPU."""

import os
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm.config.schema import Config, ModelConfig
from megatron_vlm.distributed import device
from megatron_vlm.distributed.device import peak_of, pick_platform
from megatron_vlm.errors import ConfigError
from megatron_vlm.training.worker import MegatronWorker
from tests.support.error_fields import raises


def test_unknown_name():
    choices = ("auto", "cuda", "cpu")
    with raises(ConfigError, key="platform", found="tpu", allowed=choices):
        pick_platform("tpu")


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 5090", 210),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88),
        ("rtx4070ti", 80),
        ("4070", 58),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", 15.7),
        ("NVIDIA GeForce RTX 3080", None),
    ],
)
def test_the_peak_of_a_device_goes_by_its_whole_name(name, tera):
    peak = peak_of(name)
    assert (None if peak is None else peak / 1e12) == tera


# The stand-in changes a process for good, so each of these looks at it in a process of its own.


def look_for_it() -> None:
    import megatron_vlm.training.worker  # noqa: F401

    print(hasattr(torch.cuda, "_megatron_vlm_stand_in"))


def test_nothing_is_installed_on_import(process_tree):
    assert process_tree.printed(look_for_it) == "False\n"


def use_it() -> None:
    p = pick_platform("cpu")
    pick_platform("cpu")
    print(p.name, p.device, p.dist_backend, p.default_dtype, p.peak_flops())
    print(torch.zeros(2, device="cuda").device, torch.ones(1).cuda().device, torch.ones(1).type())
    print(torch.empty(1, device=torch.cuda.current_device()).device)
    print(torch.zeros(1).type(torch.int8).dtype)
    block = torch.ones(25_000_000)  # 100 MB
    with_block = p.memory_allocated()
    del block
    print(0.9 * with_block < p.memory_peak() < p.memory_total())
    print(0 < p.memory_allocated() < with_block - 90_000_000)


def set_variables(given: dict[str, str]) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(given)
    pick_platform("cpu")
    print(*[os.environ[name] for name in VARIABLES])


VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_CUDNN_SDPA_DEPRIORITIZED")


def test_what_the_user_chose_of_cuda_stays(process_tree):
    assert process_tree.printed(set_variables, {}) == "1 1\n"
    assert process_tree.printed(set_variables, dict(zip(VARIABLES, "80", strict=True))) == "8 0\n"


def test_cpu(process_tree):
    assert process_tree.printed(use_it).splitlines() == [
        "cpu cpu gloo torch.float32 None",
        "cpu cpu torch.cuda.FloatTensor",
        "cpu",
        "torch.int8",
        "True",
        "True",
    ]


def run_hugging_face(path: str, installed: bool) -> None:
    if installed:
        pick_platform("cpu")
    with torch.device("meta"):
        print(torch.empty(1).device, torch.zeros(1).device, torch.tensor([1.0]).device)
    model = Qwen3VLForConditionalGeneration.from_pretrained(path)
    print(model(input_ids=torch.arange(9)[None]).logits.double().sum().item())


def test_hugging_face_computes_the_same_beside_the_stand_in(tiny, process_tree):
    """The stand-in is process-wide, and loading and running a model must not notice it."""
    without = process_tree.printed(run_hugging_face, tiny(), False)
    assert without.startswith("meta meta meta")
    assert process_tree.printed(run_hugging_face, tiny(), True) == without


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    with raises(ConfigError, key="platform", found="cuda", problem_has=torch.__version__):
        pick_platform("cuda")


def pick_with_driver(folder: str) -> None:
    os.environ["PATH"] = folder
    try:
        pick_platform("auto")
    except ConfigError as error:
        print(error)
    print(pick_platform("cpu").name, pick_platform("auto").name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_gpu_that_torch_misses_is_no_cpu(process_tree, tmp_path):
    # The folder has no nvidia-smi yet.
    assert process_tree.printed(pick_with_driver, str(tmp_path)) == "cpu cpu\n"
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    message, names = process_tree.printed(pick_with_driver, str(tmp_path)).splitlines()
    assert message.startswith("platform=auto: ") and str(program) in message
    assert "platform=cpu" in message
    # The platform that was chosen first is that of the process.
    assert names == "cpu cpu"


def build_a_worker(path: str, asked: str) -> None:
    device._MANY_PARAMETERS = 1000
    with redirect_stderr(sys.stdout):
        MegatronWorker(Config(platform=asked, model=ModelConfig(path)), training=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_large_model_on_a_cpu_is_said(process_tree, tiny):
    (message,) = process_tree.printed(build_a_worker, tiny(), "auto").splitlines()
    assert "there is no GPU here, so a model of " in message and "platform=cpu says that" in message
    assert process_tree.printed(build_a_worker, tiny(), "cpu") == ""
    assert pick_platform("cpu").remark("auto", 10**7) is None


@pytest.mark.full
def test_torch_reports_nvcc_only_with_a_gpu(tmp_path):
    # Builds of torch with CUDA call this function when the module is imported.
    code = "import megatron_vlm; from torch.utils import cpp_extension as e; e._find_cuda_home()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
