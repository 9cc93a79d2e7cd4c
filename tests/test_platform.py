# .venv/bin/python -m pytest tests/test_platform.py
"""The platform, and the stand-in for CUDA on the CPU."""

import subprocess
import sys

import pytest
import torch

from megatron_vlm.errors import ConfigError
from megatron_vlm.platform import pick_platform


def test_unknown_name():
    with pytest.raises(ConfigError, match="platform='tpu' is not one of auto, cuda, cpu"):
        pick_platform("tpu")


def in_a_process(code: str) -> str:
    """The stand-in changes a process for good: look at it in one of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_nothing_is_installed_on_import():
    look = "print(hasattr(torch.cuda, '_megatron_vlm_stand_in'))"
    assert in_a_process(f"import torch, megatron_vlm.worker; {look}") == "False"


def test_cpu():
    code = """
import torch
from megatron_vlm.platform import pick_platform
p = pick_platform('cpu'); pick_platform('cpu')
print(p.name, p.device, p.dist_backend, p.default_dtype, p.peak_flops())
print(torch.zeros(2, device='cuda').device, torch.ones(1).cuda().device, torch.ones(1).type())
print(torch.empty(1, device=torch.cuda.current_device()).device)
print(torch.zeros(1).type(torch.int8).dtype)
print(0 < p.memory_allocated() <= p.memory_peak() < p.memory_total())
"""
    assert in_a_process(code).splitlines() == [
        "cpu cpu gloo torch.float32 None",
        "cpu cpu torch.cuda.FloatTensor",
        "cpu",
        "torch.int8",
        "True",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(ConfigError, match=r"platform=cuda, but torch .* sees no CUDA device"):
        pick_platform("cuda")
