"""Tables of a dry run: the first batches and the memory of each stage; and whether it fits."""

from collections.abc import Sequence

from rich.table import Table

from megatron_vlm.commands.dry_run.target_machine import TargetMachine
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.planner.memory import USABLE, StageMemory
from megatron_vlm.planner.memory_switches import allows_switch
from megatron_vlm.planner.row_sizes import Step
from megatron_vlm.report.layout_table import size_text
from megatron_vlm.report.terminal import plain_table


def batch_table(steps: Sequence[Step]) -> Table:
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
    columns = ["weights", "gradients", "optimizer", "activations", "working", "total"]
    if any(parts.host for parts in memory):  # in the memory of the host
        columns.append("host")
    for column in ("stage", *columns):
        table.add_column(column, justify="right")
    for stage, parts in enumerate(memory):
        table.add_row(str(stage), *(size_text(getattr(parts, column)) for column in columns))
    return table


def fit_verdict(
    cfg: Config, dims: ParallelDims, memory: Sequence[StageMemory], target: TargetMachine
) -> str:
    """Return whether the estimate fits, and if not, the changes to try that the configuration does
    not have yet."""
    need = max(parts.total for parts in memory)
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
    changes = ", ".join(_remedies(cfg, dims, worst)) or "more or larger GPUs"
    advice = (
        f"it will most likely run out of memory. Try {changes}. megatron-vlm plan ranks the "
        "layouts that fit."
    )
    return f"{needs}: {advice}"


def _remedies(cfg: Config, dims: ParallelDims, worst: int) -> list[str]:
    """Return the changes that save memory on this stage, without those that are made already."""
    model, changes = cfg.model, []
    if worst == 0 and not (model.recompute_vision or model.freeze_vision):
        changes.append("model.recompute_vision=true")
    if worst == 0 and dims.pp > 1 and cfg.parallel.layers_per_stage is None:
        changes.append("fewer decoder layers on stage 0 (parallel.layers_per_stage=auto)")
    if model.recompute != "full":
        changes.append("model.recompute=full")
    elif not model.offload_activations:
        changes.append("model.offload_activations=1")
    if cfg.train.micro_batch_tokens is not None:
        changes.append(f"train.micro_batch_tokens below {cfg.train.micro_batch_tokens:,}")
    elif cfg.train.micro_batch_size > 1:
        changes.append(f"train.micro_batch_size below {cfg.train.micro_batch_size}")
    if dims.dp > 1:
        changes.append("more parallel.tp or parallel.pp in place of replicas")
    return [*changes, *_smaller_states(cfg)]


def _smaller_states(cfg: Config) -> list[str]:
    """Return the changes that need less memory for weights and their optimizer."""
    if cfg.lora.rank:
        return [] if cfg.lora.base else ["frozen weights in 4 bits (lora.base=nf4)"]
    adapters = "adapters alone (lora=default)"
    if cfg.optim.offload or not allows_switch(cfg, "optim.offload"):
        return [adapters]
    return ["optim.offload=1", adapters]
