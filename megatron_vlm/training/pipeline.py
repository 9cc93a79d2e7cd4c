"""Stage: this rank's chunks of the model, with Megatron's schedule that takes work through all
stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor, nn

from megatron_vlm.data.batches.collate import filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.media.images import PixelTables
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.host_copies import CopyStream
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.log_probs import ExtraOutput
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.training.expert_routing import routing_of_rows, routing_tables
from megatron_vlm.training.stage_inputs import StageInput, arrivals

OfRow = TypeVar("OfRow")

# A forward step takes an iterator of items and a chunk. It returns the stage's output and a
# function that reads the output of the last stage. For a backward that function returns (scaled
# loss, ...), and for a forward alone any value.
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[..., Any]]]


@dataclass(frozen=True)
class ItemKind:
    """Way of items that are no micro-batches through the pipeline."""

    batch_of: Callable[[Any], MicroBatch]
    filler: Callable[[], Any]  # makes an item that stands for none
    # Brings the items to the device for a chunk, in the form that the forward step takes.
    arriving: Callable[[Sequence[Any], StageModel], Iterator[Any]]


class Stage:
    """A pipeline stage on this rank. `wrapped` has the chunks, inside DDP in training."""

    def __init__(
        self,
        chunks: Sequence[StageModel],
        wrapped: Sequence[nn.Module],
        grid: RankGroups,
        pixels: PixelTables,
    ):
        self.chunks, self.grid = list(chunks), grid
        self.wrapped: list[Any] = list(wrapped)
        self.pixels, self.device = pixels, pixels.device
        self.copies = CopyStream(pixels.device)
        self.sizes = chunks[0].sizes
        self.batch_sizes: list[BatchSizes] = []  # micro-batches of the last backward

    def run(
        self,
        items: Sequence[Any],
        step: ForwardStep,
        forward_only: bool,
        kind: ItemKind | None = None,
    ) -> list[Any]:
        """Take each item through all stages and chunks. Return what `step` reads of each item on
        the last stage. Items are micro-batches, or of another `kind`.

        Interleaved stages take items in groups of as many as there are stages, and replicas that
        share experts take the same number of items. Fillers stand for those that are missing.
        """
        kind = kind or ItemKind(lambda batch: batch, filler_batch, self.arrivals)
        dims, config, num_items = self.grid.dims, self.chunks[0].config, len(items)
        count = self.global_max(num_items)
        if dims.virtual_stages > 1:
            count += -count % dims.pp if count else dims.pp
        items = [*items, *(kind.filler() for _ in range(count - num_items))]
        between: dict[str, Any] = {}
        if dims.pp > 1:
            batches = [kind.batch_of(item) for item in items]
            between["p2p_communicator"] = KnownShapeP2P(self.grid, config, self.sizes, batches)
            between["pg_collection"] = self.chunks[0].pg_collection
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[kind.arriving(items, chunk) for chunk in self.chunks],
            model=self.wrapped,
            num_microbatches=len(items),
            # Neither is used: KnownShapeP2P knows the shapes that arrive.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **between,
        )
        return outputs[:num_items]

    def global_max(self, count: int) -> int:
        """Return the largest count among the replicas that share experts with this one, because
        each of them takes part in every pass of the others. A collective of these replicas, if
        there are any."""
        if self.grid.ep.size == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.grid.ep.group)
        return int(largest)

    def arrivals(
        self,
        batches: Sequence[MicroBatch],
        chunk: StageModel,
        sees: Sequence[bool] | None = None,
    ) -> Iterator[StageInput]:
        """Yield the batches on the device. A batch that `sees` nothing has only words."""
        return arrivals(batches, chunk, sees or [True] * len(batches), self.copies)

    def call(self, chunk: Any, batch: StageInput, **more: Any) -> Tensor:
        """Return a chunk's output for a micro-batch."""
        output: Tensor = chunk(
            input_ids=batch.ids_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=self.pixels.images(batch.pixel_values_PC),
            pixel_values_videos=self.pixels.videos(batch.pixel_values_videos_PC),
            visuals=batch.visuals,
            routing=batch.routing,
            **more,
        )
        return output

    def predict(
        self,
        chunk: Any,
        batch: StageInput,
        also: ExtraOutput | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return a chunk's output for a micro-batch; on the last stage, its targets' log-probs."""
        heads = {"labels": batch.targets_M, "loss_mask": batch.places_N, "of_M": batch.of_M}
        if also == "lumped":
            heads["given_NJ"] = batch.teacher[0]
        return self.call(chunk, batch, **heads, also=also, temperature=temperature)

    def score(self, batches: Sequence[MicroBatch], temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of each row's supervised tokens at this temperature, fp32 on the
        host: one tensor [S] for each row, zero where a token is not supervised. The log-probs of a
        row with targets have the targets' shape. All ranks of the replica get the same. Replicas
        that share experts call it together; a replica that has nothing to score passes no
        batches."""

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            output = self.predict(chunk, next(data), temperature=temperature)
            return output, pass_through

        with self.evaluating():
            outputs = self.run(batches, step, forward_only=True)
        return self.gather_by_row(batches, outputs)

    def likeliest(
        self, batches: Sequence[MicroBatch], count: int, temperature: float
    ) -> list[Tensor]:
        """Return the most likely tokens at each position where a row predicts one: [S, k, 2], ids
        and log-probs at this temperature in float64, at the position that predicts them, and zeros
        elsewhere. The rest is the same as for `score`."""

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(data)
            heads = {"loss_mask": batch.places_N, "likeliest": (count, temperature)}
            return self.call(chunk, batch, **heads), pass_through

        with self.evaluating():
            outputs = self.run(batches, step, forward_only=True)
        sizes = [len(batch.supervised[0]) for batch in batches]
        pieces = self.share_last(outputs, sizes, torch.empty(0, count, 2, dtype=torch.double))

        def rows(batch: MicroBatch, piece: Tensor) -> list[Tensor]:
            spread = piece.new_zeros(*batch.tokens_BS5.shape[:2], count, 2)
            spread[batch.supervised] = piece
            lengths = batch.lengths
            return [row[:length].clone() for row, length in zip(spread, lengths, strict=True)]

        return rows_by_place(batches, map(rows, batches, pieces))

    def embed(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the normalised hidden states [N, H] at the supervised positions of each
        micro-batch, on the last stage, and on the other stages nothing. Replicas that share experts
        call it together."""

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            return self.predict(chunk, next(data), also="embedding"), pass_through

        with self.evaluating():
            outputs = self.run(batches, step, forward_only=True)
        return outputs if self.grid.is_last_stage else []

    def routing(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the experts [S, L, K] of each token of each row, on every rank of the replica.
        Replicas that share experts call it together."""
        inputs: list[StageInput] = []

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            inputs.append(batch := next(data))
            output = self.predict(chunk, batch)
            return output, pass_through

        with self.evaluating():
            self.run(batches, step, forward_only=True)
        chosen = [(item.number, item.routing.chosen) for item in inputs if item.routing is not None]
        tables = routing_tables(batches, chosen, self.sizes.text, self.grid, self.device)
        return routing_of_rows(batches, tables)

    def gather_by_row(
        self, batches: Sequence[MicroBatch], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the last stage's log-probs [M] of each micro-batch, by row, on every rank."""
        counts = [batch.num_supervised for batch in batches]
        pieces = self.share_last(outputs, counts, torch.empty(0))
        return rows_by_place(batches, map(MicroBatch.log_probs_by_row, batches, pieces))

    def share_last(
        self, outputs: Sequence[Tensor], sizes: Sequence[int], like: Tensor
    ) -> tuple[Tensor, ...]:
        """Send the last stage's output for each micro-batch to the host of every rank. `sizes` are
        the numbers of entries of each micro-batch; `like` has their dtype and their other
        dimensions."""
        flat = torch.empty(sum(sizes), *like.shape[1:], dtype=like.dtype, device=self.device)
        if self.grid.is_last_stage and sizes:
            flat.copy_(torch.cat(list(outputs)))
        self.grid.from_last_stage(flat)
        return flat.cpu().split(list(sizes))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run without gradients and recomputation; afterwards training continues as before."""
        was_training = self.wrapped[0].training
        if was_training:  # not for every generated token: train() visits each module
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


def pass_through(output: Tensor, non_loss_data: bool = True) -> Any:
    """Return the stage's output itself, for Megatron's forward-only schedules."""
    assert non_loss_data
    return output


def rows_by_place(batches: Sequence[MicroBatch], rows: Iterable[Sequence[OfRow]]) -> list[OfRow]:
    """Return the rows of micro-batches in the order of the batch that they were cut from."""
    row_at = {
        place: row
        for batch, batch_rows in zip(batches, rows, strict=True)
        for place, row in zip(batch.rows, batch_rows, strict=False)  # a filler's row has no place
    }
    return [row_at[place] for place in sorted(row_at)]


def values_by_place(batches: Sequence[MicroBatch], values: Iterable[OfRow]) -> dict[int, OfRow]:
    """Return what was computed of each row, by the row's place in the batch that the micro-batches
    were cut from. `values` are in the order of these places."""
    places = sorted(place for batch in batches for place in batch.rows)
    return dict(zip(places, values, strict=True))


# The shapes of the tensors between stages are known in advance.
#
# With varying lengths, Megatron sends the shape of each tensor ahead of it, and the device stops
# twice for that. But the order in which its schedules take micro-batches through the chunks is
# fixed, and each stage knows the sizes of every micro-batch. So it knows what arrives, and when.

Shape = tuple[int, int, int]


class KnownShapeP2P(P2PCommunicator):
    """Megatron's communicator for one run of the schedule over these micro-batches, without its
    exchange of shapes."""

    def __init__(
        self, grid: RankGroups, config: Any, sizes: ModelSizes, batches: Sequence[MicroBatch]
    ) -> None:
        super().__init__(grid.pp.group, config)
        dims, stage = grid.dims, grid.pp.rank
        pp, chunks = dims.pp, dims.virtual_stages
        order = get_schedule_table(len(batches), chunks, config.microbatch_group_size_per_vp_stage)

        def after(place: int, batch: MicroBatch) -> Shape:
            """Return the shape that a place in the pipeline sends on."""
            rows, tokens = batch.tokens_BS5.shape[:2]
            extras = Carry.extras(sizes, dims, place, bool(batch.visual))
            return tokens * (1 + extras), rows, sizes.text.hidden

        def outputs(stage: int) -> list[Shape]:
            """Return the shapes that a stage sends on, in order. The end of the pipeline sends
            nothing."""
            places = [(dims.place_of(stage, chunk), batches[item]) for item, chunk in order]
            return [after(place, batch) for place, batch in places if place < pp * chunks - 1]

        def gradients(stage: int) -> list[Shape]:
            """Return the shapes that a stage sends back, in order: the gradient of each input.
            Backward takes the chunks in the opposite order."""
            places = [
                (dims.place_of(stage, chunks - 1 - chunk), batches[item]) for item, chunk in order
            ]
            return [after(place - 1, batch) for place, batch in places if place > 0]

        # The last stage comes before the first: it sends on the outputs of its inner chunks.
        self.to_next = iter(outputs(stage))
        self.from_prev = iter(outputs((stage - 1) % pp))
        self.from_next = iter(gradients((stage + 1) % pp))

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes that this call receives."""
        if tensor_send_next is not None:
            # Check before sending: a receiver that waits for another size would never report it.
            sent, expected = tuple(tensor_send_next.shape), next(self.to_next)
            assert sent == expected, f"the next stage waits for {expected}, and this one has {sent}"
        return (
            next(self.from_prev) if recv_prev else None,
            next(self.from_next) if recv_next else None,
        )
