# .venv/bin/python -m pytest tests/training/test_shared_weights.py
"""Several models beside one set of frozen weights: each is, bit for bit, what it would be alone;
and checkpoints of weights without the optimizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vlm.checkpoint import save_load
from megatron_vlm.checkpoint.rank_state import get_step
from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.errors import CheckpointError
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import same
from tests.support.runs import Case, collect_grads, my_rows
from tests.support.suites import FULL, SLOW, quick

SMALL = LoraConfig(rank=2, alpha=8, targets=("attention",))
LARGE = LoraConfig(rank=5, alpha=10, targets=("attention", "mlp"), train=("merger",))
EVERY = replace(SMALL, targets=("mlp",))
BF16 = {"precision": "bf16"}

LAYOUTS = {
    "1x1": (layout(), {}),
    "tp2-tied": (layout(tp=2), {"tied": True, **SHALLOW}),
    "pp2-tied": (layout(pp=2), {"tied": True}),
    "pp2x2-dp2": (layout(pp=2, dp=2, virtual_stages=2), {}),
    "dp2-bf16": (replace(layout(dp=2), train=BF16), SHALLOW),
    "experts": (layout(dp=2, ep=2), EXPERTS),
}


def steps(worker: MegatronWorker, seed: int) -> Any:
    """What a model learns and answers."""
    rows = my_rows(make_rows(MIXED, seed=seed))
    losses = [worker.forward_backward(rows).loss]
    grads = collect_grads(worker)
    norms = [worker.optim_step(lr=1e-2)]
    losses.append(worker.forward_backward(rows).loss)
    norms.append(worker.optim_step(lr=1e-2))
    answers = worker.sample(rows[:2], SamplingSettings(4, temperature=0.0))
    return losses, norms, grads, worker.forward(rows), [[one.ids for one in a] for a in answers]


def alone(path: str, case: Case, kinds: list[tuple[LoraConfig, int]]) -> list[Any]:
    return [
        steps(MegatronWorker(replace(case.config(path), lora=lora)), seed) for lora, seed in kinds
    ]


def beside(path: str, case: Case, kinds: list[tuple[LoraConfig, int]]) -> Any:
    cfg = case.config(path)
    base = MegatronWorker(cfg, training=False)
    rows = my_rows(make_rows(MIXED))
    before = base.forward(rows)
    workers = [MegatronWorker(replace(cfg, lora=lora), base=base) for lora, _ in kinds]
    shared = {param.data_ptr() for param in base.held.values()}
    own = [
        sum(p.numel() for p in worker.held.values() if p.data_ptr() not in shared)
        for worker in workers
    ]
    trained = [
        sum(p.numel() for e, p in worker.held.items() if not e.is_frozen(worker.cfg))
        for worker in workers
    ]
    found = [steps(worker, seed) for worker, (_, seed) in zip(workers, kinds, strict=True)]
    assert all(map(torch.equal, before, base.forward(rows)))
    return own, trained, found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=FULL if n == "tp2-tied" else SLOW) for n in LAYOUTS]
)
def test_models_beside_one_base_are_what_they_are_alone(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    kinds = [(EVERY if name == "experts" else LARGE, 1), (SMALL, 2), (SMALL, 3)]
    path = tiny(**sizes)
    want = pool.run(alone, case.world, path, case, kinds)
    for rank, (own, trained, found) in enumerate(pool.run(beside, case.world, path, case, kinds)):
        assert own == trained  # nothing that is frozen is held twice
        assert same(found, want[rank])
    losses = [each[0] for each in want[0]]
    assert losses[0] != losses[1] != losses[2] and losses[0][1] < losses[0][0]


def weights_alone(path: str, case: Case, folder: str) -> Any:
    cfg = case.config(path)
    first, second = MegatronWorker(cfg), MegatronWorker(cfg)
    rows = my_rows(make_rows(MIXED))
    first.forward_backward(rows)
    first.optim_step(lr=1e-2)
    save_load.save(first, Path(folder) / "weights", {"seq": 3}, moments=False)
    second.forward_backward(rows)
    second.optim_step(lr=1e-1)
    with pytest.raises(CheckpointError, match="exp_avg"):
        save_load.load(second, Path(folder) / "weights")
    progress = save_load.load(second, Path(folder) / "weights", moments=False)
    equal = all(map(torch.equal, first.forward(rows), second.forward(rows)))
    fresh = MegatronWorker(cfg)
    save_load.load(fresh, Path(folder) / "weights", moments=False)
    assert get_step(second.optimizer) == get_step(fresh.optimizer) == 0  # as new ones
    later = []
    for worker in (second, fresh):
        worker.forward_backward(rows)
        worker.optim_step(lr=1e-2)
        later.append(worker.forward(rows))
    reader = MegatronWorker(cfg, training=False)
    save_load.load(reader, Path(folder) / "weights", moments=False)
    read = all(map(torch.equal, reader.forward(rows), first.forward(rows)))
    return progress, equal, all(map(torch.equal, *later)), read


@pytest.mark.parametrize("name", quick(["dp2-bf16"], ["1x1", "dp2-bf16", "pp2-tied"], SLOW))
@pytest.mark.parametrize("lora", quick([SMALL], [None, SMALL]))
def test_weights_without_moments(name, lora, pool, tiny, tmp_path):
    case, sizes = LAYOUTS[name]
    if lora is not None:
        case = replace(case, lora={"rank": 2, "alpha": 8, "targets": ("attention",)})
    for found in pool.run(weights_alone, case.world, tiny(**sizes), case, str(tmp_path)):
        assert found == ({"seq": 3}, True, True, True)
    size = sum(each.stat().st_size for each in (tmp_path / "weights").glob("*.safetensors"))
    assert size > 0
