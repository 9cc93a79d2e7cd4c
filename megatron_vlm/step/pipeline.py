"""Stage: this rank's chunks of the model, and Megatron's schedule that takes work through all of
them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_vlm.data.batch.micro_batch import MicroBatch
from megatron_vlm.data.media.pixels import PixelTables
from megatron_vlm.distributed.device import CopyStream
from megatron_vlm.distributed.grid import Grid
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel
from megatron_vlm.step.arrival import StageInput, arrivals

# Takes an iterator of items and a chunk; returns the stage's output and what reads the last
# stage's: for a backward (scaled loss, ...), forward only whatever is wanted of it.
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[..., Any]]]


class Stage:
    """What a pipeline stage computes with. `wrapped` is the chunks, in training inside DDP."""

    def __init__(
        self,
        chunks: Sequence[Qwen3VLGPTModel],
        wrapped: Sequence[nn.Module],
        grid: Grid,
        pixels: PixelTables,
    ):
        self.chunks, self.grid = list(chunks), grid
        self.wrapped: list[Any] = list(wrapped)
        self.pixels, self.device = pixels, pixels.device
        self.copies = CopyStream(pixels.device)
        self.sizes = chunks[0].sizes

    def run(
        self,
        items: Callable[[Qwen3VLGPTModel], Iterator[Any]],
        count: int,
        step: ForwardStep,
        forward_only: bool,
    ) -> list[Any]:
        """`count` items through all stages; what `step` reads of each on the last stage. `items`
        gives those of a chunk, such as `arrivals`."""
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[items(chunk) for chunk in self.chunks],
            model=self.wrapped,
            num_microbatches=count,
            # Neither is used: variable_seq_lengths sends each tensor's shape ahead of it.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def arrivals(
        self, batches: Sequence[MicroBatch], chunk: Qwen3VLGPTModel, sees: bool = True
    ) -> Iterator[StageInput]:
        """The batches on the device; which `sees` nothing, only words."""
        return arrivals(batches, chunk, sees, self.copies)

    def call(self, chunk: Any, batch: StageInput, **more: Any) -> Tensor:
        """A chunk's output for a micro-batch."""
        output: Tensor = chunk(
            input_ids=batch.ids_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=self.pixels.images(batch.pixel_values_PC),
            pixel_values_videos=self.pixels.videos(batch.pixel_values_videos_PC),
            visuals=batch.visuals,
            **more,
        )
        return output

    def score(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs of each row's supervised tokens, fp32 on the host: one tensor [S] a row, zero
        where a token is not supervised. The same on every rank of the replica."""
        with self.evaluating():
            outputs = self.run(
                partial(self.arrivals, batches), len(batches), self._score_step, forward_only=True
            )
        return self.per_row(batches, outputs)

    def per_row(self, batches: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The last stage's log-probs [N] of each micro-batch, by row, on every rank."""
        counts = [batch.num_supervised for batch in batches]
        flat = torch.empty(sum(counts), device=self.device)
        if self.grid.last:
            flat.copy_(torch.cat(list(outputs)))
        self.grid.from_last_stage(flat)
        found = {
            place: row
            for batch, piece in zip(batches, flat.cpu().split(counts), strict=True)
            for place, row in zip(batch.rows, batch.log_probs_by_row(piece), strict=False)
        }
        return [found[place] for place in sorted(found)]

    def _score_step(self, data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        output = self.call(chunk, batch, labels=batch.targets_N, loss_mask=batch.places_N)
        return output, as_it_is

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients and no recomputation; afterwards training continues as before."""
        was_training = self.wrapped[0].training
        if was_training:  # not for every generated token: it visits each module
            self.train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            if was_training:
                self.train(True)

    def train(self, mode: bool) -> None:
        """Switch all chunks between training and evaluation."""
        for chunk in self.wrapped:
            chunk.train(mode)


def as_it_is(output: Tensor, non_loss_data: bool = True) -> Any:
    """For Megatron's forward-only schedules: return the stage's output itself."""
    assert non_loss_data
    return output
