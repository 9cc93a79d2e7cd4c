# .venv/bin/python -m pytest tests/gpu -m gpu
"""The parity of test_parity.py with NCCL, on the GPUs of this machine: fp32 and bf16, both
backends. The reference is Hugging Face's model on the CPU, in fp32."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.model.test_parity import errors, layout
from tests.support.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.pool import Pool
from tests.support.process_tree import Child
from tests.support.reference import run_reference
from tests.support.runs import Case, loss_and_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

# At most ten times the worst case on one H100 (docs/verified.md): 1.3e-6 and 1.3e-3 in fp32, which
# Transformer Engine multiplies as TF32, and 2.2e-2 in bf16 (against the fp32 reference).
# Transformer Engine in bf16 has not been measured.
TOLERANCE = {
    ("torch", "fp32"): 1e-5,
    ("te", "fp32"): 1e-2,
    ("torch", "bf16"): 1e-1,
    ("te", "bf16"): 1e-1,
}

CASES: dict[str, Case] = {
    "1x1x1": layout(),
    "recompute-full": layout(recompute="full", recompute_vision=True),
    "recompute-selective": layout(recompute="selective"),
    "tp2": layout(tp=2),
    "tp2-images-not-shared": layout(tp=2, share_images=False),
    "pp2": layout(pp=2),
    "pp2x2": layout(pp=2, virtual_stages=2),
    "pp2-stage0-0-layers": layout(pp=2, layers_per_stage=[0, 4]),
    "dp2-overlap": layout(dp=2, overlap_grad_reduce=True),
    "tp2-pp2": layout(tp=2, pp=2, layers_per_stage=[1, 3]),
    "tp2-dp2": layout(tp=2, dp=2),
}


def have_te() -> bool:
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return True


def spawn(fn: Callable[..., None]) -> Child:
    """Start a process without a fork, because an import may have initialised CUDA."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=fn, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    assert process.pid is not None
    return Child(process.pid, parent_end)


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[Pool]:
    pool = Pool(spawn, as_launched=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("name", CASES)
def test_equals_hugging_face_on_gpu(name, backend, precision, gpu_pool, tiny, record_property):
    case = CASES[name]
    if case.world > torch.cuda.device_count():
        pytest.skip(f"needs {case.world} GPUs, this machine has {torch.cuda.device_count()}")
    if backend == "te" and not have_te():
        pytest.skip("Transformer Engine is not installed")
    case = replace(
        case,
        model={**case.model, "backend": backend},
        train={"precision": precision},
        platform="cuda",
    )
    # TE's kernels need sizes that are multiples of 8. The tiny model's sizes are, except for the
    # head size.
    path = tiny(head_dim=32)
    rows = make_rows(TEXT_ON_ONE_RANK if "overlap" in name else MIXED)
    outcomes = gpu_pool.run(loss_and_grads, case.world, path, case, rows)
    errors_by_name = errors(outcomes, run_reference(path, rows), case)
    worst = max(errors_by_name, key=lambda key: errors_by_name[key])
    record_property("worst", f"{worst} {errors_by_name[worst]}")
    assert errors_by_name[worst] <= TOLERANCE[backend, precision], (
        f"{worst}: {errors_by_name[worst]:.2e}"
    )
