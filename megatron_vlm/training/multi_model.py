"""forward_backward of several models in one pass through the pipeline. While the last micro-batches
of a model leave it, the next model's enter, so the pipeline fills only once.

Every model computes with its own chunks, its own loss and its own token count, in the same order as
alone. Its gradients are therefore the same, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.data.batches.collate import filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.backward import Backward, StepMetrics
from megatron_vlm.training.pipeline import ForwardStep, ItemKind, Stage

Item = tuple[int, MicroBatch]  # the number of a model, and one of its micro-batches


class MultiModelChunk(nn.Module):
    """Chunk for Megatron's schedules, made of a chunk of each model; `of` selects one."""

    def __init__(self, stages: Sequence[Stage], place: int, finish: Any):
        super().__init__()
        self.stages, self.place = stages, place
        first = stages[0].chunks[place]
        self.model_type, self.config = first.model_type, copy(first.config)
        self.config.finalize_model_grads_func = finish
        self.arrived: Any = None

    def set_input_tensor(self, arrived: Any) -> None:
        """Store the input from the previous stage. The micro-batch decides which model gets it."""
        self.arrived = arrived

    def select_model(self, model: int) -> Any:
        """Return this model's chunk, which takes the stored input."""
        stage = self.stages[model]
        stage.chunks[self.place].set_input_tensor(self.arrived)
        return stage.wrapped[self.place]


def run_together(requests: Sequence[Backward]) -> list[StepMetrics]:
    """Run the requests, of different models with one layout. A collective. After an error all
    gradients are the earlier calls'."""
    with ExitStack() as calls:
        for request in requests:
            calls.enter_context(request.computing())
        outputs = _outputs(
            [request.stage for request in requests],
            [request.batches for request in requests],
            [request.forward_step() for request in requests],
        )
        sums = [request.totals(output) for request, output in zip(requests, outputs, strict=True)]
        return [
            request.metrics(output, own_sums)
            for request, output, own_sums in zip(requests, outputs, sums, strict=True)
        ]


def _outputs(
    stages: Sequence[Stage], batches: Sequence[Sequence[MicroBatch]], steps: Sequence[ForwardStep]
) -> list[list[Any]]:
    """Run forward and backward of each model's micro-batches by its own step. Return what the steps
    read on the last stage, by model."""
    lead = stages[0]
    assert lead.chunks[0].config.no_sync_func is None, (
        "each model has a last micro-batch of its own"
    )
    tokens = [torch.zeros((), dtype=torch.int, device=lead.device) for _ in stages]

    def finish(chunks: Any, num_tokens: Any = None, **more: Any) -> None:
        """Divide each model's gradients by its own tokens. Megatron would divide by all tokens."""
        for stage, num_counted in zip(stages, tokens, strict=True):
            stage.chunks[0].config.finalize_model_grads_func(stage.wrapped, num_counted, **more)

    def step(data: Iterator[tuple[int, Any]], chunk: MultiModelChunk) -> tuple[Tensor, Any]:
        model, batch = next(data)
        output, read = steps[model](iter([batch]), chunk.select_model(model))

        def counting(output: Tensor) -> Any:
            loss, count, report = read(output)
            tokens[model] += count
            return loss, count, report

        return output, counting

    def arriving(items: Sequence[Item], chunk: StageModel) -> Iterator[tuple[int, Any]]:
        for model, group in groupby(items, itemgetter(0)):  # numbers restart at 0 in a model
            for batch in lead.arrivals([batch for _, batch in group], chunk):
                yield model, batch

    items, begins = _in_a_row(stages, batches)
    switched = [MultiModelChunk(stages, place, finish) for place in range(len(lead.chunks))]
    joined = Stage(lead.chunks, switched, lead.grid, lead.pixels)
    kind = ItemKind(itemgetter(1), lambda: (len(stages) - 1, filler_batch()), arriving)
    outputs = joined.run(items, step, forward_only=False, kind=kind)
    return [outputs[begin : begin + len(each)] for begin, each in zip(begins, batches, strict=True)]


def _in_a_row(
    stages: Sequence[Stage], batches: Sequence[Sequence[MicroBatch]]
) -> tuple[list[Item], list[int]]:
    """Join the micro-batches of all models, and return where each model's begin. Replicas that
    share experts have the same model at the same place, so those with fewer micro-batches add
    fillers."""
    items: list[Item] = []
    begins = []
    for model, (stage, local_batches) in enumerate(zip(stages, batches, strict=True)):
        begins.append(len(items))
        fillers = [
            filler_batch() for _ in range(stage.global_max(len(local_batches)) - len(local_batches))
        ]
        items += [(model, batch) for batch in (*local_batches, *fillers)]
    return items, begins
