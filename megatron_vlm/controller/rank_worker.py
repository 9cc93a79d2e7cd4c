"""Worker of one rank in a group, with a method for each call of the controller."""

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_vlm.checkpoint import save_load
from megatron_vlm.controller.worker_group import ReplicaBatch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tensors.tensor_batch import rows_of
from megatron_vlm.data.tokens.answer_masks import AnswerMasks
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.training.backward import Backward, LossCall, run_backward
from megatron_vlm.training.generation_batch import Texts
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.multi_model import run_together
from megatron_vlm.training.optimizer_step import AdamStep
from megatron_vlm.training.worker import MegatronWorker, StepMetrics


class WorkerError(MegatronVLMError):
    """A failure in a worker that is not a mistake of the user. It names the rank."""


class BrokenError(WorkerError):
    """An unexpected error. Other ranks may be inside a collective that this rank has left."""


class RankWorker:
    """A worker with the calls of WorkerGroup. Each call takes the part of this rank's replica."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker
        self.has_gradients = False

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result. An error names the rank."""
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            raise with_rank(error, dist.get_rank()) from error

    def forward(self, part: ReplicaBatch, temperature: float) -> list[Tensor]:
        return self.worker.forward(self._prepare(part), temperature)

    def likeliest(self, part: ReplicaBatch, count: int, temperature: float) -> list[Tensor]:
        return self.worker.likeliest(self._prepare(part), count, temperature)

    def routing(self, part: ReplicaBatch) -> list[Tensor]:
        return self.worker.routing(self._prepare(part))

    def forward_backward(self, part: ReplicaBatch, call: LossCall) -> StepMetrics:
        [metrics] = backward_of([self], [part], [call])
        return metrics

    def backward(self, part: ReplicaBatch, call: LossCall) -> Backward:
        """Prepare a forward_backward without running it."""
        if not call.accumulate:  # also when the rows are refused
            self.has_gradients = False
            if self.worker.gradients is not None:
                self.worker.gradients.forget()
        batches = self._prepare(part, Objective.create(call.loss, call.options).value_names)
        return self.worker.backward(batches, call)

    def optim_step(self, lr: float | None, adam: AdamStep | None) -> tuple[float, float]:
        if not self.has_gradients and not (adam and adam.without_gradients):
            # The controller may not have waited for a forward_backward that failed.
            raise WorkerError(
                "there are no gradients", place="optim_step", remedy="call forward_backward first"
            )
        self.has_gradients = False
        return self.worker.optim_step(lr, adam)

    def sample(
        self,
        part: ReplicaBatch,
        settings: SamplingSettings,
        n: int,
        seed: int | Sequence[int],
        batch_rows: int,
    ) -> list[list[Completion]]:
        prompts = rows_of(part.all_fields())
        numbers = range(part.first_row, part.first_row + len(prompts))
        if isinstance(seed, int):
            # The seed follows from the answer's number in the whole call, so that no two answers
            # of a call share a seed.
            seeds = [(seed << 32) + n * number for number in numbers]
        else:
            seeds = [seed[number] for number in numbers]
        texts = self.texts if settings.needs_texts else None
        return self.worker.sample(prompts, settings, n, seeds, batch_rows, texts)

    @property
    def texts(self) -> Texts:
        """Decoding functions and special tokens of the checkpoint's tokenizer."""
        cfg, vocab = self.worker.cfg, self.worker.stage.sizes.text.vocab
        return _texts(cfg.model.path, tuple(cfg.data.add_tokens), vocab)

    def save(self, folder: str, progress: dict[str, Any]) -> None:
        save_load.save(self.worker, Path(folder), progress)

    def load(self, folder: str) -> dict[str, Any]:
        return save_load.load(self.worker, Path(folder))

    def export(self, folder: str) -> None:
        self.worker.export_hf(folder)

    def _prepare(self, part: ReplicaBatch, value_names: Sequence[str] = ()) -> list[MicroBatch]:
        """Make micro-batches of the part. If one replica has a bad row, all ranks fail together,
        so that none is left in a collective."""
        message = "another rank cannot take its rows; see its message"
        try:
            with fail_together(FailedElsewhereError, message):
                return self.worker.micro_batches(part.all_fields(), value_names, part.first_row)
        except MegatronVLMError:
            raise
        except Exception as error:  # the other ranks know of it, and continue
            raise WorkerError(f"{type(error).__name__}: {error}", place="the rows") from error


@lru_cache(maxsize=2)  # adapters of a model share them
def _texts(path: str, add_tokens: tuple[str, ...], vocab: int) -> Texts:
    def text_of(skip: bool, ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip))

    tokenizer = read_tokenizer(path, add_tokens)
    added = tokenizer.added_tokens_decoder.values()
    special = tuple(str(token) for token in added if token.special)
    masks = AnswerMasks(tokenizer, vocab)
    return Texts(partial(text_of, True), partial(text_of, False), special, masks)


def backward_of(
    members: Sequence[RankWorker], parts: Sequence[ReplicaBatch], loss_calls: Sequence[LossCall]
) -> list[StepMetrics]:
    """Run forward_backward of different models on this rank, in one pass through the pipeline."""
    calls = zip(members, parts, loss_calls, strict=True)
    requests = [member.backward(part, call) for member, part, call in calls]
    alone = len(requests) == 1
    metrics = [run_backward(requests[0])] if alone else run_together(requests)
    for member in members:
        member.has_gradients = True
    return metrics


class FailedElsewhereError(DataError):
    """A failure of this rank because another rank failed."""


def with_rank(error: Exception, rank: int) -> Exception:
    """Return the same error with the rank's name. Errors of others become BrokenError."""
    if isinstance(error, MegatronVLMError):
        return error.within(f"rank {rank}")
    return BrokenError(f"{type(error).__name__}: {error}", place=f"rank {rank}")


def first_failure(errors: Sequence[Exception]) -> Exception:
    """Return the first error that does not merely repeat another rank's failure."""
    return next((e for e in errors if not isinstance(e, FailedElsewhereError)), errors[0])
