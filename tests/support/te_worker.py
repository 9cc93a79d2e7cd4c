# In .venv-te (make te-env): .venv-te/bin/python -m tests.support.te_worker CHECKPOINT FOLDER
"""A worker with model.backend=te on the CPU: it samples, trains, saves, resumes and exports.

Everything is Megatron-Core's and Transformer Engine's own but the arithmetic: the kernels of its
four layers and of its AdamW, which only a GPU can run, are replaced by torch's operations. So this
shows that weights are in the right places, and that calls reach the layers as these expect them. It
shows nothing about the kernels. test_transformer_engine.py reads the results.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch
from torch import Tensor

from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.distributed.cuda_stand_in import install_cpu_stand_in
from megatron_vlm.distributed.device import Platform
from megatron_vlm.training import worker as worker_module
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import errors
from tests.support.batches import MIXED, make_rows
from tests.support.reference import run_reference
from tests.support.runs import Case, loss_and_grads
from tests.support.te_stages import pretend_to_have_gpu

CASE = Case(
    model={"backend": "te", "compile": False},
    parallel={"tp": 1, "pp": 1},
    train={"precision": "fp32"},
    optim={"lr": 1e-3},
)
RECOMPUTE = ("none", "selective", "full")
TOKENS = 8  # of an answer


def use_torch_arithmetic() -> None:
    """Replace the kernels by torch's operations. The signatures are those of the calls in
    Megatron-Core."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def norm_linear(layer: Any, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        return F.linear(norm(x, layer.layer_norm_weight, layer.eps), layer.weight)

    def attend(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, attn_mask_type: str
    ) -> Tensor:
        assert (mask, attn_mask_type, layer.qkv_format) == (None, "causal", "sbhd")
        parts = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    engine: Any = te
    engine.LayerNormLinear.forward = norm_linear
    engine.Linear.forward = lambda layer, x, is_first_microbatch: F.linear(x, layer.weight)
    engine.RMSNorm.forward = lambda layer, x: norm(x, layer.weight, layer.eps)
    engine.DotProductAttention.forward = attend
    transformer_engine_torch.multi_tensor_adam = step_of_adam


def step_of_adam(
    _chunk: int,
    _overflow: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    is_decoupled: int,
    corrects_bias: int,
    weight_decay: float,
) -> None:
    assert is_decoupled == corrects_bias == 1
    for grad, weight, mean, square in zip(*tensors, strict=True):
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad * grad, 1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (mean / (1 - beta1**step) / scale + weight_decay * weight))


def main() -> None:
    checkpoint, folder = sys.argv[1], Path(sys.argv[2])
    install_cpu_stand_in()
    pretend_to_have_gpu(torch.device("cpu"))
    use_torch_arithmetic()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    platform = Platform("cuda", torch.device("cpu"), "gloo", torch.float32)
    patched: Any = worker_module
    patched.pick_platform = lambda name: platform
    rows = make_rows(MIXED)

    worker = MegatronWorker(CASE.config(checkpoint))
    optimizers = {type(each.optimizer) for each in worker.optimizer.chained_optimizers}
    assert optimizers == {te.optimizers.FusedAdam}, optimizers
    answers = worker.sample(rows, SamplingSettings(TOKENS, temperature=0))
    results: dict[str, Any] = {"answers": [each.ids for (each,) in answers]}
    expected = run_reference(checkpoint, rows)
    for recompute in RECOMPUTE:
        case = replace(CASE, model={**CASE.model, "recompute": recompute})
        outcome = loss_and_grads(checkpoint, case, rows)
        for name, error in errors([outcome], expected, case).items():
            results.setdefault("errors", {})[f"{recompute}: {name}"] = error

    worker.forward_backward(rows)
    worker.optim_step()
    save(worker, folder / "step", {})
    worker.forward_backward(rows)
    worker.optim_step()
    worker.export_hf(str(folder / "straight"))
    resumed = MegatronWorker(CASE.config(checkpoint))
    load(resumed, folder / "step")
    resumed.forward_backward(rows)
    resumed.optim_step()
    resumed.export_hf(str(folder / "resumed"))

    frozen = replace(CASE, model={**CASE.model, "freeze_language": True}).config(checkpoint)
    other = MegatronWorker(frozen, training=False, base=worker)
    params = {entry.our_name: param for entry, param in worker.held.items()}
    results["not shared"] = [
        entry.our_name
        for entry, param in other.held.items()
        if entry.is_frozen(frozen) and param.data_ptr() != params[entry.our_name].data_ptr()
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
