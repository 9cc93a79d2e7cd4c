"""Model of one rank: its configuration with a layout, its checkpoint, its chunks and parameters."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.agreement import check_same, compared_keys, fail_together, job_store
from megatron_vlm.distributed.device import Platform, host_memory_total
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.process import is_under_launcher, print_to_user, rank_of_process
from megatron_vlm.distributed.rendezvous import join_world, meeting_place
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.cpu_matmul import enable_onednn
from megatron_vlm.family.spec import TensorSpec
from megatron_vlm.hf import load_weights
from megatron_vlm.hf.checkpoint_files import digests
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import Entry, name_table
from megatron_vlm.lora import targets
from megatron_vlm.lora.layers import attach, fill_adapters, initial_values
from megatron_vlm.lora.targets import adapted_weights
from megatron_vlm.model.build import build_chunks, compute_dtype
from megatron_vlm.model.constraints import check_backend, check_config
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.planner.auto_layout import settle_layers
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import check_offload

# Collectives time out only after this many times launch.timeout_minutes: the watchdog reports
# first, and knows which rank is stuck.
PATIENCE = 2


@dataclass(frozen=True, eq=False)
class RankModel:
    """A loaded model."""

    cfg: Config
    source: HFCheckpoint
    dims: ParallelDims
    adapted: list[TensorSpec]  # weights that have adapters
    table: list[Entry]
    grid: RankGroups
    owns_groups: bool  # the groups of this process were made for it
    chunks: list[StageModel]
    held: Mapping[Entry, nn.Parameter]


def load_model(
    cfg: Config, training: bool, platform: Platform, watchdog: Watchdog, base: RankModel | None
) -> RankModel:
    """Join the other ranks, build the model and load its weights. With `base`, a model of the same
    checkpoint and layout, frozen weights are shared with it. A collective."""
    opened = cfg.model.path, cfg.data.add_tokens, cfg.model.mtp
    source = base.source if base else HFCheckpoint(*opened)
    remark = platform.remark(cfg.platform, source.sizes.num_values)
    if remark is not None and base is None and rank_of_process() == 0:
        print_to_user(remark)
    world = int(os.environ["WORLD_SIZE"]) if is_under_launcher() else 1
    # Everything that can be refused is refused here, before a process group or any weight exists.
    cfg, dims = _settle(cfg, source, world, platform, training)
    adapted = adapted_weights(cfg, source.sizes)
    table = name_table(source.sizes, cfg.model.backend, dims)
    targets.check_blocks(cfg.lora, table, dims.tp)
    source.read_headers()
    targets.check_base_type(cfg, source)
    load_weights.check_tensors(source)
    load_weights.check_tied(source)
    own_digests = digests(source) if world > 1 and base is None else {}
    patience = PATIENCE * cfg.launch.timeout_minutes
    watchdog.begin_phase(0, f"meeting the other ranks{meeting_place()}")
    owns_groups = join_world(platform, patience)
    watchdog.join(job_store(), world)
    if world > 1:
        check_same(compared_keys(cfg), own_digests)
    grid = RankGroups.create(dims, cfg.train.seed, patience)
    watchdog.begin_phase(0, "building the model")
    chunks, table = _build(cfg, source, table, adapted, grid, platform, base)
    held = load_weights.held_params(chunks, table, grid.pp.rank)
    watchdog.begin_phase(0, "loading the weights", files=True)
    with fail_together(CheckpointError):
        own_params = held if base is None else load_weights.own_parameters(held, cfg)
        load_weights.load_hf(own_params, source, grid, watchdog.busy)
        if adapted:
            fill_adapters(held, grid, initial_values(cfg, adapted, source))
    for entry, param in held.items():
        param.requires_grad_(not entry.is_frozen(cfg))
    return RankModel(cfg, source, dims, adapted, table, grid, owns_groups, chunks, held)


def _settle(
    cfg: Config, source: HFCheckpoint, world: int, platform: Platform, training: bool
) -> tuple[Config, ParallelDims]:
    """Return the configuration with its layout, which is checked."""
    sizes = source.sizes
    cfg = settle_layers(cfg, sizes, world, platform)
    dims = ParallelDims.create(cfg.parallel, world, sizes.text.num_layers)
    check_config(cfg, sizes, dims)
    check_backend(cfg, platform.is_cuda)
    if training:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        layout = ModelLayout(cfg, sizes, dims, compute_dtype(cfg, platform).itemsize)
        check_offload(layout, local, host_memory_total())
    return cfg, dims


def _build(
    cfg: Config,
    source: HFCheckpoint,
    table: list[Entry],
    adapted: list[TensorSpec],
    grid: RankGroups,
    platform: Platform,
    base: RankModel | None,
) -> tuple[list[StageModel], list[Entry]]:
    """Return this stage's chunks with their adapters, and the table of all parameters."""
    family, sizes, stage = source.family, source.sizes, grid.pp.rank
    if not platform.is_cuda:
        enable_onednn(sizes.text.hidden, sizes.text.experts is not None)
    in_blocks = {
        (entry.chunk, entry.our_name)
        for entry in targets.entries_in_blocks(cfg.lora, table, source)
        if entry.stage == stage
    }
    linears = targets.adapted_linears(table, adapted)
    base_chunks = None if base is None else base.chunks
    chunks: list[StageModel] = build_chunks(
        cfg, family, source.config, sizes, grid, platform, in_blocks, base_chunks
    )
    local_linears = [linear for linear in linears if linear.stage == stage]
    attach(chunks, local_linears, cfg.lora, grid.tp.group)
    return chunks, [*table, *targets.adapter_entries(linears, cfg.lora.rank)]
