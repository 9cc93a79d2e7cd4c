# .venv/bin/python -m pytest tests/model/test_attention_kernels.py
"""Tests of the attention kernel: which times lead to which choice, and that the choice is used."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron_vlm.checkpoint import state_json
from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.flash_attention import activate, activated, prefer_kernel
from megatron_vlm.family.gemma4.model import gemma4_sizes
from megatron_vlm.family.tower_attention import attend_at_once, attend_by_runs, attend_in_frames
from megatron_vlm.model import attention_kernels as kernels
from megatron_vlm.model.attention import SDPACoreAttention
from megatron_vlm.model.attention_kernels import (
    AttentionShape,
    TowerShape,
    as_added,
    attend,
    choose_kernels,
    fastest_kernel,
    fastest_kernels,
)
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.flash_attention4 import flash_attention4
from tests.support.gemma4 import TinyGemma4
from tests.support.reference import reference_of
from tests.support.runs import call, loss_and_grads

CPU = Platform("cpu", torch.device("cpu"), "gloo", torch.float32)
SHAPE = AttentionShape(2, 4, 2, 33, 24, 4, torch.float)
TOWER = TowerShape(40, 4, 24, 2, torch.float)


def choose(setting: str, shape: AttentionShape | TowerShape) -> str:
    return choose_kernels(setting, {"only": shape}, CPU)["only"]


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
    found = [(s.heads, s.kv_heads, s.head_dim, s.layers, s.window) for s in shapes.values()]
    assert found == [(2, 2, 16, 2, None), (2, 2, 16, 2, 8), (2, 1, 32, 2, None)]


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
        ({"window": 9}, (True, False)),
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
        assert choose(kernel, replace(SHAPE, **changes)) == kernel
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
    for shape in (SHAPE, TOWER):
        assert choose("auto", shape) == "torch"
        assert choose("torch", shape) == "torch"
        assert choose("math", shape) == "math"


@pytest.mark.parametrize("shape", [SHAPE, TOWER])
def test_a_kernel_that_cannot_run_is_refused(shape):
    problem = f"on cpu in torch.float32 for {shape} ("
    with raises(ConfigError, key="model.attention", found="cudnn", problem_has=problem):
        choose("cudnn", shape)


@pytest.mark.parametrize(("kernel", "package"), [("fa3", "flash-attn-3"), ("fa4", "flash-attn-4")])
def test_a_generation_that_is_missing_is_refused_with_its_package(kernel, package):
    facts = dict(key="model.attention", found=kernel, remedy_has=f"install {package}")
    with raises(ConfigError, problem_has="it needs a GPU of NVIDIA", **facts):
        choose(kernel, SHAPE)
    with raises(ConfigError, problem_has=f"it needs the package {package}: ModuleNo", **facts):
        choose_kernels(kernel, {0: SHAPE}, replace(CPU, name="cuda"))
    assert activated() == "flash"


# Times of torch, flash, efficient, cuDNN, FlashAttention 3 and 4, for two kinds of attention.
NAMES = ("torch", "flash", "efficient", "cudnn", "fa3", "fa4")
SLOW = (1.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ((*SLOW, 0.8, 0.6), (*SLOW, 0.8, 0.6), ["fa4", "fa4"]),
        ((*SLOW, 0.6, 0.5), (*SLOW, 0.6, 0.9), ["fa3", "fa3"]),  # one generation for both
        ((*SLOW, 0.97, 0.96), (*SLOW, 0.97, 0.96), ["torch", "torch"]),  # gains too little
        ((*SLOW, 0.5, None), (1.0, None, 0.3, None, 0.4, 0.2), ["fa3", "efficient"]),
        ((*SLOW, 0.5, 0.4), (1.0, None, 0.8, None, None, None), ["fa4", "efficient"]),
        ((1.0, 1.0, 0.5, 3.0, None, None), (*SLOW, None, None), ["efficient", "torch"]),
        ((None,) * 6, (*SLOW, None, 0.1), ["torch", "torch"]),
    ],
)
def test_all_kinds_share_the_fastest_generation(first, second, chosen):
    tried = [
        {name: took for name, took in zip(NAMES, times, strict=True) if took is not None}
        for times in (first, second)
    ]
    assert fastest_kernels([tried]) == chosen
    without = [{k: took for k, took in times.items() if k[:2] != "fa"} for times in tried]
    assert set(fastest_kernels([tried, without])).isdisjoint({"fa3", "fa4"})  # another rank


def test_auto_takes_a_generation_says_so_and_keeps_it(capsys):
    """The second model of a process has the generation of the first."""
    took = {"torch": 1.0, "flash": 1.0, "fa4": 0.5}
    gpu = replace(CPU, name="cuda")
    with (
        flash_attention4(),
        mock.patch.object(kernels, "_try", lambda kernel, *_: took.get(kernel, "no")),
        mock.patch.object(kernels, "all_gather_json", lambda mine: [mine]),
        mock.patch.object(torch.distributed, "get_rank", lambda: 0),
    ):
        shapes = {"decoder": SHAPE, "tower": TOWER}
        assert choose_kernels("auto", shapes, gpu) == {"decoder": "fa4", "tower": "fa4"}
        line = capsys.readouterr().err
        for part in ("fa4 for heads of 24", "fa4 for the tower's heads of 24", "torch 1000.00 ms"):
            assert part in line and line.count("\n") == 1
        assert activated() == "fa4"
        took["torch"] = 0.1
        assert choose_kernels("auto", {0: SHAPE}, gpu) == {0: "fa4"} and activated() == "fa4"
        activate("flash")
        assert choose_kernels("auto", {0: SHAPE}, gpu) == {0: "torch"} and activated() == "flash"


def test_flash_attention_4_gets_our_arguments_and_its_results_are_used():
    starts = torch.tensor([0, 30, 33], dtype=torch.int32)
    rows = [torch.randn(2, heads, 33, 24, requires_grad=True) for heads in (4, 2, 2)]
    patches = [torch.randn(33, 4, 24, requires_grad=True) for _ in range(3)]

    def results(tower: Callable[..., Tensor]) -> list[Tensor]:
        with prefer_kernel("fa4"):
            outs = attend(*rows, scale=0.3), tower(*patches, [30, 3], starts, 0.2)
        parts = [*rows, *patches]
        return [*outs, *torch.autograd.grad(sum((out**2).sum() for out in outs), parts)]

    expected = results(lambda *given: attend_by_runs(*given[:4], given[5]))
    with flash_attention4() as calls, mock.patch.object(Platform, "wait", lambda _: None):
        gpu = replace(CPU, name="cuda")
        shapes = {"decoder": SHAPE, "tower": TOWER}
        assert choose_kernels("fa4", shapes, gpu) == {"decoder": "fa4", "tower": "fa4"}
        assert activated() == "fa4" and calls
        calls.clear()
        found = results(attend_at_once)
    assert activated() == "flash"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 3e-6 * other.norm()  # measured: 4.6e-7
    forward, tower_forward, *_ = calls
    assert len(calls) == 4
    for each in calls:  # forward and backward
        assert each["window_size_left"] is each["window_size_right"] is None
        is_tower = each["cu_seqlens_q"] is not None
        assert each["causal"] is not is_tower
        assert each["softmax_scale"] == pytest.approx(0.2 if is_tower else 0.3)
        assert each["heads"] == ((4, 4) if is_tower else (4, 2))  # key heads are not repeated
    assert tower_forward["cu_seqlens_k"].tolist() == [0, 30, 33]
    assert tower_forward["cu_seqlens_k"].dtype is torch.int32
    assert forward["max_seqlen_q"] == 33 and tower_forward["max_seqlen_q"] == 30


def kernels_of_modules(worker: MegatronWorker) -> list[Any]:
    modules = [module for chunk in worker.chunks for module in chunk.modules()]
    layers = [module.kernels for module in modules if isinstance(module, SDPACoreAttention)]
    blocks = [module.kernel for module in modules if hasattr(module, "kernel")]
    return [*layers, *blocks]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
@pytest.mark.parametrize("kernel", ["torch", "math"])
def test_decoder_and_tower_have_the_same_kernel(kernel, family, pool, tiny):
    path = tiny() if family == "qwen3_vl" else tiny(TinyGemma4())
    [found] = pool.run(call, 1, path, layout(attention=kernel), kernels_of_modules)
    assert len(found) > 4 and kernel in found
    names = [name for each in found for name in (each.values() if type(each) is dict else [each])]
    assert set(names) == {kernel}


def kernels_after_a_resume(
    worker: MegatronWorker, names: list[str], folder: Path
) -> tuple[list[Any], list[str]]:
    """Save with these kernels, and load into a worker on a GPU that has measured others."""
    kinds, said = worker.chunks[0].kernels, list[str]()
    measured = dict(kinds)
    kinds.update(zip(kinds, names, strict=True))
    save(worker, folder, {}).finish()
    kinds.update(measured)
    worker.platform = replace(worker.platform, name="cuda")
    with (
        mock.patch.object(Platform, "wait", lambda _: None),
        mock.patch.object(state_json, "print_to_user", said.append),
    ):
        load(worker, folder)
    return kernels_of_modules(worker), said


def test_a_resume_keeps_the_kernels_of_its_checkpoint(pool, tiny, tmp_path):
    """All ranks keep them, or none."""
    path = tiny(TinyGemma4())
    for names, kept in (
        (["math", "flash", "math", "math"], True),
        (["torch"] * 4, True),
        (["math", "flash", "math", "fa4"], False),
        (["math", "?", "math", "math"], False),
    ):
        folder = tmp_path / "-".join(names).replace("?", "x")
        action = partial(kernels_after_a_resume, names=names, folder=folder)
        (found, said), other = pool.run(call, 2, path, layout(tp=2), action)
        assert other == (found, []) and len(found) > 4
        expected = names if kept else ["torch"] * 4
        for each in found:
            assert each == expected[-1] if isinstance(each, str) else [*each.values()] == expected
        text = f" {'keeps' if kept else 'cannot keep'} the kernels of {folder}: {names}"
        assert [text in line for line in said] == [True] * (names != ["torch"] * 4)


def test_the_tower_prefers_its_kernel():
    seen = []

    def watched(*parts: Tensor, **given: Any) -> Tensor:
        seen.append(_cur_sdpa_kernel_backends(with_priority=True)[0])
        return parts[0]

    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        for kernel in ("math", "flash", "efficient"):
            attend_in_frames(*(torch.zeros(3, 1, 8),) * 3, [3], torch.tensor([0, 3]), kernel=kernel)
    first = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    assert seen == first


def test_another_kernel_computes_the_same(pool, tiny):
    case, rows = layout(attention="math", recompute="full"), make_rows(MIXED)
    outcomes = pool.run(loss_and_grads, 1, tiny(), case, rows)
    errors_by_name = errors(outcomes, reference_of(tiny(), MIXED), case)
    assert max(errors_by_name.values()) <= TOLERANCE
