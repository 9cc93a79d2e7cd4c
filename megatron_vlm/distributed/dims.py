"""Degrees of parallelism, the order of ranks, and the layers of each stage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Literal

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.errors import ConfigError

ShardGroup = Literal["tp", "ep"]  # groups over which a parameter can be sharded


def shards_optimizer(cfg: ParallelConfig, dp: int) -> bool:
    """Return whether optimizer state is sharded. One replica would only copy it around."""
    return cfg.distributed_optimizer and dp > 1


def overlaps(cfg: ParallelConfig, dp: int) -> tuple[bool, bool]:
    """Return whether gradients are reduced during the last backward, and whether weights are
    gathered during the next forward. What the user leaves open is done wherever DP > 1."""
    reduces = dp > 1 if cfg.overlap_grad_reduce is None else cfg.overlap_grad_reduce
    gathers = reduces if cfg.overlap_param_gather is None else cfg.overlap_param_gather
    return reduces, gathers and shards_optimizer(cfg, dp)


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism and the decoder layers of each pipeline stage.

    With interleaved stages a stage holds several chunks of the model, its virtual stages.
    `layers_per_stage` then has an entry for each chunk, in the order of the pipeline: chunk 0 of
    all stages, then chunk 1 of all stages, and so on.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    layers_per_stage: tuple[int, ...]
    virtual_stages: int = 1  # chunks of a stage

    @staticmethod
    def create(cfg: ParallelConfig, world_size: int, num_layers: int) -> "ParallelDims":
        """Derive DP from the world size and divide the decoder layers among the stages."""
        for name in ("tp", "pp", "ep", "virtual_stages"):
            if (degree := getattr(cfg, name)) < 1:
                raise ConfigError(
                    "is below 1", key=f"parallel.{name}", found=degree, allowed="1 or more"
                )
        model_parallel = cfg.tp * cfg.pp
        if world_size % model_parallel:
            raise ConfigError(
                f"x parallel.pp={cfg.pp} = {model_parallel} does not divide the {world_size} "
                "processes",
                key="parallel.tp",
                found=cfg.tp,
                remedy=f"start a multiple of {model_parallel}",
            )
        dp = world_size // model_parallel
        if dp % cfg.ep:
            raise ConfigError(
                f"does not divide the data parallel degree {dp}",
                key="parallel.ep",
                found=cfg.ep,
                allowed=f"a divisor of {dp}",
            )
        stages = _stages(cfg.layers_per_stage, cfg.pp, cfg.virtual_stages, num_layers)
        return ParallelDims(cfg.tp, cfg.pp, dp, cfg.ep, stages, cfg.virtual_stages)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    def place_of(self, stage: int, chunk: int) -> int:
        """Return the place of a chunk in the pipeline, from 0."""
        return chunk * self.pp + stage

    def is_last(self, place: int) -> bool:
        """Return whether this place in the pipeline has the head."""
        return place == len(self.layers_per_stage) - 1

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Return the global numbers, from 0, of the decoder layers in a chunk of a stage."""
        return self.layers_at(self.place_of(stage, chunk))

    def layers_at(self, place: int) -> range:
        """Return the global numbers of the decoder layers at a place in the pipeline."""
        ends = [0, *accumulate(self.layers_per_stage)]
        return range(ends[place], ends[place + 1])

    def features_after(self, place: int, features: int) -> int:
        """Return how many DeepStack features are left after a place: each layer adds one."""
        return max(features - sum(self.layers_per_stage[: place + 1]), 0)

    def megatron_layout(self) -> list[list[str]]:
        """Return the layout in the form of TransformerConfig.pipeline_model_parallel_layout."""
        stages = [["decoder"] * count for count in self.layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    def check_divides(self, counts: Mapping[str, int]) -> None:
        """Refuse a TP that does not divide these counts, which have their names in config.json."""
        largest = gcd(*counts.values())
        for name, count in counts.items():
            if count % self.tp:
                raise ConfigError(
                    f"does not divide the model's {name}={count}",
                    key="parallel.tp",
                    found=self.tp,
                    allowed=[tp for tp in range(1, largest + 1) if largest % tp == 0],
                )

    def padded_vocab(self, vocab: int) -> int:
        """Return the vocabulary rounded up to the next multiple of TP: the rows in memory."""
        return -(-vocab // self.tp) * self.tp

    # The order of ranks is Megatron's: tp first, then dp, then pp.

    def tp_rank_of(self, rank: int) -> int:
        """Return the tensor parallel rank: the place among the ranks that share its layers."""
        return rank % self.tp

    def replica_of(self, rank: int) -> int:
        """Return the data parallel replica of a rank."""
        return rank // self.tp % self.dp

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.tp * self.dp)

    def leader_of(self, replica: int) -> int:
        """Return the first rank of a replica, which loads its data and reports its results."""
        return replica * self.tp


def loads_data(parallel: ParallelConfig, rank: int, world: int) -> bool:
    """Return whether a rank leads its replica. It is needed before there is a `ParallelDims`."""
    return rank % parallel.tp == 0 and rank < world // parallel.pp


def _stages(
    layout: list[int] | str | None, pp: int, virtual: int, num_layers: int
) -> tuple[int, ...]:
    """Return the layout of the configuration after checks, or an even one. The remainder of an even
    layout is on the middle stages, because the first also has the vision tower and the last the
    head. "auto" is even until the planner replaces it, before the model is built."""
    count = pp * virtual
    if virtual > 1 and pp == 1:
        raise ConfigError(
            "cuts each stage of a pipeline into chunks, and with parallel.pp=1 there is none",
            key="parallel.virtual_stages",
            found=virtual,
            remedy="set parallel.virtual_stages=1, or raise parallel.pp",
        )
    kind, factor = "stage", ""
    if virtual > 1:
        kind, factor = "chunk", f"x parallel.virtual_stages={virtual} = {count} "
    if layout is None or isinstance(layout, str):
        if num_layers < count:
            remedy = "lower it"
            if num_layers == count - 1:  # the first stage may hold only the tower
                remedy += f", or set parallel.layers_per_stage={[0] + [1] * num_layers}"
            raise ConfigError(
                f"{factor}is more than the model's {num_layers} layers",
                key="parallel.pp",
                found=pp,
                remedy=remedy,
            )
        quotient, remainder = divmod(num_layers, count)
        order = [*range(1, count - 1), count - 1, 0]
        larger = {order[i % len(order)] for i in range(remainder)} if count > 1 else set()
        return tuple(quotient + (stage in larger) for stage in range(count))
    _check_entries(layout, kind, f"parallel.pp={pp} {factor}".strip(), count, num_layers)
    return tuple(layout)


def _check_entries(
    layers: Sequence[int], kind: str, product: str, count: int, num_layers: int
) -> None:
    if len(layers) != count:
        auto = ", or auto" if kind == "stage" else ""
        raise ConfigError(
            f"has {len(layers)} entries for {product} {kind}s",
            key="parallel.layers_per_stage",
            found=list(layers),
            remedy=f"give one number for each {kind}, in the order of the pipeline{auto}",
        )
    if min(layers) < 0 or sum(layers) != num_layers:
        raise ConfigError(
            f"adds up to {sum(layers)}, but the model has {num_layers} layers",
            key="parallel.layers_per_stage",
            found=list(layers),
            remedy=f"give entries >= 0 that add up to {num_layers}",
        )
    if count > 1 and 0 in layers[1:]:
        raise ConfigError(
            f"leaves {kind} {layers.index(0, 1)} empty",
            key="parallel.layers_per_stage",
            found=list(layers),
            remedy=f"give 0 layers to no {kind} but {kind} 0, which has the vision tower",
        )


def count_offloaded(share: float, layers: int) -> int:
    """Return the number of a chunk's layers whose activations are offloaded: the first ones,
    because the backward needs the last layers' soonest."""
    return math.ceil(round(share * layers, 6))
