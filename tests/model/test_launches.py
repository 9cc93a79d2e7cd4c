# .venv/bin/python -m pytest tests/model/test_launches.py
"""The operations that a decoder layer and a block of the tower launch in bf16 with compiled chains,
forward and backward, in each family: a change that adds one fails, and one that saves one writes
the new figure down. A chain, an RMSNorm, attention, the delta rule, all experts of a layer and a
weight gradient in fp32 count as one launch each way, whatever kernels a GPU has for them.

`python -m tests.model.test_launches` prints the table, with names for `--names`.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.family import tower_attention
from megatron_vlm.family.gemma4 import tower as gemma_tower
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.model import attention, build, experts, fused_ops
from megatron_vlm.model.delta_rule import gated_delta_rule
from megatron_vlm.model.fused_ops import FusedOps
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support import gemma4
from tests.support.batches import MIXED, make_rows
from tests.support.gemma4 import TinyGemma4
from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree

# These allocate, or give a tensor another shape.
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}
Counts = dict[str, tuple[Counter[str], Counter[str]]]


class Launches(TorchDispatchMode):
    """The operations that are no views, by name."""

    now: "Launches | None" = None  # what counts at present

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if Launches.now is self and not func.is_view and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launches(act: Callable[[], Any]) -> tuple[Counter[str], Any]:
    mode = Launches()
    with mode, mock.patch.object(Launches, "now", mode):
        return mode.counts, act()


@contextmanager
def as_one(name: str) -> Iterator[None]:
    """Count one launch, and none within the block."""
    if Launches.now is not None:
        Launches.now.counts[name] += 1
    with mock.patch.object(Launches, "now", None):
        yield


class _Once(torch.autograd.Function):
    """A function of tensors as one launch forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *given: Any) -> Any:
        ctx.function, ctx.given = function, given
        with as_one(function.__name__):
            return function(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        with as_one(ctx.function.__name__), torch.enable_grad():
            inputs = [
                x.detach().requires_grad_(learns) if isinstance(x, Tensor) else x
                for x, learns in zip(ctx.given, needed, strict=True)
            ]
            made = ctx.function(*inputs)
            made = made if isinstance(made, tuple) else (made,)
            pairs = [pair for pair in zip(made, grads, strict=True) if pair[0].requires_grad]
            outputs, of_outputs = zip(*pairs, strict=True)
            learning = [x for x, learns in zip(inputs, needed, strict=True) if learns]
            found = iter(torch.autograd.grad(outputs, learning, of_outputs))
        return None, *(next(found) if learns else None for learns in needed)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: _Once.apply(function, *given)


def compiled() -> FusedOps:
    return FusedOps(**{name: once(chain) for name, chain in vars(FusedOps()).items()})


def delta_rule(*given: Tensor) -> Any:
    """Compute the rule as flash-linear-attention does, which takes contiguous heads."""
    return once(gated_delta_rule)(*(x.contiguous() for x in given[:3]), *given[3:])


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    return torch.rms_norm(x, shape, weight, eps)


def attend(*parts: Tensor, mask_B1SS: Tensor | None, scale: float | None) -> Any:
    return once(_attend)(*parts, mask_B1SS, scale)


def attend_in_frames(*given: Any, scale: float | None = None, kernel: str) -> Any:
    return once(tower_attention.attend_by_runs)(*given[:4], scale)


_attend, _times, _add_product = attention.attend, experts.times_in_turn, build.add_product


def add_product(*given: Tensor) -> None:
    with as_one("add_product"):
        _add_product(*given)


def as_on_a_gpu() -> ExitStack:
    stack = ExitStack()
    for owner, new in {
        F: {"rms_norm": once(rms_norm)},
        FusedOps: {"compile": compiled},
        fused_ops: {"is_compiling": lambda: True},
        attention: {"attend": attend},
        tower_attention: {"attend_in_frames": attend_in_frames},
        gemma_tower: {"attend_in_frames": attend_in_frames},
        experts: {"times": once(_times)},
        # An earlier case of this process may have given Megatron the function itself.
        layers: {
            "fused_weight_gradient_mlp_cuda": SimpleNamespace(wgrad_gemm_accum_fp32=add_product),
            "_grad_accum_fusion_available": True,
        },
        build: {"choose_delta_rule": lambda *_: delta_rule, "compiles": lambda *_: True},
    }.items():
        stack.enter_context(mock.patch.multiple(owner, create=owner is layers, **new))
    return stack


BLOCK = "vision_model.blocks.1"
GEMMA_BLOCK = "vision_model.vision_tower.encoder.layers.1"
LAYERS = tuple(f"decoder.layers.{number}" for number in range(2))
SIZES = {"layers": 3, "deepstack": 1, "vision_depth": 3}
HYBRID = {"family": "qwen3_5", "head_dim": 64, "full_attention_interval": 2, **SIZES}
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "qwen3_vl": (SIZES, {"layer": LAYERS[1], "block": BLOCK}),
    "qwen3_vl_moe": ({**SIZES, "experts": 4}, {"layer": LAYERS[1]}),
    "qwen3_5": (HYBRID, {"delta net": LAYERS[0], "attention": LAYERS[1]}),
    "qwen3_5_moe": ({**HYBRID, "experts": 4}, {"delta net": LAYERS[0]}),
    "gemma4": (TinyGemma4(), {"window": LAYERS[0], "global": LAYERS[1], "block": GEMMA_BLOCK}),
    "gemma4_moe": (TinyGemma4(experts=4), {"window": LAYERS[0]}),
}


