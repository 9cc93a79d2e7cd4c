"""The plan of a run: its layout, the memory of each stage, and the predicted time. A search ranks
such plans, and a dry run, the overview of a run and the error of a full memory tell one."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.planner.layer_split import even_split
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import StageMemory, estimate
from megatron_vlm.planner.memory_switches import switches_by_bytes
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.planner.row_sizes import BatchSizes


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
