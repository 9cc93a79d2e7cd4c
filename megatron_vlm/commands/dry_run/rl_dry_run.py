"""`megatron-vlm rl --dry-run` and `serve --dry-run`: the plan of a run, its engine, and the rewards
of a few answers; the address, the keys, the engine and the memory of a service."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_vlm.commands.dry_run.command import (
    PlannedModel,
    open_training_data,
    plan_model,
    print_memory,
    print_run,
)
from megatron_vlm.config import teachers
from megatron_vlm.config.command_checks import loaded_counts
from megatron_vlm.config.evaluation_checks import reward_model_of
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.order import Position
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.engines.engine_kinds import describe_engine, engine_kind
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.hub_upload import check_push
from megatron_vlm.hf.weight_map import name_table
from megatron_vlm.io.printable import escape_controls, short_name, show_count, size_text
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.model.constraints import check_config
from megatron_vlm.planner.memory import StageMemory, estimate
from megatron_vlm.report.run_overview import aligned_lines
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.rl.teacher_engines import check_teachers
from megatron_vlm.rl.turn_tokens import TurnEncoder
from megatron_vlm.serve.http.api_keys import ApiKeys
from megatron_vlm.serve.http.http_server import check_host, check_port
from megatron_vlm.serve.startup import limits_of
from megatron_vlm.training.frozen_models import teacher_config
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

_RECORDS = 3
_LONGEST = 40  # characters of an answer


def rl_dry_run(cfg: Config, gpus: int | None = None, memory: str | None = None) -> int:
    """Print the plan of `rl`; raise the errors that would end the run."""
    console = Console(highlight=False)
    if cfg.checkpoint.push is not None:
        check_push(cfg.checkpoint.push)
    sampler = describe_sampler(cfg)
    model = plan_model(cfg, console, gpus, memory)
    data = open_training_data(model, prompts_only=True)
    assert isinstance(data, DataSet), "config/command_checks.py refuses streams"
    plan = print_run(model, data, console, prompts_only=True)
    rl, train = cfg.rl, cfg.train
    rows = {
        "samples": f"{rl.samples} answers of at most {rl.max_new_tokens:,} tokens to each of "
        f"{train.global_batch_size:,} prompts a step, in {rl.updates} "
        f"update{'s' * (rl.updates > 1)}",
        "sampler": sampler,
        **describe_teachers(model),
    }
    if cfg.teacher.view is not None:
        rows["view"] = try_view(cfg, data)
    if rl.agent is not None:
        rows["agent"] = rl.agent
    is_called = rl.reward is not None or rl.environment is not None
    if reward_model_of(rl) is not None:
        is_called = False
        rows["reward"] = f"{rl.reward}, on all ranks, with weights of its own"
    elif is_called:
        count = f"{rl.processes} process{'es' * (rl.processes > 1)}"
        rows["reward"] = f"{rl.reward or rl.environment}, in {count}"
    console.print(aligned_lines(rows), markup=False, soft_wrap=True)
    if is_called and (tried := list(try_reward(cfg, data))):
        console.print(reward_table(tried))
    print_memory(plan, model.target, console)
    notes = ["Answers are counted with rl.max_new_tokens each; what sampling needs comes on top."]
    if teachers.needs_initial_model(cfg):
        notes.append("The initial model needs the weights of each stage again.")
    console.print(" ".join(notes), soft_wrap=True)
    return 0


def describe_sampler(cfg: Config) -> str:
    """Describe what draws the answers. Raise ConfigError for an engine that is missing."""
    engine = cfg.engine
    if engine_kind(engine.name).on_ranks:
        return f"the trainer's own decoder, {engine.rows} rows a pass in each replica"
    places = f", on GPUs {' and '.join(engine.devices)}" if engine.devices else ""
    return describe_engine(engine) + places


@dataclass(frozen=True)
class TriedAnswer:
    """An answer, and what the reward or the environment said about it."""

    where: str
    answer: str
    response: EnvStep


def try_reward(cfg: Config, data: DataSet) -> Iterator[TriedAnswer]:
    """Yield the rewards of answers to the first prompts: the right answer of a record, if it has
    one, and an empty answer, which a model may give. An error of the reward is raised."""
    with closing(RewardPool(RewardSettings.from_config(cfg.rl, 1))) as pool:
        number, records = 0, 0 if cfg.rl.has_harness else _RECORDS
        for handle, _, _ in islice(data.epoch(Position()), records):
            where, record = data.where(handle), data.raw(handle)
            own = right_answer(record, where, data.readers[handle[0]])
            for answer in [own, ""] if own else [""]:
                pool.begin(number, record, where).result()
                yield TriedAnswer(where, answer, pool.step(number, answer).result())
                pool.end(number)
                number += 1


def reward_table(tried: list[TriedAnswer]) -> Table:
    """Return a table with a line for each answer."""
    table = plain_table("record", "answer", "reward", "figures", first=4)
    for each in tried:
        figures = "  ".join(f"{name} {value:g}" for name, value in each.response.figures.items())
        text = each.answer[:_LONGEST] + "..." * (len(each.answer) > _LONGEST)
        cells = (each.where, repr(text), f"{each.response.reward:g}", figures)
        table.add_row(*map(escape_controls, cells))
    return table


def describe_teachers(model: PlannedModel) -> dict[str, str]:
    """Return lines about the teachers. Raise the errors that would end the run."""
    cfg, teacher = model.cfg, model.cfg.teacher
    if teacher.path is None:
        return {}
    check_teachers(cfg)
    names = [
        path if name == teachers.ALL_SOURCES else f"{path} for {name}"
        for name, path in teachers.teachers_of(cfg).items()
    ]
    targets = "the sampled token"
    if teacher.top_k:
        targets = f"its {teacher.top_k} most likely tokens and the rest"
    divergence = {"jsd": "JSD"}.get(kind := cfg.distill.divergence or "reverse", f"{kind} KL")
    lines = {"teacher": f"{', '.join(names)}; {divergence} of {targets}, times {teacher.coef:g}"}
    if teachers.SELF in names:
        lines["teacher"] = f"{teacher.weights} weights of {lines['teacher']}"
    if not engine_kind(teacher.engine).on_ranks:
        count = max(len(teacher.devices), len(set(teachers.teachers_of(cfg).values())))
        scorer = describe_engine(replace(cfg.engine, name=teacher.engine))
        return lines | {"scores": f"{scorer}, {show_count(count, 'engine')}"}
    distinct = dict.fromkeys(teachers.teacher_checkpoints(cfg).values())
    text = "; ".join(_memory_of(model, path) for path in distinct) or "nothing"
    return lines | {"scores": f"on the ranks, which need in addition: {text}"}


def try_view(cfg: Config, data: DataSet) -> str:
    """Return the tokens of the first prompts and of their views. An error of a view is raised."""
    found = []
    with closing(RewardPool(RewardSettings.of_view(cfg, 1))) as pool:
        for handle, _, _ in islice(data.epoch(Position()), _RECORDS):
            where, record, text = data.where(handle), data.raw(handle), "no view"
            if (view := pool.view(record, where).result()) is not None:
                row = TurnEncoder(data.readers[handle[0]]).view(view, where, record)
                text = f"{len(row.ids_S):,}"
            found.append(f"{text} for {len(data.row(handle).ids_S):,}")
    return f"{cfg.teacher.view}; tokens of the first prompts: {', '.join(found)}"


def _memory_of(model: PlannedModel, path: str) -> str:
    """Return the bytes of a teacher's weights on the rank that has most of them."""
    try:
        cfg, sizes = teacher_config(model.cfg, path), read_sizes(path)
        dims = ParallelDims.create(cfg.parallel, model.dims.world_size, sizes.text.num_layers)
        check_config(cfg, sizes, dims)
    except ConfigError as error:
        raise error.within(f"teacher.path={path}") from error
    values = [0] * dims.pp
    for entry in name_table(sizes, cfg.model.backend, dims):
        values[entry.stage] += entry.values_per_rank(dims)
    size = max(values) * compute_dtype(cfg, model.target.platform).itemsize
    return f"{size_text(size)} for {short_name(sizes.num_values)} parameters of {path}"


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
    clients = ", ".join(names or ()) or "the file has none yet, so no client is let in"
    rows = {
        "model": f"{serve.name or cfg.model.path}, {target.words(cfg)}",
        "address": f"{serve.host}, {f'port {serve.port}' if serve.port else 'a free port'}",
        "API keys": "none: only clients on this machine" if names is None else clients,
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