# Launches forward and backward.
TABLE = {
    "qwen3_vl layer": (11, 19),
    "qwen3_vl block": (11, 31),
    "qwen3_vl_moe layer": (27, 44),
    "qwen3_5 delta net": (12, 25),
    "qwen3_5 attention": (13, 22),
    "qwen3_5_moe delta net": (35, 66),
    "gemma4 window": (12, 24),
    "gemma4 global": (12, 24),
    "gemma4 block": (15, 42),
    "gemma4_moe window": (41, 74),
}


def launches_of(path: str, modules: dict[str, str], rows: list[Row]) -> Counts:
    """Return the launches of each module, forward and backward, as it runs in a step."""
    case = layout(compile=True, fp32_weight_gradients=True)
    case.train["precision"] = "bf16"
    with as_on_a_gpu():
        worker = MegatronWorker(case.config(path))
        calls: dict[str, Any] = {}
        for part, name in modules.items():
            worker.chunks[0].get_submodule(name).register_forward_pre_hook(
                lambda _, *given, part=part: calls.update({part: given}), with_kwargs=True
            )
        worker.forward_backward(rows)
        return {
            part: _run_again(worker.chunks[0].get_submodule(name), *calls[part])
            for part, name in modules.items()
        }


def _run_again(module: Any, *given: Any) -> tuple[Counter[str], Counter[str]]:
    def leaf(x: Any) -> Any:
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    args, kwargs = tree_map(leaf, given)
    forward, out = launches(lambda: module(*args, **kwargs))
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.ones_like(out)
    return forward, launches(lambda: out.backward(grad))[0]


def measure(pool: Pool, name: str, folder: Path) -> Counts:
    sizes, modules = MODELS[name]
    if isinstance(sizes, TinyGemma4):
        sizes.write(folder)
        rows = gemma4.make_rows()
    else:
        write_tiny(folder, TinySpec(**sizes))
        rows = make_rows(MIXED)
    [found] = pool.run(launches_of, 1, str(folder), modules, rows[:2])
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.full if "moe" in each else ()) for each in MODELS]
)
def test_a_layer_launches_what_the_table_says(name, pool, tmp_path):
    for part, counts in measure(pool, name, tmp_path / "model").items():
        found, names = tuple(each.total() for each in counts), [dict(each) for each in counts]
        assert found == TABLE[f"{name} {part}"], f"{part}: {names}"


def main() -> None:
    tree = ProcessTree()
    pool = Pool(tree.fork)
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            for part, (forward, backward) in measure(pool, name, Path(folder, name)).items():
                print(f"{f'{name} {part}':28}{forward.total():4}{backward.total():4}", flush=True)
                if "--names" in sys.argv:
                    print(f"    {dict(forward)}\n    {dict(backward)}", flush=True)
    pool.close()
    tree.close()


if __name__ == "__main__":
    main()
