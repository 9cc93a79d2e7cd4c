"""A model at some degrees: all that memory and time depend on besides the data."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes, Part
from megatron_vlm.lora.targets import adapted_specs, is_of_experts

Split = tuple[int, ...]  # layers of each stage


@dataclass(frozen=True)
class Adapted:
    """Parts of the model that have adapters."""

    parts: frozenset[str] = frozenset()  # among the tower, the projectors and the decoder
    experts: bool = False
    head: bool = False


@dataclass(frozen=True)
class ModelLayout:
    """A model at its degrees, as a configuration trains it."""

    cfg: Config
    sizes: ModelSizes
    dims: ParallelDims
    itemsize: int  # bytes of a weight
    on_gpus: bool = False  # ranks communicate by NCCL

    def with_layers(self, split: Split) -> "ModelLayout":
        """Return the layout with this many layers on each stage."""
        return replace(self, dims=replace(self.dims, layers_per_stage=split))

    @property
    def adapted(self) -> Adapted:
        """The parts that have adapters."""
        lora = self.cfg.lora
        return _adapted_by(self.sizes, lora.targets) if lora.rank else Adapted()

    @cached_property
    def trained(self) -> Config:
        """The configuration with the freeze_* that decide what is kept for the backward: a part
        with adapters keeps the inputs of its layers, as one that is trained in full does."""
        cfg, parts = self.cfg, self.adapted.parts
        frozen: dict[str, Any] = {
            f"freeze_{part}": not (learns(cfg, part) or part in parts) for part in SWITCHES
        }
        return replace(cfg, model=replace(cfg.model, **frozen))

    @cached_property
    def of_mtp_head(self) -> "ModelLayout":
        """The layout in which a layer costs what that of an MTP head costs: it learns as a
        whole."""
        model = replace(self.cfg.model, freeze_language=False, offload_activations=0.0)
        return replace(self, cfg=replace(self.cfg, model=model, lora=LoraConfig()))


@lru_cache(maxsize=8)
def _adapted_by(sizes: ModelSizes, targets: tuple[str, ...]) -> Adapted:
    weights = adapted_specs(sizes.with_head, targets)
    without_head = [weight for weight in weights if weight.part is not Part.head]
    parts = frozenset(weight.part.switch for weight in without_head)
    return Adapted(parts, any(map(is_of_experts, weights)), len(without_head) < len(weights))
