"""`megatron-vlm train --dry-run` and `eval --dry-run`: a run's plan, before any weight is read.
One process plans for all ranks: the layout, the data, the memory of each stage, the first batches.
It plans for this machine, or for GPUs that this one does not have."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megatron_vlm.checkpoint.manifest import read_manifest
from megatron_vlm.checkpoint.run_checkpoints import complete_checkpoints
from megatron_vlm.checkpoint.state_json import check_state, read_state
from megatron_vlm.commands.plan.plan_arguments import parse_memory
from megatron_vlm.config.checks import processes_for
from megatron_vlm.config.command_checks import needs_held_out_rewards
from megatron_vlm.config.data_sources import HELD_OUT
from megatron_vlm.config.evaluation_checks import answer_metrics, loss_scores, metric_name
from megatron_vlm.config.objectives import records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, StreamSet, open_data, with_scores
from megatron_vlm.distributed.device import Platform, count_gpus, host_memory_total, pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.hub_upload import check_push
from megatron_vlm.hf.load_weights import check_tensors
from megatron_vlm.hf.weight_map import Entry, name_table
from megatron_vlm.io.hub import hub_name
from megatron_vlm.io.printable import escape_controls, size_text
from megatron_vlm.lora import targets
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.model.constraints import check_backend, check_config
from megatron_vlm.planner.auto_layout import (
    machine_of_gpu,
    needs_planning,
    plan_layout,
    plan_run,
    plan_steps,
)
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import USABLE, check_offload
from megatron_vlm.planner.parameters import count
from megatron_vlm.planner.row_sizes import Step, mix_of
from megatron_vlm.planner.search import Cluster, RunPlan
from megatron_vlm.report.run_overview import (
    RunFacts,
    aligned_lines,
    epoch_tokens,
    layout_table,
    run_overview,
    stage_reports,
)
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.run.checkpointing import changed_rows, check_unused
from megatron_vlm.run.evaluation.evaluate import read_candidates
from megatron_vlm.run.evaluation.held_out_sets import describe_split, first_samples
from megatron_vlm.run.progress import Progress
from megatron_vlm.run.run import length_of
from megatron_vlm.run.run_folder import with_model
from megatron_vlm.run.trackers import wandb_mode
from megatron_vlm.training.data_fingerprint import fingerprint
from megatron_vlm.training.lr_schedule import total_steps

MAX_GPUS = 4096
COMMON_MEMORY = 80.0 * 2**30  # bytes
_GPU = Platform("cuda", torch.device("cuda", 0), "nccl", torch.bfloat16)


@dataclass(frozen=True)
class TargetMachine:
    """The device of each process, and the number of processes."""

    platform: Platform
    gpus: int  # 0 on the CPU, and where their number is open
    memory: float | None  # bytes of a GPU, or of this machine on the CPU; None: not known

    @property
    def is_here(self) -> bool:
        """True if the run is planned for this machine."""
        return self.platform is not _GPU

    @property
    def available(self) -> str:
        """The memory in words; empty if it is not known."""
        if self.memory is None:
            return ""
        return f"{size_text(self.memory)} in {'a GPU' if self.platform.is_cuda else 'this machine'}"

    def words(self, cfg: Config) -> str:
        """Return the kind of device and the type of weights in words."""
        return f"{self.platform.name}, {compute_dtype(cfg, self.platform)}"

    def cluster(self, world: int) -> Cluster | None:
        """Return the GPUs that this machine does not have, or None if it is this machine. Memory
        that is not known is that of a common GPU."""
        if self.is_here:
            return None
        return Cluster(world, self.memory or COMMON_MEMORY, machine_of_gpu())

    def world(self, cfg: Config) -> int:
        """Return the number of processes of the job."""
        return int(os.environ.get("WORLD_SIZE", "0")) or processes_for(cfg, self.gpus)


def target_machine(
    cfg: Config, parameters: int, gpus: int | None = None, memory: str | None = None
) -> TargetMachine:
    """Return the machine to plan for. Without --gpus and --memory it is this one, except for a
    model of real size where there is no GPU and nobody chose the CPU: its run is planned for GPUs
    of unknown memory."""
    if gpus is None and memory is None:
        here = pick_platform(cfg.platform)
        if here.is_cuda:
            return TargetMachine(here, count_gpus(), here.memory_total())
        if here.remark(cfg.platform, parameters) is not None:
            return TargetMachine(_GPU, 0, None)
        return TargetMachine(here, 0, here.memory_total())
    if cfg.platform == "cpu":
        key, found = ("--gpus", gpus) if gpus is not None else ("--memory", memory)
        raise ConfigError(
            "is about GPUs, and platform=cpu", key=key, found=found, remedy="change one of them"
        )
    if gpus is not None and not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(key="--gpus", found=gpus, allowed=range(1, MAX_GPUS + 1))
    if gpus is not None and cfg.launch.processes not in (None, gpus):
        raise ConfigError(
            f"is another number than launch.processes={cfg.launch.processes}: there is one "
            "process for each GPU",
            key="--gpus",
            found=gpus,
            remedy="leave one of them out",
        )
    return TargetMachine(_GPU, gpus or 0, None if memory is None else parse_memory(memory))


SHOWN_STEPS = 2
_MAX_CHANGES = 4  # switches that a verdict names


@dataclass(frozen=True)
class PlannedModel:
    """The model and the layout of a dry run, without weights."""

    cfg: Config  # with a commit of the Hub, and the layers of each stage
    source: HFCheckpoint
    target: TargetMachine
    dims: ParallelDims
    table: list[Entry]

    @property
    def layout(self) -> ModelLayout:
        """The layout for the planner."""
        platform, of = self.target.platform, (self.cfg, self.source.sizes, self.dims)
        return ModelLayout(*of, compute_dtype(self.cfg, platform).itemsize, platform.is_cuda)


def dry_run(cfg: Config, gpus: int | None = None, memory: str | None = None) -> int:
    """Print the plan of `train`; raise the errors that would end the run."""
    console = Console(highlight=False)
    if cfg.checkpoint.push is not None:
        check_push(cfg.checkpoint.push)
    model = plan_model(cfg, console, gpus, memory)
    data = open_training_data(model)
    plan = print_run(model, data, console)
    steps = list(islice(plan_steps(data, model.cfg, model.dims), SHOWN_STEPS))
    if steps:
        console.print("First batches: rows x tokens of each micro-batch (patches of its images)")
        console.print(batch_table(steps))
    print_memory(plan, model.target, console)
    return 0


def plan_model(cfg: Config, console: Console, gpus: int | None, memory: str | None) -> PlannedModel:
    """Check the model and the layout on the machine that is planned for."""
    cfg = with_model(cfg, weights=False)
    source = HFCheckpoint.of(cfg)
    target = target_machine(cfg, source.sizes.num_values, gpus, memory)
    world = target.world(cfg)
    if needs_planning(cfg):
        mix, cluster = mix_of(cfg, source.sizes), target.cluster(world)
        cfg, chosen = plan_layout(cfg, source.sizes, world, target.platform, mix, cluster)
        console.print(chosen, markup=False, soft_wrap=True)
    dims = ParallelDims.create(cfg.parallel, world, source.sizes.text.num_layers)
    check_config(cfg, source.sizes, dims)
    check_backend(cfg, target.platform.is_cuda)
    if target.is_here:
        layout = ModelLayout(cfg, source.sizes, dims, compute_dtype(cfg, target.platform).itemsize)
        check_offload(layout, world, host_memory_total())
    # A folder may have no weights yet, and a plan does not download them.
    if hub_name(cfg.model.path) is None and any(source.path.glob("*.safetensors")):
        source.read_headers()
        targets.check_base_type(cfg, source)
        check_tensors(source)
    table = name_table(source.sizes, cfg.model.backend, dims)
    targets.check_blocks(cfg.lora, table, dims.tp)
    linears = targets.adapted_linears(table, targets.adapted_weights(cfg, source.sizes))
    table += targets.adapter_entries(linears, cfg.lora.rank)
    return PlannedModel(cfg, source, target, dims, table)


def open_training_data(model: PlannedModel, prompts_only: bool = False) -> DataSet | StreamSet:
    """Open data.train. With `prompts_only` its records are prompts."""
    cfg, sizes = model.cfg, model.source.sizes
    specs, path = cfg.data.train, cfg.model.path
    kind = "prompt" if prompts_only else records_of(cfg)
    return with_scores(open_data(specs, "data.train", cfg.data, path, sizes, kind=kind), cfg)


def print_run(
    model: PlannedModel, data: DataSet | StreamSet, console: Console, prompts_only: bool = False
) -> RunPlan:
    """Print what a run prints at its start, and its remarks."""
    cfg, dims, target = model.cfg, model.dims, model.target
    stages = stage_reports(cfg, dims, model.table)
    remarks = Remarks.from_data(data, "data.train", cfg.data)
    sets = list(open_held_out(model, prompts_only and needs_held_out_rewards(cfg)))
    plan = plan_run(model.layout, data, prompts_only)
    done = _steps_done(cfg, data)
    total = total_steps(cfg.train, data.length, prompts_only)
    length = length_of(cfg, data.length, total, done)
    held_out = [(n, len(d.order)) for n, d, _ in sets]
    facts = RunFacts(plan, length, data, remarks, held_out, stages, target.available, prompts_only)
    console.print(layout_table(cfg, target.words(cfg), stages))
    text = run_overview(facts)
    rows = {"run": f"continues from step {done:,}" if done else "begins anew"}
    if "wandb" in cfg.log.trackers:
        rows["W&B"] = wandb_mode()
    lines = [text, aligned_lines(rows), *remarks.lines]
    for line in [*lines, *(line for *_, notes in sets for line in notes.lines)]:
        console.print(escape_controls(line), markup=False, soft_wrap=True)
    return plan


def print_memory(plan: RunPlan, target: TargetMachine, console: Console) -> None:
    """Print the memory of each stage, and whether it fits."""
    count = plan.dims.virtual_stages
    chunks = f" with its {count} chunks" if count > 1 else ""
    total = f" ({target.available})" if target.available else ""
    console.print(f"Memory of one rank of each stage{chunks}, estimated{total}")
    console.print(memory_table(plan))
    if text := fit_verdict(plan, target):
        console.print(text, soft_wrap=True)


def batch_table(steps: Sequence[Step]) -> Table:
    """Return a table of the micro-batches of the first steps: rows x tokens, patches."""
    table = plain_table("step", "replica", "micro-batches", first=3)
    for number, shares in enumerate(steps):
        for replica, share in enumerate(shares):
            shapes = [f"{b.rows}x{b.tokens} ({b.patches:,})" for b in share]
            table.add_row(str(number + 1), str(replica), "  ".join(shapes) or "none")
    return table


def memory_table(plan: RunPlan) -> Table:
    """Return a table with one line per stage."""
    columns = ["weights", "gradients", "optimizer", "activations", "working", "total"]
    columns += [c for c in ("nccl", "host") if any(getattr(parts, c) for parts in plan.memory)]
    table = plain_table("stage", *columns)
    for stage, parts in enumerate(plan.memory):
        table.add_row(str(stage), *(size_text(getattr(parts, column)) for column in columns))
    return table


def fit_verdict(plan: RunPlan, target: TargetMachine) -> str:
    """Return whether the estimate fits, and if not, the changes to try, with what each saves."""
    memory, dims, need = plan.memory, plan.dims, plan.need
    if target.memory is None:
        return (
            "There is no GPU here, so whether this fits is open: --memory 80GiB judges it for GPUs "
            "of that size, and --gpus 8 plans for that number of them."
        )
    worst = next(stage for stage, parts in enumerate(memory) if parts.total == need)
    total = size_text(target.memory)
    needs = f"Stage {worst} needs about {size_text(need)} a rank, and there are {total}"
    if not target.platform.is_cuda:  # all processes share the memory of the machine
        need = dims.world_size // dims.pp * sum(parts.total + parts.host for parts in memory)
        needs = f"{dims.world_size} processes need about {size_text(need)}, and there are {total}"
    if need <= USABLE * target.memory:
        return ""
    changes = [f"{keys} (saves {size_text(size)})" for keys, size in plan.switches(worst)]
    changes = changes[:_MAX_CHANGES]
    if worst == 0 and dims.pp > 1 and plan.cfg.parallel.layers_per_stage is None:
        changes.append("fewer decoder layers on stage 0 (parallel.layers_per_stage=auto)")
    if dims.dp > 1:
        changes.append("more parallel.tp or parallel.pp in place of replicas")
    return (
        f"{needs}: it will most likely run out of memory. Try "
        f"{', '.join(changes) or 'more or larger GPUs'}. megatron-vlm plan ranks the layouts that "
        "fit."
    )


def open_held_out(
    model: PlannedModel, prompts_only: bool = False
) -> Iterator[tuple[str, DataSet, Remarks]]:
    """Yield name, samples to score and remarks of each evaluation set, or of its prompts."""
    cfg, sizes, path = model.cfg, model.source.sizes, model.cfg.model.path
    kind = "prompt" if prompts_only else records_of(cfg)
    is_split = cfg.data.split is not None and not cfg.data.eval
    sets = [(each.name, (each.source,)) for each in cfg.data.eval]
    for name, specs in [(HELD_OUT, cfg.data.train)] if is_split else sets:
        key = "data.split" if is_split else "data.eval"
        data = open_data(
            *(specs, key, cfg.data, path, sizes), train=False, kind=kind, held_out=is_split
        )
        data = with_scores(data, cfg)
        assert isinstance(data, DataSet)
        if is_split:
            remarks = Remarks((describe_split(data, cfg),))
        else:
            remarks = Remarks.from_data(data, f"{key} {name}", cfg.data)
        yield name, first_samples(data, cfg.eval.samples), remarks


def _steps_done(cfg: Config, data: DataSet | StreamSet) -> int:
    """Return the step from which a run of this folder would go on; 0 for a new run. Refuse a
    checkpoint that the run would refuse."""
    resume = cfg.checkpoint.resume
    if resume == "never":
        check_unused(Path(cfg.run) / "checkpoints")
        return 0
    if resume != "auto":
        newest = Path(resume)
        read_manifest(newest)  # refuses what is no complete checkpoint
    elif complete := complete_checkpoints(Path(cfg.run) / "checkpoints"):
        newest = complete[0]
    else:
        return 0
    state = read_state(newest)
    check_state(cfg, newest, state, moments=True)
    progress = Progress.from_json(state["progress"].value)
    changed_rows(newest, progress, fingerprint(data, cfg))
    return progress.step


def eval_dry_run(
    cfg: Config,
    checkpoint: Path | None,
    predictions: str | None,
    gpus: int | None = None,
    memory: str | None = None,
) -> int:
    """Print what `eval` would do; raise the errors that would end it."""
    console = Console(highlight=False)
    model = plan_model(cfg, console, gpus, memory)
    dims, target = model.dims, model.target
    scores = loss_scores(cfg)
    if cfg.eval.candidates is not None:
        scores.append(f"ranking of {len(read_candidates(cfg.eval.candidates)):,} candidates")
    if metrics := answer_metrics(cfg):
        names = ", ".join(map(metric_name, metrics))
        scores.append(f"{names} of answers of at most {cfg.eval.max_new_tokens:,} tokens")
    if cfg.eval.blind:
        scores.append("all of them again with grey pictures")
    counts = [count(model.layout, stage) for stage in range(dims.pp)]
    weights = [each.weight_bytes(cfg.lora.base, model.layout.itemsize) for each in counts]
    of = f", of {target.available}" if target.available else ""
    rows = {
        "model": cfg.model.path if checkpoint is None else str(checkpoint),
        "device": target.words(cfg),
        "layout": f"tp={dims.tp} pp={dims.pp} dp={dims.dp} in {dims.world_size:,} "
        f"process{'es' * (dims.world_size > 1)}",
        "memory": f"weights of {size_text(max(weights))} on the fullest rank{of}",
        "scores": ", ".join(scores),
        "writes": "only the scores, to the screen" if predictions is None else predictions,
    }
    notes: list[str] = []
    for name, data, remarks in open_held_out(model):
        rows[name] = f"{len(data.order):,} samples: {epoch_tokens(data)}"
        notes += remarks.lines
    for line in [aligned_lines(rows), *notes]:
        console.print(escape_controls(line), markup=False, soft_wrap=True)
    if target.memory is not None and max(weights) > USABLE * target.memory:
        console.print("The weights alone do not fit: give more parallel.tp or parallel.pp.")
    return 0
