"""The end of a run that has no memory left: one sentence with what took how much on this rank, and
the switches that would help most."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_vlm.distributed.device import lacks_memory
from megatron_vlm.errors import TrainError
from megatron_vlm.io.printable import size_text
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.planner.search import RunPlan
from megatron_vlm.training.worker import MegatronWorker

_NAMED = 2  # switches


@contextmanager
def explain_out_of_memory(worker: MegatronWorker) -> Iterator[None]:
    """Turn an error of an allocator into a TrainError. The launcher ends the other ranks."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        explained = describe_out_of_memory(worker)
    # Outside of the handler, so that the frames and their tensors are not kept.
    raise explained


def describe_out_of_memory(worker: MegatronWorker) -> TrainError:
    """Return the error of a rank whose memory has run out."""
    stage, batches = worker.grid.pp.rank, worker.stage.batch_sizes
    plan = RunPlan.of(worker.layout, batches)
    parts = plan.memory[stage]
    planned = ", ".join(
        f"{name} {size_text(getattr(parts, name))}"
        for name in ("weights", "gradients", "optimizer", "activations", "working", "nccl")
        if getattr(parts, name)
    )
    platform, watchdog = worker.platform, worker.watchdog
    used = ", ".join(f"{size_text(size)} {name}" for name, size in platform.memory_figures())
    total = size_text(platform.memory_total())
    switches = [f"{name} (saves {size_text(size)})" for name, size in plan.switches(stage)]
    return TrainError(
        f"has run out of memory at step {watchdog.step} ({watchdog.phase}{_largest(batches)}): "
        f"planned were {planned}, together {size_text(parts.total)}; the allocator has {used}, "
        f"and {'the device' if platform.is_cuda else 'this machine'} has {total}",
        key=f"stage {stage}",
        remedy=f"set {' or '.join(switches[:_NAMED])}"
        if switches
        else "take more devices, or shorter rows with data.max_tokens",
    )


def _largest(batches: Sequence[BatchSizes]) -> str:
    """Return the largest micro-batch as part of a sentence."""
    if not batches:
        return ""
    largest = max(batches, key=lambda each: (each.padded_tokens, each.patches))
    sizes = f"{largest.rows} x {largest.tokens:,} tokens"
    sizes += f" and {largest.patches:,} patches" * (largest.patches > 1)
    return f", {len(batches)} micro-batches of up to {sizes}"
