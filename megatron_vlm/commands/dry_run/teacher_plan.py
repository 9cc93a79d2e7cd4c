"""The teachers of `megatron-vlm rl --dry-run`: what runs them, and their memory on the ranks."""

from collections.abc import Iterator

from megatron_vlm.commands.dry_run.command import PlannedModel
from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import ALL_SOURCES, teachers_of
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.engines.find_vllm import find_vllm
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.weight_map import name_table
from megatron_vlm.io.numbers_as_text import short_name
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.model.constraints import check_config
from megatron_vlm.report.layout_table import size_text
from megatron_vlm.rl.frozen_models import teacher_config
from megatron_vlm.rl.teacher_checks import check_teachers


def describe_teachers(model: PlannedModel) -> dict[str, str]:
    """Return lines about the teachers. Raise the errors that would end the run."""
    cfg, rl = model.cfg, model.cfg.rl
    if rl.teacher is None:
        return {}
    check_teachers(cfg)
    names = [
        path if name == ALL_SOURCES else f"{path} for {name}"
        for name, path in teachers_of(rl.teacher).items()
    ]
    targets = "the sampled token"
    if rl.teacher_top_k:
        targets = f"its {rl.teacher_top_k} most likely tokens and the rest"
    lines = {"teacher": f"{', '.join(names)}; reverse KL of {targets}, times {rl.teacher_coef:g}"}
    if rl.teacher_scorer == "vllm":
        count = max(len(rl.teacher_gpus), len(set(teachers_of(rl.teacher).values())))
        version = find_vllm(str(rl.engine), "rl.engine")
        return lines | {"scores": f"vLLM {version} of {rl.engine}, {_engines(count)}"}
    text = "; ".join(_memory_of(model, path) for path in distinct_teachers(cfg))
    return lines | {"scores": f"on the ranks, which need in addition: {text}"}


def distinct_teachers(cfg: Config) -> Iterator[str]:
    """Yield each teacher once."""
    yield from dict.fromkeys(teachers_of(cfg.rl.teacher).values())


def _engines(count: int) -> str:
    return "1 engine" if count == 1 else f"{count} engines"


def _memory_of(model: PlannedModel, path: str) -> str:
    """Return the bytes of a teacher's weights on the rank that has most of them."""
    try:
        cfg, sizes = teacher_config(model.cfg, path), read_sizes(path)
        dims = ParallelDims.create(cfg.parallel, model.dims.world_size, sizes.text.num_layers)
        check_config(cfg, sizes, dims)
    except ConfigError as error:
        raise error.within(f"rl.teacher={path}") from error
    values = [0] * dims.pp
    for entry in name_table(sizes, cfg.model.backend, dims):
        values[entry.stage] += entry.values_per_rank(dims)
    size = max(values) * compute_dtype(cfg, model.target.platform).itemsize
    return f"{size_text(size)} for {short_name(sizes.num_values)} parameters of {path}"
