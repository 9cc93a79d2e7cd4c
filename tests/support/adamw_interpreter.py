# TRITON_INTERPRET=1 .venv-fla/bin/python -m tests.support.adamw_interpreter
"""The kernel of training/fused_adamw.py in Triton's interpreter, beside the code that runs where
there is no Triton: alone, and in whole workers. It prints what test_fused_adamw.py compares, as
JSON. The interpreter rounds twice in a fused multiply-add, which is put right here.

torch computes the last values of a tensor, which do not fill its vectors, without these. So the
tensors of its side have zeros behind them.
"""

import importlib
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from megatron_vlm.checkpoint.rank_state import get_step, local_parts
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.optimizer_spec import STATE_NAMES, OptimizerSpec
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.training import optimizer
from megatron_vlm.training.adamw import RangedAdamW, Scaling, make_moment
from megatron_vlm.training.fused_adamw import fused_step
from megatron_vlm.training.worker import MegatronWorker
from tests.gpu.test_parity_gpu import spawn
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.pool import Pool
from tests.support.runs import Case, my_rows

VECTOR = 64
STEPS = 20
RESUMED, SKIPPED = 8, 13  # steps before which both go on from the other's state, or that one skips
# name: moments, weights, offset in the parameter, betas
CASES = {
    f"{states}, {weights} weights at {start}, beta1 {betas[0]}": (states, weights, start, betas)
    for states in ("fp32", "bf16", "int8")
    for weights, start, betas in (
        (5000, 77, (0.9, 0.95)),
        (4352, 0, (0.3, 0.999)),
        (300, 2**33 + 1, (0.9, 0.95)),
    )
}
BF16 = {"train": {"precision": "bf16"}}
WORKERS = {
    "fp32 weights": layout(),
    "fp32 moments": replace(layout(), **BF16),
    "bf16 moments, dp2": replace(layout(dp=2), **BF16, optim={"states": "bf16"}),
    "int8 moments, tp2": replace(layout(tp=2), **BF16, optim={"states": "int8"}),
    "muon": replace(layout(), **BF16, optim={"name": "muon"}),
    "half offloaded": replace(layout(), **BF16, optim={"offload": 0.5}),
    # Both the model's gradients and those of an MTP head are clipped, by different factors.
    "an MTP head, tp2": replace(
        layout(tp=2, mtp="train"), **BF16, optim={"states": "bf16", "clip_grad": 1e-3}
    ),
}
DRAFTS = dict(family="qwen3_5", layers=2, full_attention_interval=2, vision_depth=1, mtp_layers=1)


def prepare_interpreter() -> None:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def make(start: Tensor, place: int, kernel: Any, settings: Any, states: str) -> RangedAdamW:
    weight = start.clone()
    spec, copies = OptimizerSpec("AdamW", STATE_NAMES, states), {weight: start.bfloat16()}
    group = {"params": [weight], "weight_decay": 0.1, **settings}
    return RangedAdamW([group], spec, {weight: place}, kernel, copies)


def tensors_of(made: RangedAdamW) -> list[Tensor]:
    [weight] = made.param_groups[0]["params"]
    return [weight, *(each for moment in made.moments(weight).values() for each in moment.tensors)]


