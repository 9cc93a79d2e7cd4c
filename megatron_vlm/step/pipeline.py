"""Megatron's schedule over this rank's stage: work items in, outputs of the last stage out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

# Takes an iterator of items and the model; returns the stage's output and what reads the last
# stage's: for a backward (scaled loss, ...), forward only whatever is wanted of it.
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[..., Any]]]


def run_schedule(
    ddp: torch.nn.Module, items: Sequence[Any], forward_step: ForwardStep, forward_only: bool
) -> list[Any]:
    """Each item through all stages; what `forward_step` reads of each on the last stage."""
    run = get_forward_backward_func()
    outputs: list[Any] = run(
        forward_step_func=forward_step,
        data_iterator=iter(items),
        model=[ddp],
        num_microbatches=len(items),
        # Neither is used: variable_seq_lengths sends each tensor's shape ahead of it.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs


@contextmanager
def evaluating(ddp: torch.nn.Module) -> Iterator[None]:
    """No gradients and no recomputation, until training goes on as before."""
    was_training = ddp.training
    if was_training:  # not for every generated token: it visits each module
        ddp.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            ddp.train()


def broadcast_from_last(tensor: Tensor) -> None:
    """To all stages, in place."""
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tensor, source, group=parallel_state.get_pipeline_model_parallel_group())
