"""What every sampler can do, whatever draws for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.completions import Completion, SamplingSettings


class SamplerError(MegatronVLMError):
    """What draws the samples has failed; says how, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a Hugging Face checkpoint's folder, such as an export of ours."""

    folder: str


@dataclass(frozen=True)
class Adapter:
    """A folder of PEFT's. Its weights are added to those that were there before any adapter."""

    folder: str


# Or every tensor of a checkpoint, by its name there: `MegatronWorker.named_weights`.
Weights = Checkpoint | Adapter | Iterable[tuple[str, Tensor]]


class Sampler(Protocol):
    """Draws answers. Many calls of `sample` may be under way at a time."""

    async def sample(
        self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Completion]:
        """An answer to the prompt for each seed; the same seed draws the same. Labels are
        ignored."""

    async def update(self, weights: Weights, version: int) -> None:
        """Draw with other weights from now on, and say their version in each sample. Samples under
        way are finished with the old weights first; those asked for meanwhile wait for the new."""

    async def close(self) -> None:
        """End whatever was started."""
