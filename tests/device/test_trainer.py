# .venv/bin/python -m pytest tests/device
"""The whole trainer on an emulated CUDA device. No operation mixes host and device, no collective
gets a tensor on the host, and a step waits for the device as often as its budget allows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_vlm.training.worker
from megatron_vlm.controller import local_group
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.process import MISTAKE
from megatron_vlm.model import fused_ops
from megatron_vlm.training.data_feed import share_batch
from megatron_vlm.training.worker import MegatronWorker
from tests.device.emulator import CUDA, emulated
from tests.device.findings import Finding, Kind, Phase
from tests.lora.test_lora import BLOCKS, DELTA_NET_IN_BLOCKS
from tests.model.test_parity import layout
from tests.run.test_train import command, run_rank
from tests.support import gemma4
from tests.support.batches import MIXED, make_rows
from tests.support.gemma4 import TinyGemma4
from tests.support.runs import Case, my_rows
from tests.support.sets import write_set
from tests.support.suites import slow

# The number of times that the host may wait for the device (docs/verified.md states the same). It
# never waits for a micro-batch, on any stage or between stages. In a step it waits once, after all
# work of the step, for the norm and the metrics.
PER_MICRO_BATCH = {Phase.forward: 0, Phase.backward: 0, Phase.exchange: 0}
# At EP each layer with experts waits for the tokens of its experts, which decide shapes, and a step
# for the most micro-batches of a replica.
PER_STEP = {Phase.step: 0, Phase.optimizer: 1}

ADAPTERS: dict[str, Any] = {"rank": 4, "targets": ("attention", "mlp")}
BF16, FP32 = {"precision": "bf16"}, {"precision": "fp32"}
CASES: dict[str, Case] = {
    "1": replace(layout(), train=BF16),
    "recompute": replace(layout(compile=True, recompute="full", recompute_vision=True), train=BF16),
    "tp2": replace(layout(tp=2, recompute_vision=True), train=BF16),
    "pp2": replace(layout(pp=2, layers_per_stage=[0, 2]), train=FP32),
    "pp2x2": replace(layout(pp=2, virtual_stages=2), train=FP32),
    "dp2": replace(layout(dp=2, overlap_grad_reduce=True, overlap_param_gather=True), train=FP32),
    "qwen3_5": replace(layout(tp=2, recompute_vision=True), train=BF16),
    "gemma4": replace(layout(tp=2, recompute_vision=True), train=FP32),
    # A step of the usual size multiplies what bf16 rounds.
    "gemma4-bf16": replace(layout(recompute="selective"), train=BF16, optim={"lr": 1e-6}),
    "offload": replace(layout(offload_activations=0.5), train=BF16),
    "offload-optimizer": replace(layout(), train=BF16, optim={"offload": 1.0}),
    "int8-moments": replace(layout(), train=BF16, optim={"states": "int8"}),
    "bf16-moments-dp2": replace(layout(dp=2), train=BF16, optim={"states": "bf16"}),
    "muon": replace(layout(), train=BF16, optim={"name": "muon"}),
    "lora-nf4": replace(layout(), train=BF16, lora=ADAPTERS | {"base": "nf4"}),
    "lora-int8-tp2": replace(layout(tp=2), train=BF16, lora=ADAPTERS | {"base": "int8"}),
    "lora-nf4-qwen3_5": replace(layout(), train=BF16, lora=ADAPTERS | {"base": "nf4"}),
    "experts-ep2": replace(layout(dp=2, ep=2), train=BF16),
    "qwen3_5-experts": replace(layout(), train=BF16),
    "offload-pp2x2": replace(
        layout(pp=2, virtual_stages=2, recompute="selective", offload_activations=1), train=FP32
    ),
}
SHALLOW = {"layers": 2, "vision_depth": 1, "deepstack": 1}  # each operation is slow here
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"family": "qwen3_5", "head_dim": 64, "vision_depth": 1},
    "offload": {"hidden": 128, "heads": 8, **SHALLOW},
    "pp2x2": {},
    "offload-pp2x2": {"hidden": 128, "heads": 8},
    "lora-nf4": BLOCKS,
    "lora-int8-tp2": BLOCKS,
    "lora-nf4-qwen3_5": DELTA_NET_IN_BLOCKS,
    "experts-ep2": {**SHALLOW, "experts": 4},
    "qwen3_5-experts": {"family": "qwen3_5", "head_dim": 64, "vision_depth": 1, "experts": 4},
}


@dataclass(frozen=True)
class Watched:
    """The findings of this rank in one step."""

    found: list[Finding]
    micro_batches: int
    loss: float
    to_host: int  # bytes that were copied to the host without a wait
    weights: int  # values of this rank's model


def with_cuda() -> None:
    """Make the workers of this process compute on the emulated device, over gloo."""
    platform = Platform("cuda", CUDA, "gloo", torch.bfloat16)
    megatron_vlm.training.worker.pick_platform = lambda name: platform
    fused_ops.missing_compiler = lambda platform: None  # it runs eagerly in the emulator


def second_step(path: str, case: Case, rows: Sequence[Row]) -> Watched:
    """Return the findings of the second step: the first creates the optimizer's state."""
    with_cuda()
    with emulated() as findings:
        worker = MegatronWorker(case.config(path))
        for _ in range(2):
            findings.all.clear()
            findings.to_host = 0
            local_batches = worker.micro_batches(my_rows(rows)), None
            leads = worker.grid.leads
            batches, _ = share_batch(local_batches if leads else None, worker.grid, CUDA)
            metrics = worker.forward_backward(batches)
            worker.optim_step()
            loss = metrics.loss
        weights = sum(param.numel() for param in worker.held.values())
        return Watched(findings.all, len(batches), loss, findings.to_host, weights)