def different(states: str, weights: int, start: int, betas: tuple[float, float]) -> int:
    """Return how many values differ after any step: weights, moments and the copy in bf16."""
    generator, padding = torch.Generator().manual_seed(0), -weights % VECTOR
    padding *= weights > 4096 or states != "int8" or weights + padding < 4096
    values = torch.nn.functional.pad(torch.randn(weights, generator=generator), (0, padding))
    settings = {"lr": 1e-2, "betas": betas, "eps": 1e-8}
    plain = make(values, start, None, settings, states)
    fused = make(values[:weights], start, fused_step, settings, states)
    [padded], [weight] = (each.param_groups[0]["params"] for each in (plain, fused))
    count = 0
    for step in range(STEPS):
        if step == RESUMED:  # by way of a checkpoint, which has values in place of codes
            for one, other in ((plain, fused), (fused, plain)):
                read = {
                    name: each.read(0, weights)
                    for name, each in one.moments(padded if one is plain else weight).items()
                }
                target = weight if other is fused else padded
                for name, moment_values in read.items():
                    moment = make_moment(name, target.numel(), states, target.device)
                    moment.write(
                        0,
                        torch.nn.functional.pad(moment_values, (0, target.numel() - weights)),
                        None,
                    )
                    other.state[target][f"new {name}"] = moment
            for each, param in ((plain, padded), (fused, weight)):
                each.state[param] = {name: each.state[param][f"new {name}"] for name in STATE_NAMES}
        grad = torch.randn(weights, generator=generator)
        grad *= 10 ** (4 * torch.rand(weights, generator=generator) - 2)
        grad[512:768] = 0  # a block that never has a gradient, and one that has none at first
        grad[1024:1280] *= step > 3
        factor = 0.3 if step % 2 else 1.0
        if step == SKIPPED:
            before = [each.clone() for each in (*tensors_of(fused), fused.copies[weight])]
            weight.grad = torch.full_like(grad, torch.nan)
            skipping = Scaling(torch.tensor(torch.nan), torch.tensor(1, dtype=torch.int))
            fused.scalings = {weight: skipping}
            fused.step()
            fused.count_step(-1)
            after = (*tensors_of(fused), fused.copies[weight])
            count += sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
        padded.grad = torch.nn.functional.pad(grad * torch.tensor(factor), (0, padding))
        weight.grad = grad
        scaling = Scaling(torch.tensor(factor), torch.tensor(0, dtype=torch.int))
        fused.scalings = {weight: scaling}
        plain.step()
        fused.step()
        pairs = zip(tensors_of(fused), tensors_of(plain), strict=True)
        count += sum(int((a != b[: len(a)]).sum()) for a, b in pairs)
        count += int((fused.copies[weight] != weight.bfloat16()).sum())
    assert int((weight - values[:weights]).abs().min()) >= 0 and bool(weight.isfinite().all())
    return count


def trained(path: str, case: Case, with_kernel: bool) -> tuple[list[float], list[Tensor]]:
    """Return the norms, and weights and optimizer state of this rank after four steps, of which one
    has gradients that are not finite."""
    prepare_interpreter()
    if with_kernel:
        optimizer.choose_adamw_kernel = lambda states, device: fused_step
    case = replace(case, optim={"lr": 1e-2, "clip_grad": 2.0, **case.optim})
    worker, norms = MegatronWorker(case.config(path)), []
    for step in range(4):
        worker.forward_backward(my_rows(make_rows(MIXED, seed=step)))
        if step == 2:
            next(p for p in worker.held.values() if p.requires_grad).main_grad.view(-1)[0] = (
                torch.nan
            )
        norms.append(worker.optim_step()[0])
    assert worker.optimizer is not None
    steps = torch.tensor([worker.steps, get_step(worker.optimizer)])
    parts = [each for part in local_parts(worker).values() for each in part.tensors.values()]
    held = [param.detach() for param in worker.held.values()]
    return norms, [each.clone() for each in (steps, *held, *parts)]


def differences(path: str, case: Case, pools: tuple[Pool, Pool]) -> dict[str, Any]:
    """Return how many values of all ranks differ, and what shows that the case is not empty."""
    found = [pool.run(trained, case.world, path, case, pool is pools[0]) for pool in pools]
    count = total = 0
    for (norms, tensors), (other_norms, others) in zip(*found, strict=True):
        count += sum(
            a != b and not (math.isnan(a) and math.isnan(b))
            for a, b in zip(norms, other_norms, strict=True)
        )
        for tensor, other in zip(tensors, others, strict=True):
            count += int((tensor != other).sum())
            total += tensor.numel()
    norms, tensors = found[0][0]
    return {"different": count, "values": total, "norms": norms, "steps": tensors[0].tolist()}


def main(names: list[str]) -> None:
    prepare_interpreter()
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    values = {name: different(*case) for name, case in CASES.items() if not names or name in names}
    workers = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("tiny", "drafts")]
        for path, sizes in zip(paths, (SHALLOW, DRAFTS), strict=True):
            write_tiny(path, TinySpec(**sizes))
        pools = Pool(spawn), Pool(spawn)  # the kernel is chosen for good in the first
        for name, case in WORKERS.items():
            if not names or name in names:
                workers[name] = differences(paths["mtp" in case.model], case, pools)
        for pool in pools:
            pool.close()
    print(json.dumps({"values": values, "workers": workers}))


if __name__ == "__main__":
    # Processes of the pool look for its functions under the name of this module.
    importlib.import_module("tests.support.adamw_interpreter").main(sys.argv[1:])
