# In .venv-te (make te-env): .venv-te/bin/python -m tests.support.te_worker CHECKPOINT TP FOLDER
"""A worker with model.backend=te on the CPU: it samples, trains, saves, resumes and exports.

Everything is Megatron-Core's and Transformer Engine's own but the arithmetic: the functions of its
extension, which only a GPU can run, are replaced by torch's operations (te_kernels.py). So this
shows that weights are in the right places, and that the extension would take the arguments of every
call. It shows nothing about the kernels. test_transformer_engine.py reads the results.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from gpu import kernels

from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.distributed.cuda_stand_in import install_cpu_stand_in
from megatron_vlm.distributed.device import Platform
from megatron_vlm.training import worker as worker_module
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import errors
from tests.support.batches import MIXED, make_rows
from tests.support.reference import run_reference
from tests.support.runs import Case, loss_and_grads, outcome_of
from tests.support.te_kernels import KERNELS, use_torch_arithmetic
from tests.support.te_stages import pretend_to_have_gpu

BASE = Case(
    model={"backend": "te", "compile": False},
    parallel={"pp": 1},
    train={"precision": "fp32"},
    optim={"lr": 1e-3},
)
RECOMPUTE = ("none", "selective", "full")
TOKENS = 8  # of an answer


def grouped_errors() -> list[float]:
    """Return the errors of the product of experts that `make gpu` times, and of its gradients."""
    torch.manual_seed(0)
    weight_eOI, x_MI, slope_MO = torch.randn(3, 16, 32), torch.randn(24, 32), torch.randn(24, 16)
    found, exact = (
        kernels._results(*program(weight_eOI), x_MI, [8, 0, 16], slope_MO)
        for program in (kernels._transformer_engine, kernels._own(kernels.times_in_turn))
    )
    pairs = zip(found, exact, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def start(world: int, folder: Path) -> int:
    """Become one of the ranks, which are processes of the CPU, and return its number."""
    rank = int(world == 2 and os.fork() == 0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    platform = Platform("cuda", torch.device("cpu"), "gloo", torch.float32)
    patched: Any = worker_module
    patched.pick_platform = lambda name: platform
    return rank


def main() -> None:
    checkpoint, tp, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    base = replace(BASE, world=tp, parallel={**BASE.parallel, "tp": tp})
    install_cpu_stand_in()
    pretend_to_have_gpu(torch.device("cpu"))
    signatures = use_torch_arithmetic()
    rank = start(tp, folder)
    rows = make_rows(MIXED)

    worker = MegatronWorker(base.config(checkpoint))
    optimizers = {type(each.optimizer) for each in worker.optimizer.chained_optimizers}
    assert optimizers == {te.optimizers.FusedAdam}, optimizers
    answers = worker.sample(rows, SamplingSettings(TOKENS, temperature=0))
    results: dict[str, Any] = {"answers": [each.ids for (each,) in answers], "errors": {}}
    expected = run_reference(checkpoint, rows)
    for recompute in RECOMPUTE:
        case = replace(base, model={**base.model, "recompute": recompute})
        outcome = loss_and_grads(checkpoint, case, rows)
        found = errors([outcome], expected, case) if rank == 0 else {}
        results["errors"] |= {f"{recompute}: {name}": error for name, error in found.items()}
    case = replace(base, train={"precision": "bf16"})
    rounding = MegatronWorker(case.config(checkpoint))
    outcome = outcome_of(rounding, rows)
    if rank == 0:
        results["bf16 errors"] = errors([outcome], expected, case)
    rounding.optim_step()
    rounding.sample(rows, SamplingSettings(TOKENS, temperature=0))
    results["grouped errors"] = grouped_errors()

    worker.forward_backward(rows)
    worker.optim_step()
    save(worker, folder / "step", {})
    worker.forward_backward(rows)
    worker.optim_step()
    worker.export_hf(str(folder / "straight"))
    resumed = MegatronWorker(base.config(checkpoint))
    load(resumed, folder / "step")
    resumed.forward_backward(rows)
    resumed.optim_step()
    resumed.export_hf(str(folder / "resumed"))

    frozen = replace(base, model={**base.model, "freeze_language": True}).config(checkpoint)
    other = MegatronWorker(frozen, training=False, base=worker)
    params = {entry.our_name: param for entry, param in worker.held.items()}
    results["not shared"] = [
        entry.our_name
        for entry, param in other.held.items()
        if entry.is_frozen(frozen) and param.data_ptr() != params[entry.our_name].data_ptr()
    ]
    results["never called"] = sorted(KERNELS.keys() - signatures.asked.keys())
    if rank == 0:
        print(json.dumps(results | asdict(signatures) | {"megatron": megatron.core.__version__}))


if __name__ == "__main__":
    main()
