"""Activations and the optimizer in host memory on this GPU: the same bits, and how much of the
copies is hidden behind other work."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.machine import seconds
from gpu.parity import leave
from gpu.speed import free, prepared_model, timed, worker_of
from gpu.step import Figures
from gpu.work import WHOLES, Work, make_rows

from megatron_vlm import MegatronWorker
from megatron_vlm.distributed.host_copies import PAGE, HostCopies

# bf16 weights after a step of AdamW on the host and on the device.
LOSS_BOUND = 1e-3
LR = 1e-4


def offload(figures: Figures) -> None:
    """Compare a step with activations on the host with one without, bit for bit, and time both;
    then the same for the optimizer, whose arithmetic differs."""
    if not (prepared := prepared_model(figures, WHOLES[1:])):
        return
    speeds = _copies(figures)
    plain = _Step(figures, *prepared)
    _activations(figures, plain, _Step(figures, *prepared, activations=1.0), speeds)
    _optimizer(figures, plain, _Step(figures, *prepared, optimizer=1.0), speeds)


class _Step:
    """What a worker does with one batch, and its times. The worker is forgotten."""

    def __init__(
        self,
        figures: Figures,
        work: Work,
        path: Path,
        activations: float = 0.0,
        optimizer: float = 0.0,
    ):
        worker = worker_of(
            figures, work, path, {"offload": optimizer}, offload_activations=activations
        )
        batches = worker.micro_batches(make_rows(work, path))
        self.weights = sum(param.numel() for param in worker.held.values())
        run = partial(worker.forward_backward, batches)
        step = partial(_optimize, worker, run)
        self.loss = run().loss
        self.sums = _sums(worker)
        run()
        self.again = _sums(worker)
        self.seconds = timed(run, work.steps)
        held = worker.chunks[0].offload
        self.pages = 0 if held is None else held.copies.pages.allocated
        self.optimizer_seconds = timed(step, work.steps) - self.seconds
        run()
        worker.optim_step(LR)
        self.next_loss = run().loss
        del worker, run, step, held
        leave()
        free()


def _optimize(worker: MegatronWorker, run: Callable[[], object]) -> None:
    run()
    worker.optim_step(0.0)


def _sums(worker: MegatronWorker) -> dict[str, int]:
    """Return a sum over the bits of each gradient."""
    trained: dict[str, Any] = {str(e.names): p for e, p in worker.held.items() if p.requires_grad}
    return {
        name: int(param.main_grad.view(torch.int32).sum(dtype=torch.int64))
        for name, param in trained.items()
    }


def _copies(figures: Figures) -> tuple[float, float]:
    """Measure copies of pinned pages alone; return the bytes per second to the host and back."""
    size = (1 if figures.dry else 256) * PAGE
    device = torch.device(figures.platform)
    copies, tensor = HostCopies(device), torch.ones(size, dtype=torch.uint8, device=device)
    block, event = copies.store([tensor])
    stored = seconds(lambda: copies.store([tensor]), 5)[1]
    loaded = seconds(lambda: copies.wait(copies.load(block, [(0, size)], event)[1]), 5)[1]
    speeds = size / stored, size / loaded
    figures.say("gb_per_s", {"to the host": speeds[0] / 1e9, "back": speeds[1] / 1e9})
    return speeds


def _activations(figures: Figures, plain: _Step, moved: _Step, speeds: tuple[float, float]) -> None:
    # Sums whose order is left open on a GPU differ without any offload, too.
    steady = [name for name, value in plain.sums.items() if plain.again[name] == value]
    figures.say("gradients_that_repeat_without_offload", f"{len(steady)} of {len(plain.sums)}")
    differing = sum(moved.sums[name] != plain.sums[name] for name in steady)
    figures.check("activations: gradients with other bits", differing, 0)
    figures.check("activations: difference of the loss", abs(moved.loss - plain.loss), 0)
    size = moved.pages * PAGE
    alone = size / speeds[0] + size / speeds[1]
    _say(figures, "activations", size, alone, plain.seconds, moved.seconds)


def _optimizer(figures: Figures, plain: _Step, moved: _Step, speeds: tuple[float, float]) -> None:
    error = abs(moved.next_loss - plain.next_loss) / abs(plain.next_loss)
    figures.check("optimizer: loss after a step", error, LOSS_BOUND)
    size = 4 * moved.weights  # fp32 gradients to the host, and bf16 weights back
    alone = size / speeds[0] + size / 2 / speeds[1]
    _say(figures, "optimizer", size, alone, plain.optimizer_seconds, moved.optimizer_seconds)


def _say(
    figures: Figures, name: str, size: int, alone: float, without: float, with_offload: float
) -> None:
    """Say what the copies would take alone, and which share of that the step does not show. For the
    optimizer the step also shows that the host computes more slowly."""
    values = {"gib_to_the_host": size / 2**30, "ms_of_the_copies_alone": 1e3 * alone}
    values |= {"ms_without": 1e3 * without, "ms": 1e3 * with_offload}
    values["share_hidden"] = 1 - (with_offload - without) / alone
    figures.say(name, values)
