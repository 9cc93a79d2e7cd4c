"""`megatron-vlm train --dry-run`: the plan of a run, before any weight is read.

One process plans for all ranks: the layout, the memory of each stage, the first batches.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table

from megatron_vlm.config.checks import processes_for
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits, plan_batch
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, Handle, open_data
from megatron_vlm.data.batches.stream_set import StreamSet
from megatron_vlm.distributed.device import Platform, count_gpus, pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.load_weights import check_tensors
from megatron_vlm.hf.push import check_push
from megatron_vlm.hf.weight_map import name_table
from megatron_vlm.io.hub import hub_name
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.lora.targets import adapted_linears, adapter_entries
from megatron_vlm.lora.weights import adapted_weights
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.model.constraints import check_config
from megatron_vlm.planner.auto_layout import needs_planning, plan_layout
from megatron_vlm.planner.memory import USABLE, StageMemory, estimate
from megatron_vlm.planner.row_sizes import BatchSizes, mix_of
from megatron_vlm.report.layout_table import layout_table, stage_reports
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.run.resolve_model import with_model
from megatron_vlm.training.lr_schedule import describe_run_length

SHOWN_STEPS = 2
MEASURED_STEPS = 50  # the largest step among these decides the memory of activations


def dry_run(cfg: Config) -> int:
    """Print the plan; raise the errors that would end the run."""
    console = Console(highlight=False)
    platform = pick_platform(cfg.platform)
    if cfg.checkpoint.push is not None:
        check_push(cfg.checkpoint.push)
    cfg = with_model(cfg, weights=False)
    source = HFCheckpoint(cfg.model.path, cfg.data.add_tokens)
    if (remark := platform.remark(cfg.platform, source.sizes.num_values)) is not None:
        console.print(remark, soft_wrap=True)
    gpus = count_gpus() if platform.is_cuda else 0
    world = int(os.environ.get("WORLD_SIZE", "0")) or processes_for(cfg, gpus)
    if needs_planning(cfg):
        mix = mix_of(cfg, source.sizes)
        cfg, chosen = plan_layout(cfg, source.sizes, world, platform, mix)
        console.print(chosen, markup=False, soft_wrap=True)
    dims = ParallelDims.create(cfg.parallel, world, source.sizes.text.num_layers)
    check_config(cfg, source.sizes, dims)
    # A folder may have no weights yet, and a plan does not download them.
    if hub_name(cfg.model.path) is None and any(source.path.glob("*.safetensors")):
        source.read_headers()
        check_tensors(source)
    table = name_table(source.sizes, cfg.model.backend, dims)
    linears = adapted_linears(table, adapted_weights(cfg, source.sizes))
    table += adapter_entries(linears, cfg.lora.rank)
    dtype = compute_dtype(cfg, platform)
    where = f"{platform.name}, {dtype}"
    console.print(layout_table(cfg, dims, where, stage_reports(cfg, dims, table)))
    data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, source.sizes)
    remarks = Remarks.from_data(data, "data.train", cfg.data)
    for line in (describe_run_length(cfg, data.length), *remarks.lines):
        console.print(escape_controls(line), markup=False, soft_wrap=True)
    steps = list(islice(plan_steps(data, cfg, dims), MEASURED_STEPS))
    if steps:
        console.print("First batches: rows x tokens of each micro-batch (patches of its images)")
        console.print(batch_table(steps[:SHOWN_STEPS]))
    # Sooner or later the largest micro-batches of a replica are in flight together.
    shares = [share for step in steps for share in step] or [[]]
    heaviest = max(shares, key=lambda share: sum(batch.padded_tokens for batch in share))
    memory = estimate(cfg, source.sizes, dims, heaviest, dtype.itemsize)
    where = "the device" if platform.is_cuda else "this machine, which all processes share"
    total = f"{size_text(platform.memory_total())} in {where}"
    chunks = f" with its {dims.virtual_stages} chunks" if dims.virtual_stages > 1 else ""
    console.print(f"Memory of one rank of each stage{chunks}, estimated ({total})")
    console.print(memory_table(memory))
    if text := warning(memory, platform):
        console.print(text)
    return 0


def plan_steps(
    data: DataSet | StreamSet, cfg: Config, dims: ParallelDims
) -> Iterator[list[list[BatchSizes]]]:
    """Yield the micro-batches of each replica, step by step, through the first epoch. Yield nothing
    for a stream, whose sizes are not known in advance."""
    if not isinstance(data, DataSet):
        return
    limits = Limits.from_config(cfg.train)
    epoch = data.epoch(Position())
    while part := list(islice(epoch, cfg.train.global_batch_size)):
        handles = [handle for handle, _, _ in part]
        plan = plan_batch([size for _, size, _ in part], dims.dp, limits)
        yield [[_sizes(data, [handles[row] for row in group]) for group in share] for share in plan]


def _sizes(data: DataSet, handles: Sequence[Handle]) -> BatchSizes:
    samples = [data.indexes[source][place] for source, place in handles]
    grids = [grid for sample in samples for grid in (*sample.image_grids, *sample.video_grids)]
    return BatchSizes(
        rows=len(samples),
        tokens=max(len(sample.ids_S) for sample in samples),
        supervised=sum(sample.num_supervised for sample in samples),
        patches=sum(sample.num_patches for sample in samples),
        largest_image=max((t * h * w for t, h, w in grids), default=0),
    )


def batch_table(steps: Sequence[Sequence[Sequence[BatchSizes]]]) -> Table:
    """Return a table of the micro-batches of the first steps: rows x tokens, patches."""
    table = plain_table()
    table.add_column("step")
    table.add_column("replica")
    table.add_column("micro-batches", overflow="fold")
    for number, shares in enumerate(steps):
        for replica, share in enumerate(shares):
            shapes = [f"{b.rows}x{b.tokens} ({b.patches:,})" for b in share]
            table.add_row(str(number + 1), str(replica), "  ".join(shapes) or "none")
    return table


def memory_table(memory: Sequence[StageMemory]) -> Table:
    """Return a table with one line per stage."""
    table = plain_table()
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    for column in ("stage", *columns):
        table.add_column(column, justify="right")
    for stage, parts in enumerate(memory):
        table.add_row(str(stage), *(size_text(getattr(parts, column)) for column in columns))
    return table


def warning(memory: Sequence[StageMemory], platform: Platform) -> str:
    """Return the changes to try if the estimate does not fit; empty if it fits."""
    need = max(parts.total for parts in memory)
    if need <= USABLE * platform.memory_total():
        return ""
    worst = next(stage for stage, parts in enumerate(memory) if parts.total == need)
    remedies = ["model.recompute=full", "a lower train.micro_batch_tokens", "more parallel.tp"]
    if worst == 0:
        remedies[:0] = [
            "model.recompute_vision=true",
            "fewer decoder layers on stage 0 (parallel.layers_per_stage=auto)",
        ]
    return (
        f"Stage {worst} needs about {size_text(need)} a rank, and there are "
        f"{size_text(platform.memory_total())}: it will most likely run out of memory. "
        f"Try {', '.join(remedies)}."
    )


def size_text(size: int) -> str:
    """Format bytes in a readable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"
