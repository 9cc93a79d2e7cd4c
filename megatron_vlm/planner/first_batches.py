"""Micro-batches of a run's first steps, planned from the index of its data as the loader does."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits, plan_batch
from megatron_vlm.data.batches.dataset import DataSet, Handle
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.batches.stream_set import StreamSet
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.row_sizes import (
    BatchSizes,
    Step,
    assumed_mix,
    heaviest_micro_batches,
    sizes_of_sample,
)
from megatron_vlm.planner.search import RunPlan

_MAX_STEPS = 50
_MAX_ROWS = 2000  # rows of the steps that are planned, so that a run starts without delay


def plan_steps(data: DataSet | StreamSet, cfg: Config, dims: ParallelDims) -> Iterator[Step]:
    """Yield the micro-batches of each replica by step for the first epoch; nothing for a stream."""
    if not isinstance(data, DataSet):
        return
    limits = Limits.from_config(cfg.train)
    epoch = data.epoch(Position())
    while part := list(islice(epoch, cfg.train.global_batch_size)):
        rows = [_row_sizes(data, handle) for handle, _, _ in part]
        plan = plan_batch([size for _, size, _ in part], dims.dp, limits)
        yield [
            [BatchSizes.from_rows([row for n in group for row in rows[n]]) for group in share]
            for share in plan
        ]


def plan_updates(data: DataSet, cfg: Config, dims: ParallelDims) -> Iterator[Step]:
    """Yield the micro-batches of each optimizer step of rl through the first epoch of prompts.
    Every answer is assumed to have rl.max_new_tokens. Rows share no pictures here, because memory
    has to suffice for answers of uneven length, too, which are not kept together."""
    limits, answer = Limits.from_config(cfg.train), cfg.rl.max_new_tokens
    epoch = data.epoch(Position())
    prompts = -(-cfg.train.global_batch_size // cfg.rl.updates)
    while part := list(islice(epoch, prompts)):
        rows = [
            replace(row, tokens=row.tokens + answer, supervised=answer)
            for row in itertools.chain(*(_row_sizes(data, handle) for handle, _, _ in part))
            for _ in range(cfg.rl.samples)
        ]
        sizes = ((row.tokens, row.supervised, row.patches, row.patch_pairs) for row in rows)
        plan = plan_batch([data.work.row_size(*each) for each in sizes], dims.dp, limits)
        yield [[BatchSizes.from_rows([rows[n] for n in group]) for group in g] for g in plan]


def plan_run(layout: ModelLayout, data: DataSet | StreamSet, prompts_only: bool = False) -> RunPlan:
    """Return the plan of a run, estimated from its first steps, or for a stream from assumed rows.
    With `prompts_only` the samples are prompts, whose answers are trained."""
    cfg, dims = layout.cfg, layout.dims
    count = min(_MAX_STEPS, max(1, _MAX_ROWS // cfg.train.global_batch_size))
    if prompts_only and isinstance(data, DataSet):
        steps = list(islice(plan_updates(data, cfg, dims), max(1, count // cfg.rl.samples)))
    else:
        steps = list(islice(plan_steps(data, cfg, dims), count))
    mix = assumed_mix(layout.sizes, cfg.data.max_tokens)
    steps = steps or mix.steps(cfg.train, layout.sizes, dims.dp)
    return RunPlan.of(layout, heaviest_micro_batches(steps))


def _row_sizes(data: DataSet, handle: Handle) -> list[BatchSizes]:
    return [sizes_of_sample(sample) for sample in data.example(handle)]
