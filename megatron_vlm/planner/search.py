"""The plan of a run: its layout, the memory of each stage, and the predicted time; and the search
over all layouts of a number of GPUs, which ranks such plans."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_vlm.config.optimizer_spec import optimizer_spec
from megatron_vlm.config.schema import Config
from megatron_vlm.config.searched_keys import searched_keys
from megatron_vlm.distributed.dims import ParallelDims, overlaps, shards_optimizer
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.flops import ring, update
from megatron_vlm.planner.hardware import CPU, Machine
from megatron_vlm.planner.layer_split import (
    Replicas,
    choose_layer_split,
    even_split,
    level_layers,
    most_layers,
    replicas_of,
)
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import USABLE, StageMemory, estimate, host_need
from megatron_vlm.planner.memory_switches import switches_by_bytes
from megatron_vlm.planner.parameters import count, fits_blocks
from megatron_vlm.planner.pipeline_time import Stages, counts_of_parts
from megatron_vlm.planner.row_sizes import BatchSizes, RowSample, Step, heaviest_micro_batches


@dataclass(frozen=True)
class RunPlan:
    """Layout with its predicted cost."""

    layout: ModelLayout
    batches: Sequence[BatchSizes]  # micro-batches of a step, on the replica with the most tokens
    memory: tuple[StageMemory, ...]
    # A search adds the time of what fits.
    stages: Stages | None = None  # slowest replica of the first step
    step_s: float = 0.0  # mean step, optimizer included
    tokens: float = 0.0  # tokens of the mean step
    bubble: float = 0.0

    @staticmethod
    def of(layout: ModelLayout, batches: Sequence[BatchSizes]) -> "RunPlan":
        """Return the plan without a time."""
        return RunPlan(layout, batches, tuple(estimate(layout, batches)))

    @property
    def cfg(self) -> Config:
        return self.layout.cfg

    @property
    def dims(self) -> ParallelDims:
        return self.layout.dims

    @property
    def need(self) -> int:
        """Bytes of the fullest rank on its device."""
        return max(stage.total for stage in self.memory)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def degrees(self) -> str:
        """The degrees that are searched over, as overrides."""
        dims = self.dims
        experts = f" parallel.ep={dims.ep}" if dims.ep > 1 else ""
        return f"parallel.tp={dims.tp} parallel.pp={dims.pp}{experts}"

    @property
    def has_own_layers(self) -> bool:
        """True if a run needs parallel.layers_per_stage for this layout."""
        is_even = self.dims.layers_per_stage == even_split(self.dims.pp, self.dims.num_layers)
        return not is_even or self.cfg.parallel.layers_per_stage is not None

    @property
    def overrides(self) -> list[str]:
        """Keys for a run with this layout."""
        dims, model, parallel = self.dims, self.cfg.model, self.cfg.parallel
        keys: dict[str, object] = {"parallel.tp": dims.tp, "parallel.pp": dims.pp}
        if dims.ep > 1 or parallel.ep > 1:
            keys["parallel.ep"] = dims.ep
        if self.has_own_layers:
            layers = ",".join(map(str, dims.layers_per_stage))
            keys["parallel.layers_per_stage"] = f"[{layers}]"
        if (tokens := self.cfg.train.micro_batch_tokens) is not None:
            keys["train.micro_batch_tokens"] = tokens
        keys["model.recompute"] = model.recompute
        keys["model.recompute_vision"] = str(model.recompute_vision).lower()
        pairs = (f"{key}={value}" for key, value in keys.items())
        return [f"'{pair}'" if "[" in pair else pair for pair in pairs]

    def switches(self, stage: int) -> list[tuple[str, int]]:
        """Return switches as overrides, and the bytes that each saves on this stage."""
        return switches_by_bytes(self.layout, stage, self.batches)


_MICRO_TOKENS = (2048, 4096, 8192, 16384)
# The cheapest in time is first, so the first that fits is the fastest that fits.
_RECOMPUTES: tuple[tuple[Literal["none", "full"], bool], ...]
_RECOMPUTES = (("none", False), ("none", True), ("full", False), ("full", True))
_FP32 = 4
_MUON_SENT = 4  # bytes for each value of a matrix: its update in bf16, and the result
ITEMSIZE = {"bf16": 2, "fp32": 4, "auto": 2}  # bytes of a weight on a GPU


@dataclass(frozen=True)
class Cluster:
    """GPUs to train on."""

    gpus: int
    memory: float  # bytes of each GPU
    machine: Machine
    host_memory: float = math.inf  # bytes of each machine, for all of its GPUs


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    fitting: tuple[RunPlan, ...]  # fastest first
    leanest: RunPlan | None  # candidate with the least need, if none fits


def search(cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster) -> Found:
    """Search all layouts, and rank them by predicted tokens per second. With parallel.auto, only
    the keys that it names are searched over."""
    fitting: list[RunPlan] = []
    leanest: RunPlan | None = None
    for dims, tokens in _options(cfg, sizes, mix, cluster):
        trial = replace(cfg, train=replace(cfg.train, micro_batch_tokens=tokens))
        steps = mix.steps(trial.train, sizes, dims.dp)
        for candidate in _modes(_layout(trial, sizes, dims, cluster), steps, cluster):
            if candidate.stages is not None:
                fitting.append(candidate)
            elif leanest is None or candidate.need < leanest.need:
                leanest = candidate
    fitting.sort(key=lambda each: (-each.tokens_per_s, each.cfg.train.micro_batch_tokens or 0))
    # A larger limit that changes no micro-batch is the same layout.
    distinct = {(each.dims, each.cfg.model, each.step_s): each for each in reversed(fitting)}
    return Found(tuple(reversed(distinct.values())), None if fitting else leanest)


def _options(
    cfg: Config, sizes: ModelSizes, mix: RowSample, cluster: Cluster
) -> Iterator[tuple[ParallelDims, int | None]]:
    """Yield the degrees, with layers spread evenly, and train.micro_batch_tokens."""
    text, gpus, free = sizes.text, cluster.gpus, searched_keys(cfg)
    limits: list[int | None] = [cfg.train.micro_batch_tokens]
    if "train.micro_batch_tokens" in free:
        given = cfg.train.micro_batch_tokens or _MICRO_TOKENS[-1]
        larger = (tokens for tokens in _MICRO_TOKENS if tokens >= mix.tokens)
        limits = [*sorted({given, *larger})]
    experts = text.experts.count if text.experts else 1
    degrees = [tp for tp in ((1,) if text.experts else (1, 2, 4, 8)) if fits_blocks(cfg, sizes, tp)]
    for tp in degrees if "parallel.tp" in free else (cfg.parallel.tp,):
        cut = (*text.divided_by_tp.values(), gpus)
        if any(each % tp for each in cut) or tp > cluster.machine.devices:
            continue
        for pp in _divisors(gpus // tp):
            dp = gpus // (tp * pp)
            if pp > text.num_layers or dp > cfg.train.global_batch_size:
                continue
            if "parallel.pp" not in free and pp != cfg.parallel.pp:
                continue
            if (split := _first_split(cfg, pp, text.num_layers)) is None:
                continue
            for ep in _divisors(math.gcd(dp, experts)):
                if "parallel.ep" in free or ep == cfg.parallel.ep:
                    yield from ((ParallelDims(tp, pp, dp, ep, split), tokens) for tokens in limits)


def _first_split(cfg: Config, pp: int, layers: int) -> tuple[int, ...] | None:
    """Return the layers of each stage with which a search begins, or None if the
    configuration's stay and belong to another number of stages."""
    given = cfg.parallel.layers_per_stage
    if _is_split_free(cfg) or not isinstance(given, list):
        return even_split(pp, layers)
    return tuple(given) if len(given) == pp and sum(given) == layers else None


