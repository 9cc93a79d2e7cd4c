"""Start of a run: the layout that parallel=auto and parallel.layers_per_stage=auto mean, and the
overview that rank 0 prints before the first step."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import extra_head
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import broadcast_json
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.printable import size_text
from megatron_vlm.planner.auto_layout import needs_planning, plan_layout, with_layout_of
from megatron_vlm.planner.first_batches import plan_run
from megatron_vlm.planner.row_sizes import mix_of
from megatron_vlm.report.run_overview import RunFacts, StageReport, run_overview
from megatron_vlm.run.evaluation.held_out_sets import EvalSet
from megatron_vlm.run.saved_config import saved_config
from megatron_vlm.training.data_feed import Feeder
from megatron_vlm.training.lr_schedule import describe_run_length
from megatron_vlm.training.rank_model import PATIENCE
from megatron_vlm.training.worker import MegatronWorker

_PLANNED = ("parallel", "model", "train")  # groups that have keys which the planner chooses


def resolve_layout(cfg: Config, watchdog: Watchdog) -> tuple[Config, str]:
    """Return the configuration with the layout, equal on all ranks, and on rank 0 a sentence about
    it. If it must be decided, this is a collective."""
    if not needs_planning(cfg):
        return cfg, ""
    platform, remark = pick_platform(cfg.platform), ""
    watchdog.begin_phase(0, "planning the layout", files=True)
    join_world(platform, PATIENCE * cfg.launch.timeout_minutes)
    planned = cfg
    with fail_together(DataError):
        if dist.get_rank() == 0:
            planned, remark = _decide(cfg, platform)
    values: Any = {name: asdict(getattr(planned, name)) for name in _PLANNED}
    values = broadcast_json(values, 0)
    values["parallel"]["auto"] = tuple(values["parallel"]["auto"])
    cfg = replace(cfg, **{name: replace(getattr(cfg, name), **values[name]) for name in _PLANNED})
    return cfg, remark


def _decide(cfg: Config, platform: Platform) -> tuple[Config, str]:
    """Return the layout with which the run began, if it resumes, or else the best one."""
    sizes = read_sizes(cfg.model.path, cfg.data.add_tokens, extra_head(cfg))
    world = dist.get_world_size()
    before = _resumed_config(cfg) if cfg.parallel.auto else None
    if before and (kept := with_layout_of(cfg, before, world, sizes.text.num_layers)):
        degrees = f"TP {kept.parallel.tp}, PP {kept.parallel.pp}, EP {kept.parallel.ep}"
        return kept, f"parallel=auto keeps the layout of the checkpoint: {degrees}"
    return plan_layout(cfg, sizes, world, platform, mix_of(cfg, sizes))


def _resumed_config(cfg: Config) -> Config | None:
    """Return the configuration of the checkpoint from which this run will probably resume."""
    resume = cfg.checkpoint.resume
    if resume == "never":
        return None
    own = sorted((Path(cfg.run) / "checkpoints").glob("step-*[0-9]"))
    folders = own if resume == "auto" else [Path(resume)]
    return saved_config(folders[-1]) if folders else None


def describe_start(
    worker: MegatronWorker,
    feeder: Feeder,
    held_out: Sequence[EvalSet],
    stages: Sequence[StageReport],
    length: str,
    prompts_only: bool,
) -> str:
    """Return the overview of a run on rank 0. `length`: its samples and steps, as a sentence."""
    data = feeder.data
    assert data is not None, "rank 0 loads data"
    plan = plan_run(worker.layout, data, prompts_only)
    sets, platform = [(each.name, each.samples) for each in held_out], worker.platform
    owner = "a GPU" if platform.is_cuda else "this machine"
    memory = f"{size_text(platform.memory_total())} in {owner}"
    facts = RunFacts(plan, length, data, feeder.remarks, sets, stages, memory, prompts_only)
    return run_overview(facts)


def length_of(cfg: Config, samples: int | None, total: int, done: int) -> str:
    """Describe the length of a run. Raise a ConfigError if a new one would end in its warm-up."""
    if not done:
        return describe_run_length(cfg, samples, total)
    return f"{done:,} of {total:,} steps are done already"
