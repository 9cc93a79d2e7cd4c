"""The layouts that fit, and where none does, the changes to make, each with its numbers."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_vlm.config.schema import Config, get
from megatron_vlm.config.searched_keys import SEARCHED, searched_keys
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.memory_switches import allows_switch, shown, with_keys
from megatron_vlm.planner.row_sizes import RowSample
from megatron_vlm.planner.search import Candidate, Cluster, refine_split, search

_MAX_GPUS = 512
_POLISHED = 3  # the fastest layouts, whose layers are split again with more care


def rank_layouts(
    cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster
) -> list[Candidate]:
    """Return the layouts that fit, the fastest first. Raise ConfigError with a remedy if none
    does."""
    results = search(cfg, sizes, mix, cluster)
    if results.leanest is not None:
        problem, remedy = advice(cfg, sizes, mix, cluster, results.leanest)
        raise ConfigError(problem, key="model.path", found=cfg.model.path, remedy=remedy)
    if not results.fitting:
        given = [key for key in SEARCHED if key not in searched_keys(cfg)]
        raise ConfigError(
            f"allows no layout of {cluster.gpus} devices: TP x PP has to divide that number, and "
            "each replica needs a row of a step"
            + (f" (fixed: {', '.join(f'{key}={get(cfg, key)}' for key in given)})" * bool(given)),
            key="train.global_batch_size",
            found=cfg.train.global_batch_size,
            remedy="raise it, take another number of devices, or leave fixed keys out",
        )
    best = [refine_split(each, sizes, mix, cluster) for each in results.fitting[:_POLISHED]]
    return sorted([*best, *results.fitting[_POLISHED:]], key=lambda each: -each.tokens_per_s)


def advice(
    cfg: Config,
    sizes: ModelSizes,
    mix: RowSample,
    cluster: Cluster,
    leanest: Candidate,
    is_fit: bool = False,
) -> tuple[str, str]:
    """Return the problem, what the leanest layout needs, and the remedy, the changes that would
    fit. `is_fit`: switches have been tried together."""
    parts = max(leanest.memory, key=lambda stage: stage.total)
    usable = USABLE * cluster.memory
    devices = f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)} of {_gib(cluster.memory)}"
    remedies = list(_remedies(cfg, sizes, mix, cluster))
    problem = (
        f"does not fit on {devices}: the leanest layout, "
        f"{_degrees(leanest)} with model.recompute={leanest.cfg.model.recompute}, needs "
        f"{_gib(leanest.need)} on its fullest rank, and {_gib(usable)} can be used (weights "
        f"{_gib(parts.weights)}, gradients {_gib(parts.gradients)}, optimizer "
        f"{_gib(parts.optimizer)}, activations {_gib(parts.activations + parts.working)})"
    )
    remedy = "what fits: " + "; ".join(remedies) if remedies else "no single change makes it fit"
    if not is_fit:
        remedy += "; megatron-vlm plan --fit tries switches together"
    return problem, remedy


def _remedies(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> Iterator[str]:
    """Yield those of these changes that fit: more GPUs, activations on the host, small moments, an
    optimizer on the host, frozen parts, a base in 4 bits, shorter rows, larger GPUs."""
    count = cluster.gpus
    while (count := 2 * count) <= _MAX_GPUS:
        # Each replica needs a row in each step.
        rows = max(cfg.train.global_batch_size, count)
        scaled = replace(cfg, train=replace(cfg.train, global_batch_size=rows))
        if need := _need(scaled, sizes, mix, replace(cluster, gpus=count)):
            yield f"{count} such GPUs ({need})"
            break
    yield from _switches(cfg, sizes, mix, cluster)
    if not cfg.lora.rank:  # with adapters everything else is frozen already
        yield from _trained_less(cfg, sizes, mix, cluster)
    elif cfg.lora.base is None and (
        need := _need(with_keys(cfg, {"lora.base": "nf4"}), sizes, mix, cluster)
    ):
        yield f"a base in 4 bits, with lora.base=nf4 ({need})"
    longest = max(row.tokens for row in mix.rows)
    for tokens in (longest // 2, longest // 4):
        rows_ = tuple(row for row in mix.rows if row.tokens <= tokens)
        if rows_ and (need := _need(cfg, sizes, RowSample(rows_, mix.origin), cluster)):
            yield f"data.max_tokens={tokens} with data.truncation=drop ({need})"
            break
    for size in (24, 40, 48, 80, 96, 141, 192, 288):
        larger = replace(cluster, memory=size * 2**30)
        if larger.memory > cluster.memory and (need := _need(cfg, sizes, mix, larger)):
            yield f"{cluster.gpus} of {size} GiB ({need})"
            break


def _switches(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> Iterator[str]:
    """Yield the switches that fit, each at its first value that does."""
    proposed = set()
    for key, value in _unset_switches(cfg):
        if key in proposed or not allows_switch(cfg, key):
            continue
        if need := _need(with_keys(cfg, {key: value}), sizes, mix, cluster):
            proposed.add(key)
            yield f"{shown(key, value)} ({need})"


def _unset_switches(cfg: Config) -> Iterator[tuple[str, object]]:
    """Yield each switch that saves memory and is not set, as key and value."""
    if not cfg.model.offload_activations:
        yield "model.offload_activations", 1.0
    if cfg.optim.states == "fp32":
        yield from (("optim.states", states) for states in ("bf16", "int8"))
    if cfg.optim.offload < 1:
        yield "optim.offload", 1.0


def _trained_less(
    cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster
) -> Iterator[str]:
    """Yield the changes that fit among adapters alone, and fewer trained parts."""
    model = cfg.model
    if need := _need(replace(cfg, lora=USUAL), sizes, mix, cluster):
        yield f"adapters alone trained, with lora=default ({need})"
    if need := _need(replace(cfg, lora=replace(USUAL, base="nf4")), sizes, mix, cluster):
        yield f"adapters alone trained over a base in 4 bits, with lora=qlora ({need})"
    frozen = replace(model, freeze_vision=True)
    if not model.freeze_vision and (need := _need(replace(cfg, model=frozen), sizes, mix, cluster)):
        yield f"model.freeze_vision=true ({need})"
    frozen = replace(frozen, freeze_language=True)
    if not model.freeze_language and (
        need := _need(replace(cfg, model=frozen), sizes, mix, cluster)
    ):
        yield f"only the mergers trained, with model.freeze_language=true, too ({need})"


def _need(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> str | None:
    """Return what the fastest layout of this configuration needs, or None if none fits."""
    fitting = search(cfg, sizes, mix, cluster).fitting
    if not fitting:
        return None
    return f"{_degrees(fitting[0])}, {_gib(fitting[0].need)}"


def _degrees(candidate: Candidate) -> str:
    dims = candidate.dims
    experts = f" parallel.ep={dims.ep}" if dims.ep > 1 else ""
    return f"parallel.tp={dims.tp} parallel.pp={dims.pp}{experts}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
