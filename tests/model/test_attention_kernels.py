# .venv/bin/python -m pytest tests/model/test_attention_kernels.py
"""Tests of the attention kernel: which times lead to which choice, and that the choice is used."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron_vlm.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.gemma4.model import gemma4_sizes
from megatron_vlm.model.attention_kernels import (
    AttentionShape,
    as_added,
    attend,
    choose_kernel,
    fastest_kernel,
    prefer_kernel,
)
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.gemma4 import TinyGemma4
from tests.support.reference import reference_of
from tests.support.runs import loss_and_grads

CPU = Platform("cpu", torch.device("cpu"), "gloo", torch.float32)
SHAPE = AttentionShape(2, 4, 2, 33, 24, 4, torch.float)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([{"torch": 1.0, "flash": 0.99, "cudnn": 0.6, "efficient": 2.0}], "cudnn"),
        ([{"torch": 1.0, "flash": 0.96}], "torch"),  # not worth another choice
        ([{"torch": 1.0, "cudnn": 0.6}, {"torch": 1.0, "cudnn": 1.2}], "torch"),  # the slower rank
        ([{"torch": 1.0, "cudnn": 0.6}, {"torch": 1.0}], "torch"),  # missing on one rank
        ([{"torch": 1.0, "flash": 0.8, "cudnn": 0.7}, {"torch": 1.0, "flash": 0.8}], "flash"),
        ([{"flash": 3.0}], "flash"),  # torch's own choice runs out of memory
        ([{}], "torch"),
    ],
)
def test_the_fastest_on_the_slowest_rank(found, chosen):
    assert fastest_kernel(found) == chosen
    assert fastest_kernel(found[::-1]) == chosen  # the order of the ranks does not matter


def test_the_shape_is_that_of_training(tiny):
    dims = ParallelDims(tp=2, pp=2, dp=1, ep=1, layers_per_stage=(1, 3))
    cfg = Config(model=ModelConfig("x"), train=TrainConfig(micro_batch_size=3))
    text = read_sizes(tiny()).text
    (shape,) = AttentionShape.of_kinds(cfg, text, dims, torch.bfloat16).values()
    assert shape == AttentionShape(3, 2, 1, 2048, 24, 3, torch.bfloat16)
    by_tokens = TrainConfig(micro_batch_tokens=3000)
    cfg = replace(cfg, train=by_tokens, data=DataConfig(max_tokens=1000))
    (shape,) = AttentionShape.of_kinds(cfg, text, dims, torch.bfloat16).values()
    assert (shape.rows, shape.tokens) == (3, 1000)


def test_a_window_is_tried_with_and_without_its_mask():
    text = gemma4_sizes(TinyGemma4().config()).text
    dims = ParallelDims(tp=2, pp=1, dp=1, ep=1, layers_per_stage=(4,))
    shapes = AttentionShape.of_kinds(Config(model=ModelConfig("x")), text, dims, torch.bfloat16)
    found = [(s.heads, s.kv_heads, s.head_dim, s.layers, s.masked) for s in shapes.values()]
    assert found == [(2, 2, 16, 2, False), (2, 2, 16, 2, True), (2, 1, 32, 2, False)]


def shape_of_call(query: Tensor, key: Tensor, *_: Tensor, **given: Any) -> tuple[bool, ...]:
    mask = given["attn_mask"]
    assert given["is_causal"] == (mask is None)
    assert given["enable_gqa"] == (key.shape[1] < query.shape[1])
    return mask is not None, given["enable_gqa"]


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, True)),
        ({"masked": True}, (True, False)),
        ({"head_dim": 257}, (False, False)),
        ({"head_dim": 256}, (False, True)),
    ],
)
def test_keys_are_repeated_where_a_kernel_would_not_share_them(kernel, changes, expected):
    """Efficient attention takes no fewer key heads than query heads, and flash attention neither a
    mask nor wide heads. The kernels are tried in the form in which layers call them."""
    calls = []
    compute = F.scaled_dot_product_attention

    def watched(*parts: Tensor, **given: Any) -> Tensor:
        calls.append(shape_of_call(*parts, **given))
        return compute(*parts, **given)

    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        assert choose_kernel(kernel, replace(SHAPE, **changes), CPU) == kernel
    assert set(calls) == {expected}


def test_a_mask_is_made_once_for_all_layers():
    """Torch keeps the mask that it adds for the backward. It makes one from each boolean mask."""
    sees = torch.ones(2, 1, 33, 33, dtype=torch.bool).tril()
    query, key, value = (torch.randn(2, 4, 33, 24, requires_grad=True) for _ in range(3))

    def kept(mask: Tensor) -> list[Tensor]:
        masks: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[-2:] == (33, 33):
                masks[tensor.untyped_storage().data_ptr()] = tensor
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attend(attend(query, key, value, mask), key, value, mask)
        assert torch.equal(out, attend(attend(query, key, value, sees), key, value, sees))
        return list(masks.values())

    added = as_added(sees, torch.float)
    assert len(kept(sees)) == 2 and [each.data_ptr() for each in kept(added)] == [added.data_ptr()]
    assert added.stride()[:3] == (33 * 48, 33 * 48, 48)  # rows begin where no kernel copies them


def test_a_kernel_comes_first_and_only_within():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with prefer_kernel("math"):
        inside = _cur_sdpa_kernel_backends(with_priority=True)
        assert inside[0] is SDPBackend.MATH and SDPBackend.FLASH_ATTENTION in inside
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
    with prefer_kernel("torch"):
        assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_auto_on_the_cpu_is_torch_and_asks_nobody():
    assert choose_kernel("auto", SHAPE, CPU) == "torch"
    assert choose_kernel("math", SHAPE, CPU) == "math"


def test_a_kernel_that_is_not_there_is_refused():
    facts = dict(key="model.attention", found="cudnn", problem_has="on cpu in torch.float32")
    with raises(ConfigError, **facts):
        choose_kernel("cudnn", SHAPE, CPU)


def test_another_kernel_computes_the_same(pool, tiny):
    case, rows = layout(attention="math", recompute="full"), make_rows(MIXED)
    outcomes = pool.run(loss_and_grads, 1, tiny(), case, rows)
    errors_by_name = errors(outcomes, reference_of(tiny(), MIXED), case)
    assert max(errors_by_name.values()) <= TOLERANCE
