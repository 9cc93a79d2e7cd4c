"""The overview of a run that rank 0 prints before the first step."""

from collections.abc import Sequence
from itertools import islice

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.stream_set import StreamSet
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.first_batches import heaviest_of, plan_steps, plan_updates
from megatron_vlm.planner.memory import StageMemory, estimate
from megatron_vlm.report.layout_table import StageReport, size_text
from megatron_vlm.report.run_overview import RunFacts, run_overview
from megatron_vlm.run.evaluation.held_out_sets import EvalSet
from megatron_vlm.training.data_feed import Feeder
from megatron_vlm.training.lr_schedule import describe_run_length, total_steps
from megatron_vlm.training.worker import MegatronWorker

_MAX_STEPS = 50
_MAX_ROWS = 2000  # rows of the steps that are planned, so that a run starts without delay


def describe_start(
    worker: MegatronWorker,
    feeder: Feeder,
    held_out: Sequence[EvalSet],
    stages: Sequence[StageReport],
    length: str,
    prompts_only: bool,
) -> str:
    """Return the overview of a run on rank 0. `length`: its samples and steps, as a sentence."""
    cfg, dims, data = worker.cfg, worker.dims, feeder.data
    assert data is not None, "rank 0 loads data"
    dtype = worker.chunks[0].config.params_dtype
    memory = memory_of_run(cfg, data, worker.source.sizes, dims, dtype.itemsize, prompts_only)
    facts = RunFacts(
        length,
        epochs_of(cfg, feeder.length),
        feeder.remarks,
        data,
        [(each.name, each.samples) for each in held_out],
        stages,
        memory,
        device_memory(worker.platform),
        prompts_only,
    )
    return run_overview(cfg, dims, facts)


def memory_of_run(
    cfg: Config,
    data: DataSet | StreamSet,
    sizes: ModelSizes,
    dims: ParallelDims,
    itemsize: int,
    prompts_only: bool = False,
) -> list[StageMemory]:
    """Return the memory of a rank of each stage, estimated from the first steps. With
    `prompts_only` the samples are prompts, whose answers are trained."""
    count = min(_MAX_STEPS, max(1, _MAX_ROWS // cfg.train.global_batch_size))
    if prompts_only and isinstance(data, DataSet):
        steps = list(islice(plan_updates(data, cfg, dims), max(1, count // cfg.rl.samples)))
    else:
        steps = list(islice(plan_steps(data, cfg, dims), count))
    return estimate(cfg, sizes, dims, heaviest_of(steps, cfg, sizes, dims), itemsize)


def length_of(cfg: Config, samples: int | None, done: int) -> str:
    """Describe the length of a run, of which `done` steps are done. Raise a ConfigError if a new
    run would end before it reaches its learning rate."""
    if not done:
        return describe_run_length(cfg, samples)
    return f"{done:,} of {total_steps(cfg.train, samples):,} steps are done already"


def epochs_of(cfg: Config, samples: int | None) -> float | None:
    """Return the number of epochs of a run; None for a stream."""
    if samples is None:
        return None
    return total_steps(cfg.train, samples) * cfg.train.global_batch_size / samples


def device_memory(platform: Platform) -> str:
    """Describe the memory of a device of this platform."""
    size = size_text(platform.memory_total())
    return f"{size} in a GPU" if platform.is_cuda else f"{size} in this machine"
