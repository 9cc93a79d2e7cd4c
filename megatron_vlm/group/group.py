"""WorkerGroup: the calls of a controller."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.group.handle import Handle
from megatron_vlm.group.parts import Part, Rows, even_parts, prompt_parts
from megatron_vlm.step.losses import LossFunction, Objective
from megatron_vlm.worker import StepMetrics


class Ranks(Protocol):
    """How a call reaches every rank; see local.py and ray_group.py."""

    dims: ParallelDims

    def call(self, method: str, parts: Sequence[Part] | None, *args: Any) -> Handle[list[Any]]:
        """A method of every Member, on its replica's part; one result of each replica, in order.
        An error of a rank is raised."""

    def close(self) -> None: ...


class WorkerGroup:
    """N MegatronWorkers as one. Batches are those of the whole group: rows, or a TensorBatch, of
    which only the fields that a call reads travel. Every method returns a handle."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.dims = ranks.dims

    def forward(self, batch: Rows) -> Handle[list[Tensor]]:
        """Log-probs of each row's supervised tokens, as MegatronWorker.forward gives them."""
        handle = self.ranks.call("forward", even_parts(batch, self.dims.dp))
        return handle.then(lambda found: _in_order(found)[: len(batch)])

    def forward_backward(
        self,
        batch: Rows,
        return_per_token_outputs: bool = False,
        loss: str | LossFunction = "cross_entropy",
        **options: float,
    ) -> Handle[StepMetrics]:
        """Gradients of the mean loss over the batch, in place of any before. The values of each
        token that the loss reads are fields of the batch; see losses.py."""
        value_names = Objective.create(loss, options).value_names
        parts = even_parts(batch, self.dims.dp, value_names)
        args = (return_per_token_outputs, loss, options)

        def join(found: list[StepMetrics]) -> StepMetrics:
            if not return_per_token_outputs:
                return found[0]
            log_probs = _in_order([metrics.log_probs for metrics in found])[: len(batch)]
            return replace(found[0], log_probs=log_probs)

        return self.ranks.call("forward_backward", parts, *args).then(join)

    def optim_step(self, lr: float | None = None) -> Handle[tuple[float, float]]:
        """Clip and apply the gradients: (norm before, learning rate)."""
        return self.ranks.call("optim_step", None, lr).then(_first)

    def generate(
        self,
        prompts: Rows,
        max_new_tokens: int,
        stop_ids: Collection[int],
        batch_rows: int = 16,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Handle[list[list[int]]]:
        """New tokens of each prompt, as decode.generate gives them. A row of a call is sampled by
        `seed` and its number: give another seed to each call."""
        parts = prompt_parts(prompts, self.dims.dp)
        args = (max_new_tokens, tuple(stop_ids), batch_rows, temperature, seed)
        return self.ranks.call("generate", parts, *args).then(_in_order)

    def save(self, folder: str, progress: dict[str, Any] | None = None) -> Handle[None]:
        """Write a checkpoint; `progress` is plain JSON, for `load` to return."""
        return self.ranks.call("save", None, str(folder), progress or {}).then(_first)

    def load(self, folder: str) -> Handle[dict[str, Any]]:
        """Fill the workers from a checkpoint of any layout; its `progress`."""
        return self.ranks.call("load", None, str(folder)).then(_first)

    def export(self, folder: str) -> Handle[None]:
        """Write a Hugging Face checkpoint."""
        return self.ranks.call("export", None, str(folder)).then(_first)

    def close(self) -> None:
        """End the processes that the group has started."""
        self.ranks.close()


def _first(found: Sequence[Any]) -> Any:
    return found[0]


def _in_order(found: Sequence[Any]) -> list[Any]:
    return [row for rows in found for row in rows]
