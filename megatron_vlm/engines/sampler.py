"""The interface of every sampler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import MegatronVLMError


class SamplerError(MegatronVLMError):
    """A failure of a sampler. Its message has the cause and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a Hugging Face checkpoint, such as an export of this package."""

    folder: str


@dataclass(frozen=True)
class Adapter:
    """A folder in PEFT's format. Its weights are added to the base weights, without any earlier
    adapter."""

    folder: str


# The third form has every tensor of a checkpoint under its name there, as
# `MegatronWorker.named_weights` yields them.
Weights = Checkpoint | Adapter | Iterable[tuple[str, Tensor]]


class Sampler(Protocol):
    """A source of answers. Many calls of `sample` may be in progress at a time."""

    async def sample(
        self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample an answer to the prompt for each seed. The same seed gives the same answer. Labels
        are ignored."""

    async def update(self, weights: Weights, version: int) -> None:
        """Sample with other weights from now on, and put their version into each sample. Samples in
        progress finish with the old weights first; later requests wait for the new weights."""

    async def close(self) -> None:
        """End everything that the sampler started."""
