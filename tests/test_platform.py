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
block = torch.ones(25_000_000)  # 100 MB
with_block = p.memory_allocated(); del block
print(0.9 * with_block < p.memory_peak() < p.memory_total())
print(0 < p.memory_allocated() < with_block - 90_000_000)
"""
    assert in_a_process(code).splitlines() == [
        "cpu cpu gloo torch.float32 None",
        "cpu cpu torch.cuda.FloatTensor",
        "cpu",
        "torch.int8",
        "True",
        "True",
    ]


def test_hugging_face_computes_the_same_beside_the_stand_in(tiny):
    """The stand-in is process-wide: loading and running a model must not notice it."""
    code = f"""
import torch
from transformers import Qwen3VLForConditionalGeneration as Model
from megatron_vlm.platform import pick_platform
INSTALL
with torch.device('meta'):
    print(torch.empty(1).device, torch.zeros(1).device, torch.tensor([1.0]).device)
model = Model.from_pretrained({tiny()!r})
print(model(input_ids=torch.arange(9)[None]).logits.double().sum().item())
"""
    without = in_a_process(code.replace("INSTALL", ""))
    assert without.startswith("meta meta meta")
    assert in_a_process(code.replace("INSTALL", "pick_platform('cpu')")) == without


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(ConfigError, match=r"platform=cuda, but torch .* sees no CUDA device"):
        pick_platform("cuda")
