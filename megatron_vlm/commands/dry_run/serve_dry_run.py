"""`megatron-vlm serve --dry-run`: the address, the keys, the engine and the memory of a service."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_vlm.commands.dry_run.command import PlannedModel, plan_model
from megatron_vlm.commands.dry_run.rl_dry_run import describe_sampler
from megatron_vlm.config.command_checks import loaded_counts
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.io.printable import escape_controls, size_text
from megatron_vlm.planner.memory import StageMemory, estimate
from megatron_vlm.report.run_overview import aligned_lines
from megatron_vlm.serve.http.api_keys import ApiKeys
from megatron_vlm.serve.http.http_server import check_host, check_port
from megatron_vlm.serve.startup import limits_of


def serve_dry_run(cfg: Config, gpus: int | None = None, memory: str | None = None) -> int:
    """Print what `serve` would do; raise the errors that would end it at its start."""
    console = Console(highlight=False)
    serve = cfg.serve
    limits, loaded = limits_of(serve.limits), loaded_counts(serve)
    names = None if serve.keys is None else sorted(ApiKeys(Path(serve.keys)).names())
    check_host(serve.host, has_keys=names is not None)
    check_port(serve.host, serve.port)
    sampler = describe_sampler(cfg)
    model = plan_model(cfg, console, gpus, memory)
    dims, target = model.dims, model.target
    of = f", of {target.available}" if target.available else ""
    rows = {
        "model": f"{serve.name or cfg.model.path}, {target.words(cfg)}",
        "address": f"{serve.host}, {f'port {serve.port}' if serve.port else 'a free port'}",
        "API keys": _keys(names),
        "layout": f"tp={dims.tp} pp={dims.pp} dp={dims.dp} in {dims.world_size:,} "
        f"process{'es' * (dims.world_size > 1)}",
        "sampler": sampler,
        "models": f"{loaded['adapters']} with adapters of at most rank {serve.max_rank}, and "
        f"{loaded['full_models']} trained as a whole, in memory; at most {limits.models:,} in all",
        "memory": f"{_memory(model)} on the fullest rank{of}, without activations",
        "writes": f"{Path(cfg.run)}: calls, results and checkpoints",
    }
    console.print(escape_controls(aligned_lines(rows)), markup=False, soft_wrap=True)
    return 0


def _keys(names: list[str] | None) -> str:
    if names is None:
        return "none: only clients on this machine"
    return ", ".join(names) or "the file has none yet, so no client is let in"


def _memory(model: PlannedModel) -> str:
    """Describe the memory of the base model, of an adapter, and of a model trained as a whole."""
    frozen = replace(model.cfg.model, freeze_vision=True, freeze_merger=True, freeze_language=True)
    nothing = replace(model.cfg, model=frozen)
    base = max(stage.weights for stage in _fixed(model, nothing))
    whole = max(stage.fixed for stage in _fixed(model, model.cfg))
    serve = model.cfg.serve
    adapters = replace(model.cfg, lora=LoraConfig(serve.max_rank, serve.lora_alpha))
    adapter = max(stage.fixed for stage in _fixed(model, adapters)) - base
    return (
        f"{size_text(base)} for the base model, up to {size_text(adapter)} for each model with "
        f"adapters and {size_text(whole)} for each one trained as a whole"
    )


def _fixed(model: PlannedModel, cfg: Config) -> list[StageMemory]:
    return estimate(replace(model.layout, cfg=cfg), [])
