# .venv/bin/python -m pytest tests/nccl/test_mutants.py
"""Tests of the trainer under the rules of NCCL: each mutant is named, and the trainer as it is
breaks no rule, and opens as many communicators as the plan counts."""

import math
import os
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family import read_sizes
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import communicators
from megatron_vlm.training import data_parallel
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.nccl.install import install
from tests.nccl.mutants import MUTANTS
from tests.nccl.referee import Referee
from tests.support.batches import MIXED, TEXT_ON_ONE_RANK, make_rows
from tests.support.pool import Pool
from tests.support.runs import Case, my_rows
from tests.support.suites import full, quick

OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = {
    "tp2": layout(tp=2),
    "dp2": layout(dp=2),
    "dp2-overlap": layout(dp=2, **OVERLAP),
    "pp2": layout(pp=2),
    "pp2x2": layout(pp=2, virtual_stages=2),
    "pp2-dp2": layout(pp=2, dp=2),
    "tp2-pp2": layout(tp=2, pp=2),
    "pp4": layout(pp=4),
    "ep2": layout(dp=2, ep=2),
    "ep2-pp2": layout(dp=2, ep=2, pp=2),
    "dp2-plain": layout(dp=2, distributed_optimizer=False),
    "tp2-dp2-muon": replace(layout(tp=2, dp=2), optim={"name": "muon"}),
    "pp2-tied": layout(pp=2),
    "ep2-dp4": layout(dp=4, ep=2),
}
SMALL_BUCKETS = 30_000  # values; a real model has many buckets


def work(path: str, case: Case, variables: dict[str, str], mutant: str) -> None:
    """Score rows, and train three steps, as one rank. The replicas have unequal micro-batches."""
    os.environ.update(variables)
    install()
    with pytest.MonkeyPatch.context() as patch:
        config = data_parallel.DistributedDataParallelConfig
        buckets = partial(config, bucket_size=SMALL_BUCKETS)
        patch.setattr(data_parallel, "DistributedDataParallelConfig", buckets)
        if mutant:
            MUTANTS[mutant].put_in(patch)
        worker = MegatronWorker(case.config(path))
        worker.forward(my_rows(make_rows(MIXED)))
        for specs in (MIXED[:5], TEXT_ON_ONE_RANK, TEXT_ON_ONE_RANK):
            worker.forward_backward(my_rows(make_rows(specs)))
            norm, *_ = worker.optim_step()
            assert math.isfinite(norm), f"the norm is {norm}"


def findings(pool: Pool, tiny, name: str, mutant: str = "", rules: str = "") -> str:
    """Return what the referee and the ranks say about a job, and where the plan is wrong."""
    case, error = LAYOUTS[name], ""
    path = tiny(**EXPERTS if "ep2" in name else {"tied": "tied" in name})
    referee = Referee(f"release,{rules}")
    try:
        pool.run(work, case.world, path, case, referee.environment(), mutant)
        [job] = referee.jobs.values()
        used = Counter(rank for comm in +job.operations for rank in job.members[comm])
        if used != (planned := planned_communicators(path, case)):
            error = f"communicators of each rank: {dict(used)}, and planned {planned}"
    except RuntimeError as failure:
        error = str(failure)
    return "\n".join([*referee.take_remarks(), error])


def planned_communicators(path: str, case: Case) -> dict[int, int]:
    cfg, sizes = case.config(path), read_sizes(path)
    dims = ParallelDims.create(cfg.parallel, case.world, sizes.text.num_layers)
    planned = ModelLayout(cfg, sizes, dims, itemsize=4)
    return {rank: communicators(planned, dims.stage_of(rank)) for rank in range(case.world)}


@pytest.mark.parametrize("rules", ["", full("lazy,one-queue")])
@pytest.mark.parametrize("name", quick(["pp2x2"], LAYOUTS))
def test_trainer_breaks_no_rule(own_pool, tiny, name, rules):
    assert not findings(own_pool, tiny, name, rules=rules)


CHOSEN = ["skipped_all_reduce", "unbatched_sends", "own_sizes", "gradients_without_wait"]


@pytest.mark.parametrize("name", quick(CHOSEN, MUTANTS))
def test_mutants_are_named(own_pool, tiny, name):
    mutant = MUTANTS[name]
    found = findings(own_pool, tiny, mutant.layout, name)
    assert mutant.finds in found, found
