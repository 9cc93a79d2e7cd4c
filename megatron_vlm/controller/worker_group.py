"""WorkerGroup, the calls of a controller."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from megatron_vlm.controller.split_batch import BatchLike, ReplicaBatch, even_parts, prompt_parts
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.training.backward import LossCall
from megatron_vlm.training.generate import ROWS
from megatron_vlm.training.losses import LossFunction, Objective, check_divisor
from megatron_vlm.training.optimizer import AdamStep
from megatron_vlm.training.worker import StepMetrics

T = TypeVar("T")
Join = Callable[[list[Any]], T]  # combines the replicas' results, which are in order
Parts = Sequence[ReplicaBatch] | None


class Transport(Protocol):
    """A channel that carries a call to every rank; see torchrun.py and ray_actors.py."""

    dims: ParallelDims

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        """Call a method of every RankWorker. If there are parts, a rank gets its replica's part."""

    def close(self) -> None: ...


class WorkerGroup:
    """N MegatronWorkers that act as one. A batch is that of the whole group: rows, or a
    TensorBatch. Only the fields that a call reads are sent.

    Every method returns a future. The calls of a group run in the order in which they were made,
    whether or not the caller waited for a result.
    """

    def __init__(self, ranks: Transport):
        self.ranks = ranks
        self.dims = ranks.dims

    def forward(self, batch: BatchLike, temperature: float = 1.0) -> Future[list[Tensor]]:
        """Return the log-probs of each row's supervised tokens, as MegatronWorker.forward does."""
        parts = even_parts(batch, self.dims.dp)

        def join(results: list[list[Tensor]]) -> list[Tensor]:
            return _concatenate(results)[: len(batch)]

        return self.ranks.call(join, "forward", parts, temperature)

    def likeliest(
        self, batch: BatchLike, count: int, temperature: float = 1.0
    ) -> Future[list[Tensor]]:
        """Return the most likely tokens at each position where a row predicts one, as
        MegatronWorker does."""
        parts = even_parts(batch, self.dims.dp)

        def join(results: list[list[Tensor]]) -> list[Tensor]:
            return _concatenate(results)[: len(batch)]

        return self.ranks.call(join, "likeliest", parts, count, temperature)

    def routing(self, batch: BatchLike) -> Future[TensorList]:
        """Return the experts of each token in each row, as MegatronWorker.routing does. As the
        field `routing` of a batch they route its tokens to the same experts again."""
        parts = even_parts(batch, self.dims.dp)

        def join(results: list[list[Tensor]]) -> TensorList:
            return TensorList(_concatenate(results)[: len(batch)])

        return self.ranks.call(join, "routing", parts)

    def forward_backward(
        self,
        batch: BatchLike,
        return_per_token_outputs: bool = False,
        loss: str | LossFunction = "cross_entropy",
        divisor: float | None = None,
        accumulate: bool = False,
        **options: float,
    ) -> Future[StepMetrics]:
        """Compute the gradients of the mean loss over the batch, or of its sum over `divisor`. They
        replace earlier gradients, or with `accumulate` are added to those since the last
        optim_step. The values per token that the loss reads are fields of the batch; see losses.py.
        """
        check_divisor(divisor)
        value_names = Objective.create(loss, options).value_names
        parts = even_parts(batch, self.dims.dp, value_names)

        def join(results: list[StepMetrics]) -> StepMetrics:
            if not return_per_token_outputs:
                return results[0]
            log_probs = _concatenate([metrics.log_probs for metrics in results])[: len(batch)]
            return replace(results[0], log_probs=log_probs)

        call = LossCall(return_per_token_outputs, loss, divisor, accumulate, options)
        return self.ranks.call(join, "forward_backward", parts, call)

    def optim_step(
        self, lr: float | None = None, adam: AdamStep | None = None
    ) -> Future[tuple[float, float]]:
        """Clip and apply the gradients. Return the norm before clipping and the learning rate.
        `adam` replaces the configured settings for this step."""
        return self.ranks.call(_first_result, "optim_step", None, lr, adam)

    def sample(
        self,
        prompts: BatchLike,
        settings: SamplingSettings,
        n: int = 1,
        seed: int | Sequence[int] = 0,
        batch_rows: int = ROWS,
    ) -> Future[list[list[Completion]]]:
        """Sample `n` answers to each prompt, as MegatronWorker.sample does. Stop strings are
        searched in the text that the checkpoint's tokenizer decodes.

        With one seed, an answer depends on the seed and on its number in the call, so each call
        needs another seed. With a seed for each prompt, answer k depends on its seed + k alone.
        """
        args = (settings, n, seed, batch_rows)
        return self.ranks.call(_concatenate, "sample", prompt_parts(prompts, self.dims.dp), *args)

    def generate(
        self,
        prompts: BatchLike,
        max_new_tokens: int,
        stop_ids: Collection[int],
        batch_rows: int = ROWS,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Future[list[list[int]]]:
        """Generate new tokens for each prompt, as generate.generate does. The other arguments are
        those of `sample`."""
        settings = SamplingSettings(max_new_tokens, temperature, stop_ids=tuple(stop_ids))

        def join(results: list[Any]) -> list[list[int]]:
            return [settings.without_stop(each.ids) for (each,) in _concatenate(results)]

        args = (settings, 1, seed, batch_rows)
        return self.ranks.call(join, "sample", prompt_parts(prompts, self.dims.dp), *args)

    def save(self, folder: str, progress: dict[str, Any] | None = None) -> Future[None]:
        """Write a checkpoint. `progress` is plain JSON, which `load` returns."""
        return self.ranks.call(_first_result, "save", None, str(folder), progress or {})

    def load(self, folder: str) -> Future[dict[str, Any]]:
        """Load a checkpoint of any layout into the workers, and return its `progress`."""
        return self.ranks.call(_first_result, "load", None, str(folder))

    def export(self, folder: str) -> Future[None]:
        """Write a Hugging Face checkpoint."""
        return self.ranks.call(_first_result, "export", None, str(folder))

    def close(self) -> None:
        """End the processes that the group started."""
        self.ranks.close()


def _first_result(results: Sequence[Any]) -> Any:
    return results[0]


def _concatenate(results: Sequence[Any]) -> list[Any]:
    return [row for rows in results for row in rows]