def _is_split_free(cfg: Config) -> bool:
    return "parallel.layers_per_stage" in searched_keys(cfg)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _layout(cfg: Config, sizes: ModelSizes, dims: ParallelDims, cluster: Cluster) -> ModelLayout:
    return ModelLayout(cfg, sizes, dims, ITEMSIZE[cfg.train.precision], cluster.machine != CPU)


def _modes(layout: ModelLayout, steps: Sequence[Step], cluster: Cluster) -> Iterator[RunPlan]:
    """Yield candidates up to the least recomputation that fits; others have no time."""
    cfg, free = layout.cfg, searched_keys(layout.cfg)
    modes: dict[tuple[Literal["none", "selective", "full"], bool], None] = {}
    for recompute, vision in _RECOMPUTES:
        if "model.recompute_vision" not in free:
            vision = cfg.model.recompute_vision
        elif vision and layout.trained.model.freeze_vision:
            continue
        modes[recompute if "model.recompute" in free else cfg.model.recompute, vision] = None
    for decoder, vision in modes:
        model = replace(cfg.model, recompute=decoder, recompute_vision=vision)
        trial = replace(layout, cfg=replace(cfg, model=model))
        candidate = _candidate(trial, steps, cluster)
        yield candidate
        if candidate.stages is not None:
            return


def _candidate(layout: ModelLayout, steps: Sequence[Step], cluster: Cluster) -> RunPlan:
    heaviest, limit = heaviest_micro_batches(steps), USABLE * cluster.memory
    replicas: Replicas = []
    max_layers = most_layers(layout, heaviest, limit)
    if max_layers is not None:
        replicas = replicas_of(layout, steps, cluster.machine)
        if _is_split_free(layout.cfg):
            split = level_layers(replicas, max_layers, layout.sizes.text.num_layers)
            layout = layout.with_layers(split)
    plan = RunPlan.of(layout, heaviest)
    host = host_need(layout.dims, plan.memory, cluster.machine.devices)
    is_over = plan.need > limit or host > USABLE * cluster.host_memory
    if max_layers is None or is_over:
        return plan
    return _with_time(plan, replicas, steps, cluster)


