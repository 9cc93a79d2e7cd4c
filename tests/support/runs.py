"""Functions that the pooled processes run. Each builds a MegatronWorker as a user's process would,
and returns plain tensors by Hugging Face names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_vlm.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.hf.gather_weights import gather_tensors
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.training.worker import MegatronWorker


@dataclass(frozen=True)
class Case:
    world: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    platform: str = "cpu"

    def config(self, path: str) -> Config:
        return Config(
            model=ModelConfig(path=path, **self.model),
            lora=LoraConfig(**self.lora),
            parallel=ParallelConfig(**self.parallel),
            data=DataConfig(**self.data),
            optim=OptimConfig(**self.optim),
            train=TrainConfig(**{"micro_batch_size": 2, **self.train}),
            checkpoint=CheckpointConfig(**self.checkpoint),
            platform=self.platform,
            launch=LaunchConfig(timeout_minutes=2),
        )


@dataclass(frozen=True)
class Outcome:
    loss: float
    num_tokens: int
    log_probs: list[Tensor]  # for this replica's rows, from `forward`
    train_log_probs: list[Tensor]  # for the same rows, from `forward_backward`
    grads: dict[str, Tensor]  # complete on rank 0
    means: dict[str, float] = field(default_factory=dict)  # means that are reported with the loss


def my_rows(rows: list[Row]) -> list[Row]:
    """Return this replica's rows: contiguous parts, as even as possible."""
    group = parallel_state.get_data_parallel_group()
    rank, dp = dist.get_rank(group), dist.get_world_size(group)
    return rows[rank * len(rows) // dp : (rank + 1) * len(rows) // dp]


def of_interest(worker: MegatronWorker) -> Callable[[Entry], bool]:
    """Return a filter for all tensors of a Hugging Face checkpoint; with adapters, for trained
    tensors only."""
    if worker.cfg.lora.rank:
        return lambda entry: not entry.is_frozen(worker.cfg)
    return lambda entry: entry.origin is Origin.hub


def collect_grads(worker: MegatronWorker) -> dict[str, Tensor]:
    """Return every gradient by its Hugging Face name. The distributed optimizer leaves each DP rank
    only its part of a bucket, so the parts are put together first."""
    dense, chunks = parallel_state.get_data_parallel_group(), worker.stage.wrapped
    buffers = [(buffer, dense) for chunk in chunks for buffer in chunk.buffers]
    experts = parallel_state.get_expert_data_parallel_group()
    buffers += [(buffer, experts) for chunk in chunks for buffer in chunk.expert_parallel_buffers]
    if worker.cfg.parallel.distributed_optimizer and dist.get_world_size(dense) > 1:
        for buffer, group in buffers:
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // dist.get_world_size(group)
                part = bucket.grad_data.view(-1, size)[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)

    def grad(param: torch.nn.Parameter) -> Tensor:
        return param.main_grad if param.requires_grad else torch.full_like(param, torch.nan)

    named = gather_tensors(worker.held, worker.table, worker.grid, grad, of_interest(worker))
    return {name: value.clone() for name, value in named if value is not None}


def refusal(
    path: str, case: Case, act: Callable[[MegatronWorker], object] | None = None
) -> MegatronVLMError:
    """Return the error with which a worker is not made, or does not act."""
    with pytest.raises(MegatronVLMError) as caught:
        worker = MegatronWorker(case.config(path))
        if act is not None:
            act(worker)
    return caught.value


def loss_and_grads(path: str, case: Case, rows: list[Row]) -> Outcome:
    return outcome_of(MegatronWorker(case.config(path)), rows)


def outcome_of(worker: MegatronWorker, rows: list[Row]) -> Outcome:
    local_rows = my_rows(rows)
    log_probs = worker.forward(local_rows)
    if worker.cfg.parallel.overlap_grad_reduce:
        # Megatron's DDP learns in a first step which gradients arrive; it overlaps from the second.
        worker.forward_backward(local_rows)
    metrics = worker.forward_backward(local_rows, return_per_token_outputs=True)
    assert metrics.log_probs is not None
    grads, means = collect_grads(worker), metrics.means
    return Outcome(metrics.loss, metrics.num_tokens, log_probs, metrics.log_probs, grads, means)


def train(
    path: str, case: Case, batches: list[list[Row]], export: str | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses and gradient norms of one step per batch, and the weights after them, on rank
    0."""
    worker = MegatronWorker(case.config(path))
    losses, norms = [], []
    for rows in batches:
        losses.append(worker.forward_backward(my_rows(rows)).loss)
        norms.append(worker.optim_step()[0])
    of = of_interest(worker)
    named = gather_tensors(worker.held, worker.table, worker.grid, of=of)
    weights = {name: value.clone() for name, value in named if value is not None}
    if export is not None:
        worker.export_hf(export)
    return losses, norms, weights


def call(path: str, case: Case, action: Callable[[MegatronWorker], Any]) -> Any:
    """Build a worker and pass it to a module-level function."""
    return action(MegatronWorker(case.config(path)))
