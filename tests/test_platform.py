# .venv/bin/python -m pytest tests/test_platform.py
"""The platform, and the stand-in for CUDA on the CPU."""

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.errors import ConfigError


def test_unknown_name():
    with pytest.raises(ConfigError, match="platform='tpu' is not one of auto, cuda, cpu"):
        pick_platform("tpu")


# The stand-in changes a process for good: each looks at it in one of its own.


def look_for_it() -> None:
    import megatron_vlm.worker  # noqa: F401

    print(hasattr(torch.cuda, "_megatron_vlm_stand_in"))


def test_nothing_is_installed_on_import(nursery):
    assert nursery.printed(look_for_it) == "False\n"


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


def test_cpu(nursery):
    assert nursery.printed(use_it).splitlines() == [
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


def test_hugging_face_computes_the_same_beside_the_stand_in(tiny, nursery):
    """The stand-in is process-wide: loading and running a model must not notice it."""
    without = nursery.printed(run_hugging_face, tiny(), False)
    assert without.startswith("meta meta meta")
    assert nursery.printed(run_hugging_face, tiny(), True) == without


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(ConfigError, match=r"platform=cuda, but torch .* sees no CUDA device"):
        pick_platform("cuda")