def refine_split(candidate: RunPlan, mix: RowSample, cluster: Cluster) -> RunPlan:
    """Return the candidate with the best split of its layers, which takes longer to find."""
    layout, dims = candidate.layout, candidate.dims
    if not _is_split_free(layout.cfg):
        return candidate
    steps = mix.steps(layout.cfg.train, layout.sizes, dims.dp)
    heaviest = heaviest_micro_batches(steps)
    max_layers = most_layers(layout, heaviest, USABLE * cluster.memory)
    assert max_layers is not None
    replicas = replicas_of(layout, steps, cluster.machine)
    split = choose_layer_split(replicas, max_layers, even_split(dims.pp, dims.num_layers))
    best = RunPlan.of(layout.with_layers(split), heaviest)
    return _with_time(best, replicas, steps, cluster)


def evaluate(
    cfg: Config, sizes: ModelSizes, dims: ParallelDims, mix: RowSample, cluster: Cluster
) -> RunPlan:
    """Return the cost of this layout, whether it fits or not."""
    layout, steps = _layout(cfg, sizes, dims, cluster), mix.steps(cfg.train, sizes, dims.dp)
    plan = RunPlan.of(layout, heaviest_micro_batches(steps))
    return _with_time(plan, replicas_of(layout, steps, cluster.machine), steps, cluster)


def _with_time(
    plan: RunPlan, replicas: Replicas, steps: Sequence[Step], cluster: Cluster
) -> RunPlan:
    dims = plan.dims
    slowest = [
        max(
            (each.stages(dims.layers_per_stage) for each in step), key=lambda stages: stages.seconds
        )
        for step in replicas
    ]
    pipeline = sum(stages.seconds for stages in slowest) / len(slowest)
    # Megatron cuts the gradients into buckets on the first stage alone: nothing else is hidden.
    hiding = float(slowest[0].backward_GS[-1, 0]), float(slowest[0].forward_GS[0, 0])
    after = max(
        _step_end_seconds(plan.layout, stage, cluster.machine, *(() if stage else hiding))
        for stage in range(dims.pp)
    )
    rows = [row for step in steps for share in step for row in share]
    # If some replicas represent others, all have equally many tokens.
    planned = sum(share != [] for share in steps[0]) or 1
    tokens = sum(row.padded_tokens for row in rows) / len(steps) * max(1.0, dims.dp / planned)
    busy = sum(float(s.forward_GS.sum() + s.backward_GS.sum()) for s in slowest)
    bubble = max(0.0, 1 - busy / dims.pp / (pipeline * len(slowest)))
    return replace(plan, stages=slowest[0], step_s=pipeline + after, tokens=tokens, bubble=bubble)


def _step_end_seconds(
    layout: ModelLayout,
    stage: int,
    machine: Machine,
    last_backward: float = 0.0,
    first_forward: float = 0.0,
) -> float:
    """Return the seconds after the last backward: gradients, optimizer, weights. Of the replicas'
    collectives only what the backward before and the forward after do not hide counts."""
    cfg, dims, itemsize = layout.cfg, layout.dims, layout.itemsize
    counts = count(layout, stage)
    optimizer, offloaded = optimizer_spec(cfg.optim), cfg.optim.offload
    on_device = replace(
        counts,
        optimized=int((1 - offloaded) * counts.optimized),
        states=int((1 - offloaded) * counts.states),
    )
    seconds = machine.seconds(update(on_device, optimizer.bytes_of_state))
    seconds += machine.host_update(offloaded * counts.optimized, itemsize, optimizer)
    ranks_of_stage = dims.tp * dims.dp
    seconds += machine.exchange(_MUON_SENT * counts.muon_values, ranks_of_stage)
    link = machine.bandwidth_between(ranks_of_stage)
    rest = counts.gradients - counts.of_experts
    sent = ring(dims.dp) * rest + ring(dims.dp // dims.ep) * counts.of_experts
    # A ring scatters what it has reduced, and gathers it again: half of its bytes each way.
    has_shards = shards_optimizer(cfg.parallel, dims.dp)
    reduces, gathers = overlaps(cfg.parallel, dims.dp)
    reduce_s = sent * _FP32 / (2 if has_shards else 1) / link
    gather_s = sent * itemsize / 2 / link if has_shards else 0.0
    seconds += max(0.0, reduce_s - reduces * last_backward)
    seconds += max(0.0, gather_s - gathers * first_forward)
    if stage == 0 and cfg.model.share_images:
        tower_alone = replace(cfg, model=replace(cfg.model, freeze_language=True))
        _, tower, _ = counts_of_parts(replace(layout, cfg=tower_alone))
        seconds += ring(dims.tp) * _FP32 * tower.trained / machine.link
    return seconds