def on_stand_in(path: str, case: Case, rows: Sequence[Row]) -> float:
    """Return the loss of the same step on the CPU."""
    worker = MegatronWorker(case.config(path))
    for _ in range(2):
        loss = worker.forward_backward(my_rows(rows)).loss
        worker.optim_step()
    return loss


def cases(quick: str | None, *full: str) -> list[Any]:
    """Return all cases. Those that are not named are slow."""
    marks = {quick: ()} | dict.fromkeys(full, pytest.mark.full)
    return [pytest.param(each, marks=marks.get(each, pytest.mark.slow)) for each in CASES]


@pytest.mark.parametrize("name", cases("offload-optimizer", "tp2", "qwen3_5", "gemma4", "offload"))
def test_a_step_waits_as_often_as_its_budget_says(name, device_pool, pool, tiny, tmp_path):
    case, rows = CASES[name], make_rows(MIXED)
    if "gemma4" in name:  # its pictures, and text within a window and beyond it, are masked apart
        path, rows = TinyGemma4(layers=2).write(tmp_path / "model"), gemma4.make_rows()
    else:
        path = tiny(**SIZES.get(name, SHALLOW))
    eager = replace(case, model={**case.model, "compile": False})
    [loss, *_] = pool.run(on_stand_in, case.world, path, eager, rows)
    for rank, done in enumerate(device_pool.run(second_step, case.world, path, case, rows)):
        budget = {phase: count * done.micro_batches for phase, count in PER_MICRO_BATCH.items()}
        budget |= PER_STEP
        budget[Phase.optimizer] += "offload" in case.optim  # for the gradients of each bucket
        if "experts" in name:
            is_divided = case.parallel.get("ep", 1) > 1
            budget[Phase.forward] = is_divided * SIZES[name].get("layers", 4) * done.micro_batches
            budget[Phase.step] += is_divided
        over = Counter(each.phase for each in done.found) - Counter(budget)
        wrong = [each for each in done.found if each.kind is not Kind.sync or each.phase in over]
        assert not wrong, f"rank {rank}: " + "\n".join(map(str, wrong))
        assert (done.to_host > 0) == ("offload" in name)
        if "offload" in case.optim:
            assert done.to_host == 4 * done.weights
        # bf16 differs where CUDA has separate kernels: in the tower, and for weight gradients.
        assert done.loss == pytest.approx(loss, rel=1e-6 if case.train is FP32 else 1e-3)


def whole_run(words: list[str]) -> tuple[int, str, list[Finding]]:
    with_cuda()
    with emulated() as findings:
        status, _, output = run_rank(words)
    return status, output, findings.all


