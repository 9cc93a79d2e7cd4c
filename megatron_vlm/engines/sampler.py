"""The interface of every sampler and of every engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_vlm.data.tokens.completions import Completion, Pieces, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.processed_prompt import ProcessedPrompt
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


Hear = Callable[[Pieces], None]  # receives tokens while they are drawn


class Sampler(Protocol):
    """A source of answers. Many calls of `sample` may be in progress at a time."""

    async def sample(
        self, prompt: Row, settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample an answer to the prompt for each seed. The same seed gives the same answer. Labels
        are ignored. A prompt may have the experts of its tokens, as far as earlier answers have
        them: an engine that returns experts may leave these out."""

    async def update(self, weights: Weights, version: int, interrupt: bool = False) -> None:
        """Sample with other weights from now on, and put their version into each sample. Later
        requests wait for the new weights. Samples in progress finish with the old weights first.
        With `interrupt` the new weights draw their later tokens, as if they had computed all
        tokens before."""

    async def close(self) -> None:
        """End everything that the sampler started."""


@dataclass(frozen=True)
class Capacity:
    """Numbers of requests that an engine has room for at a time."""

    samples: int  # prompts in progress, more than it draws at a time
    scores: int  # rows that it scores
    adapters: int = 1  # different adapters that prompts in progress may name
    in_rounds: bool = False  # whether it draws the prompts together that come together


class Engine(Sampler, Protocol):
    """A sampler that also scores rows and takes an adapter with a request. Engines are started by
    their names: see engine_kinds.py. Many calls may be in progress at a time."""

    @property
    def capacity(self) -> Capacity: ...

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
        hear: Hear | None = None,
    ) -> list[Completion]:
        """Sample an answer for each seed. `adapter` is used by this request alone. `hear` is called
        with the tokens that follow, often, or never by an engine that cannot tell. A request that
        is cancelled leaves the engine."""

    async def score(self, row: Row, top_k: int, timeout_s: float) -> Tensor:
        """Return the scores of a row's tokens under the engine's first weights, as the worker
        scores them on the ranks: [S, 1 + k, 2] in float64, ids and log-probs of the token and of
        the `top_k` most likely ones, at the position that predicts the token."""

    async def inspect(self, prompt: Row) -> ProcessedPrompt | None:
        """Return the engine's own view of the prompt, or None if it cannot show it."""
