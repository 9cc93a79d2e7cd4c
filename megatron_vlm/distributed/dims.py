"""The grid of ranks: degrees, Megatron's process groups, and which layers a stage holds."""

from dataclasses import dataclass
from itertools import accumulate

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism and the decoder layers of each pipeline stage."""

    tp: int
    pp: int
    dp: int
    ep: int
    layers_per_stage: tuple[int, ...]

    @staticmethod
    def create(cfg: ParallelConfig, world_size: int, num_layers: int) -> "ParallelDims":
        """Derive DP from the world size and lay the decoder layers out over the stages."""
        for name in ("tp", "pp", "ep"):
            if (degree := getattr(cfg, name)) < 1:
                raise ConfigError(f"parallel.{name}={degree} must be at least 1")
        model_parallel = cfg.tp * cfg.pp
        if world_size % model_parallel:
            raise ConfigError(
                f"parallel.tp={cfg.tp} x parallel.pp={cfg.pp} = {model_parallel} does not divide "
                f"the {world_size} processes; start a multiple of {model_parallel}"
            )
        dp = world_size // model_parallel
        if dp % cfg.ep:
            raise ConfigError(f"parallel.ep={cfg.ep} does not divide the data parallel degree {dp}")
        stages = _stages(cfg.layers_per_stage, cfg.pp, num_layers)
        return ParallelDims(cfg.tp, cfg.pp, dp, cfg.ep, stages)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    def layers_of(self, stage: int) -> range:
        """Global numbers, from 0, of the decoder layers on a stage."""
        ends = [0, *accumulate(self.layers_per_stage)]
        return range(ends[stage], ends[stage + 1])

    def stage_of(self, layer: int) -> int:
        """The stage that holds a decoder layer."""
        return next(stage for stage in range(self.pp) if layer in self.layers_of(stage))

    def megatron_layout(self) -> list[list[str]]:
        """The layout in the words of TransformerConfig.pipeline_model_parallel_layout."""
        stages = [["decoder"] * count for count in self.layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    def check_divides(self, heads: int, kv_heads: int, intermediate: int) -> None:
        """TP cuts attention by heads and the MLP by width: both must divide."""
        for name, count in (
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("intermediate_size", intermediate),
        ):
            if count % self.tp:
                raise ConfigError(
                    f"parallel.tp={self.tp} does not divide the model's {name}={count}; "
                    f"set parallel.tp to a divisor of {count}"
                )

    def padded_vocab(self, vocab: int) -> int:
        """The vocabulary rounded up to a multiple of TP, and no further.

        The extra rows exist only in memory: loss.py keeps them out of the softmax and hf/ out of
        checkpoints.
        """
        return -(-vocab // self.tp) * self.tp

    def replica_of(self, rank: int) -> int:
        """The data parallel replica of a rank: Megatron counts over tp, then dp, then pp."""
        return rank // self.tp % self.dp

    def stage_of_rank(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.tp * self.dp)

    def init_groups(self, seed: int, timeout_minutes: float) -> None:
        """Build Megatron's process groups over an initialised torch.distributed world. Where this
        process has them already, from another worker, they must be these."""
        if parallel_state.model_parallel_is_initialized():
            self._check_same_groups()
            return
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_minutes,
        )
        model_parallel_cuda_manual_seed(seed)

    def _check_same_groups(self) -> None:
        there = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if there != (self.tp, self.pp, self.ep):
            raise ConfigError(
                "parallel.tp={}, pp={}, ep={}, but this process has a worker with tp={}, pp={}, "
                "ep={}, and all workers of a process share its groups; give both one layout, or "
                "start the second in processes of its own".format(self.tp, self.pp, self.ep, *there)
            )


def _stages(asked: list[int] | None, pp: int, num_layers: int) -> tuple[int, ...]:
    """The asked layout, checked; or a balanced one, its remainder on the middle stages,
    because the first also has the vision tower and the last the head."""
    if asked is None:
        if num_layers < pp:
            raise ConfigError(
                f"parallel.pp={pp} is more than the model's {num_layers} layers; lower it, or "
                f"give parallel.layers_per_stage with zeros"
            )
        base, extra = divmod(num_layers, pp)
        order = [*range(1, pp - 1), pp - 1, 0]
        more = {order[i % len(order)] for i in range(extra)} if pp > 1 else set()
        return tuple(base + (stage in more) for stage in range(pp))
    if len(asked) != pp:
        raise ConfigError(
            f"parallel.layers_per_stage={asked} has {len(asked)} entries for parallel.pp={pp} "
            "stages; give one number for each stage"
        )
    if min(asked) < 0 or sum(asked) != num_layers:
        raise ConfigError(
            f"parallel.layers_per_stage={asked} adds up to {sum(asked)}, but the model has "
            f"{num_layers} layers; the entries must be >= 0 and add up to {num_layers}"
        )
    if pp > 1 and 0 in asked[1:]:
        raise ConfigError(
            f"parallel.layers_per_stage={asked} leaves stage {asked.index(0, 1)} empty; only "
            "stage 0, which has the vision tower, may hold 0 layers"
        )
    return tuple(asked)
