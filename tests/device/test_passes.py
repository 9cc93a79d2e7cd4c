# .venv/bin/python -m pytest tests/device/test_passes.py
"""The passes of objectives, `rl` and `serve` on an emulated CUDA device. None mixes devices, waits
in a micro-batch, or waits more often than its budget allows."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.training.backward import LossCall
from megatron_vlm.training.multi_model import run_together
from megatron_vlm.training.worker import MegatronWorker
from tests.device.emulator import emulated
from tests.device.findings import Finding, Kind, Phase
from tests.device.test_trainer import ADAPTERS, BF16, FP32, SHALLOW, with_cuda
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.runs import my_rows
from tests.support.suites import FULL
from tests.training import test_preferences, test_retrieval
from tests.training.test_losses import with_teacher, with_values

TOKENS = 3  # that are sampled
Pass = Callable[[MegatronWorker, list[Row], Path], object]


def shared_pass(worker: MegatronWorker, rows: list[Row], folder: Path) -> None:
    """Train two models of a service in one pass."""
    one = LoraConfig(**ADAPTERS)
    workers = [MegatronWorker(replace(worker.cfg, lora=one), base=worker) for _ in range(2)]
    call = LossCall(True, "cross_entropy", 1.0, True, {})
    for _ in range(2):
        run_together([each.backward(rows, call) for each in workers])


def save_and_load(worker: MegatronWorker, rows: list[Row], folder: Path) -> None:
    """Save while training goes on, as with checkpoint.async_save, and resume from that."""
    pending = save(worker, folder / "saved", {"step": 1}, async_save=True)
    worker.forward_backward(rows)
    assert pending.finish()
    load(worker, folder / "saved")


ANY = dict.fromkeys((Phase.step, Phase.optimizer, Phase.other), math.inf)
# name: (the pass, its waits by phase); none for a micro-batch
PASSES: dict[str, tuple[Pass, dict[Phase, float]]] = {
    "ppo": (lambda w, rows, _: w.forward_backward(rows, True, "ppo", kl_coef=0.1), {Phase.step: 1}),
    # Without ce_coef the engine makes a gradient of zeros, which the emulator does not see.
    "distill": (
        lambda w, rows, _: w.forward_backward(rows, loss="distill", beta=0.3, ce_coef=0.2),
        {},
    ),
    "scores": (lambda w, rows, _: w.forward(rows), {Phase.other: 1}),
    "likeliest": (lambda w, rows, _: w.likeliest(rows, 4), {Phase.other: 2}),
    "samples": (
        lambda w, *_: w.sample(make_rows(MIXED)[:2], SamplingSettings(TOKENS, 1.0), 2, [0, 1]),
        {Phase.other: TOKENS},  # for the ids, some of which end an answer
    ),
    "save_and_load": (save_and_load, ANY),
}
LAYOUTS = {
    "1": (replace(layout(), train=BF16), PASSES),
    "pp2": (replace(layout(pp=2), train=FP32), PASSES),
    "serve": (replace(layout(), train=BF16), {"shared pass": (shared_pass, ANY)}),
}


def findings_of(path: str, name: str, rows: list[Row], folder: Path) -> dict[str, list[Finding]]:
    case, passes = LAYOUTS[name]
    with_cuda()
    found = {}
    with emulated() as findings:
        worker = MegatronWorker(case.config(path), training=name != "serve")
        for kind, (act, _budget) in passes.items():
            act(worker, my_rows(rows), folder / f"first-{kind}")  # it fills caches
            findings.all.clear()
            act(worker, my_rows(rows), folder / f"second-{kind}")
            found[kind] = list(findings.all)
    return found


def waits_over(found: list[Finding], budget: dict[Phase, float]) -> list[Finding]:
    """Return the findings that are no waits, and the waits of phases with more than the budget."""
    counts = Counter(each.phase for each in found)
    return [
        each
        for each in found
        if each.kind is not Kind.sync or counts[each.phase] > budget.get(each.phase, 0)
    ]


@pytest.mark.parametrize("name", [pytest.param(each, marks=FULL) for each in LAYOUTS])
def test_passes_wait_as_often_as_their_budgets_say(name, device_pool, tiny, tmp_path):
    path, generator = tiny(**SHALLOW), torch.Generator().manual_seed(0)
    rows = make_rows(MIXED)
    rows = with_values(rows, [torch.zeros(len(row.ids_S)) for row in rows])
    rows = [with_teacher(row, torch.zeros(len(row.ids_S), 512), generator) for row in rows]
    case, passes = LAYOUTS[name]
    for found in device_pool.run(findings_of, case.world, path, name, rows, tmp_path):
        for kind, (_, budget) in passes.items():
            wrong = waits_over(found[kind], budget)
            assert not wrong, f"{kind}: " + "\n".join(map(str, wrong))


def objective(step: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Finding]:
    with_cuda()
    with emulated() as findings:
        step(*arguments)
    return findings.all


OBJECTIVES = {
    "dpo": (test_preferences.SIGMOID, test_preferences.pairs),
    "kto": (test_preferences.KTO, test_preferences.labelled),
    "embed": (test_retrieval.TRIALS["embed"], test_retrieval.records),
    "rerank": (test_retrieval.TRIALS["listwise"], test_retrieval.records),
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=FULL) for each in OBJECTIVES])
def test_objectives_wait_for_no_micro_batch(name, device_pool, tiny, tmp_path):
    """A step of an objective and an evaluation by it, with the log-probs of its reference."""
    trial, records = OBJECTIVES[name]
    data, path = tmp_path / "data.jsonl", tiny(**SHALLOW)
    data.write_text("".join(json.dumps(record) + "\n" for record in records()))
    cfg: Config = trial.config(path, replace(layout(), train={"micro_batch_size": 1}), str(data))
    if name in ("dpo", "kto"):
        step, given = test_preferences.step_of, (path, cfg, tiny(**SHALLOW, seed=1), None)
    else:
        step, given = test_retrieval.step_of, (path, cfg)
    [found] = device_pool.run(objective, 1, step, given)
    once = "megatron_vlm/data/media/pixel_tables.py"  # it copies its table at the first picture
    assert sum(each.where.startswith(once) for each in found) <= 2  # also that of the evaluation
    wrong = waits_over([each for each in found if not each.where.startswith(once)], ANY)
    assert not wrong, "\n".join(map(str, wrong))
