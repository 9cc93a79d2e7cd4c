# .venv/bin/python -m pytest tests/training/test_data_parallel.py
"""Tests of weights that are gathered behind other work. Every reader gets the same weights as after
a gather within the step. The model has many buckets, as a real model has, and images on one replica
only: there the replicas' backward passes complete the buckets in different orders."""

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.hf.gather_weights import gather_tensors
from megatron_vlm.training import data_parallel
from megatron_vlm.training.worker import MegatronWorker
from tests.checkpoint.test_checkpoint import whole
from tests.model.test_parity import layout
from tests.support.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.comparison import same
from tests.support.runs import Case, my_rows

LATE = 0.2  # seconds for which one replica has its new weights and waits for those of the other


def begin_late(worker: MegatronWorker) -> None:
    """Make the last rank begin its gathers late."""
    start = worker.gather.start

    def late() -> None:
        time.sleep(LATE)
        start()

    if worker.gather.groups and dist.get_rank() == dist.get_world_size() - 1:
        worker.gather.start = late  # type: ignore[method-assign]


def read_after_steps(path: str, case: Case, out: Path) -> dict[str, Any]:
    """Return the values that each reader of weights gets right after a step."""
    buckets = partial(data_parallel.DistributedDataParallelConfig, bucket_size=30_000)
    with mock.patch.object(data_parallel, "DistributedDataParallelConfig", buckets):
        worker = MegatronWorker(case.config(path))
    assert not worker.grid.first or len(worker.stage.wrapped[0].bucket_groups) > 3
    assert bool(worker.gather.groups) == case.parallel["overlap_param_gather"]
    begin_late(worker)

    def step(seed: int) -> float:
        rows = make_rows(TEXT_ON_ONE_RANK if seed % 2 else MIXED, seed=seed)
        loss = worker.forward_backward(my_rows(rows)).loss
        worker.forward(my_rows(rows)[:1])  # between the gradients and the step
        worker.optim_step()
        return loss

    def weights() -> dict[str, torch.Tensor]:
        named = gather_tensors(worker.held, worker.table, worker.grid)
        return {name: value.clone() for name, value in named if value is not None}

    readings: dict[str, Any] = {"losses": [step(seed) for seed in range(3)]}
    readings["log_probs"] = worker.forward(my_rows(make_rows(MIXED)))
    step(3)
    readings["weights"] = weights()
    step(4)
    worker.export_hf(str(out / "export"))
    step(5)
    save(worker, step_folder(out, 6), {})
    step(6)
    load(worker, step_folder(out, 6))
    readings["loaded"] = weights()
    readings["after loading"] = worker.forward(my_rows(make_rows(MIXED)))
    return readings


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [{"dp": 2}, {"dp": 2, "pp": 2, "virtual_stages": 2, "freeze_vision": True}],
    ids=["dp2", "pp2x2-dp2-vision-frozen"],
)
def test_whoever_reads_weights_gets_the_new_ones(more, pool, tiny, tmp_path):
    results = {}
    for overlap in (False, True):
        case = layout(**more, overlap_grad_reduce=True, overlap_param_gather=overlap)
        out = tmp_path / str(overlap)
        out.mkdir()
        results[overlap] = pool.run(read_after_steps, case.world, tiny(), case, out)
    for at_once, behind in zip(results[False], results[True], strict=True):
        assert [key for key in at_once if not same(at_once[key], behind[key])] == []
    exports = [tmp_path / name / "export" / "model.safetensors" for name in ("False", "True")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    checkpoints = [whole(step_folder(tmp_path / name, 6)) for name in ("False", "True")]
    assert same(*checkpoints)