@pytest.mark.parametrize("name", cases(None, "1", "pp2"))
def test_a_whole_run_mixes_nothing(name, device_pool, tiny, tmp_path):
    """Training, evaluation with answers, checkpoints, resuming and an export do not mix devices."""
    case = CASES[name]
    train = write_set(tmp_path, rows=9)
    keys = {"train.global_batch_size": 3, "checkpoint.every": 1, "data.eval": f"{{held: {train}}}"}
    keys |= {"eval.generate": "true", "eval.samples": 4, "eval.max_new_tokens": 3}
    keys |= {f"model.{key}": value for key, value in case.model.items()}
    keys |= {f"parallel.{key}": value for key, value in case.parallel.items()}
    keys |= {f"train.{key}": value for key, value in case.train.items()}
    settings = [f"{key}={str(value).replace(' ', '')}" for key, value in keys.items()]
    for steps in (1, 2):
        path = tiny(**SIZES.get(name, SHALLOW))
        words = command(tmp_path, path, "run", *settings, f"train.steps={steps}")[4:]
        for status, output, findings in device_pool.run(whole_run, case.world, words):
            assert status == 0, output
            assert [each for each in findings if each.kind is not Kind.sync] == []
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def without_memory(words: list[str]) -> tuple[int, str]:
    """Return the exit status and the words of a run whose second step has no memory left."""
    forward = MegatronWorker._loss_step

    def fail(self: MegatronWorker, *args: Any) -> Any:
        if self.steps == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args)

    with_cuda()
    with emulated(), mock.patch.object(MegatronWorker, "_loss_step", fail):
        status, _, output = run_rank(words)
    return status, output


def test_a_run_without_memory_ends_in_one_sentence(device_pool, tiny, tmp_path):
    write_set(tmp_path, rows=9)
    words = command(tmp_path, tiny(), "run", "parallel.pp=1", "train.global_batch_size=3")[4:]
    [(status, output)] = device_pool.run(without_memory, 1, words)
    assert status == MISTAKE, output
    sentence = output.splitlines()[-1]
    start = "megatron-vlm: rank 0: stage 0 has run out of memory at step 2 (forward and backward, "
    assert sentence.startswith(start), output
    assert "3 micro-batches of up to 1 x " in sentence and " patches): planned were" in sentence
    for part in ("weights", "gradients", "optimizer", "activations", "working", "together"):
        assert f"{part} " in sentence
    assert "79.0 GiB at its peak" in sentence and "the device has 80.0 GiB; set " in sentence
    assert "set optim.offload=1 (saves " in sentence
    assert " or optim.states=int8 (saves 2.6 MiB)" in sentence


def through_a_group(path: str, case: Case, folder: str) -> list[Finding]:
    with_cuda()
    with emulated() as findings:
        group = local_group(MegatronWorker(case.config(path)))
        rows = make_rows(MIXED)
        group.forward(rows).result()
        group.forward_backward(rows, True).result()
        group.optim_step().result()
        group.generate(rows[:3], 2, stop_ids=(), temperature=1.0).result()
        group.save(folder).result()
        group.load(folder).result()
        group.export(folder + "-hf").result()
    return findings.all


@pytest.mark.full
@pytest.mark.parametrize("name", [slow("tp2"), "pp2"])
def test_a_group_mixes_nothing(name, device_pool, tiny, tmp_path):
    case = CASES[name]
    folder = str(tmp_path / "saved")
    for findings in device_pool.run(through_a_group, case.world, tiny(**SHALLOW), case, folder):
        assert [each for each in findings if each.kind is not Kind.sync] == []


def careless(path: str, case: Case) -> Watched:
    """Run the second step with a `tolist` added to the model again."""
    from megatron_vlm.model.rope import InterleavedMRoPE

    right = InterleavedMRoPE.forward

    def wrong(self: Any, ids_3BS: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert ids_3BS.tolist()
        return right(self, ids_3BS)

    with mock.patch.object(InterleavedMRoPE, "forward", wrong):
        return second_step(path, case, make_rows(MIXED))


def test_a_wait_that_is_put_back_is_named(device_pool, tiny):
    [done] = device_pool.run(careless, 1, tiny(**SHALLOW), CASES["1"])
    findings = [each for each in done.found if each.phase is Phase.forward]
    assert [each.what for each in findings] == ["tolist"] * done.micro_batches
    line = careless.__code__.co_firstlineno + 7
    assert {each.where for each in findings} == {f"tests/device/test_trainer.py:{line}"}
