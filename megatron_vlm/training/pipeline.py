"""Stage: this rank's chunks of the model, with Megatron's schedule through all stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor, nn

from megatron_vlm.data.batches.collate import filler_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.host_copies import CopyStream
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.head import Head, log_probs_head
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.training.stage_inputs import StageInput, stage_input

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
        # Every rank must run as many: a missing item would leave its peers in a receive.
        items = [*items, *(kind.filler() for _ in range(count - num_items))]
        between: dict[str, Any] = {}
        if dims.pp > 1:
            batches = [kind.batch_of(item) for item in items]
            between["p2p_communicator"] = KnownShapeP2P(
                self.grid, config, self.sizes, batches, self.device
            )
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
        each of them takes part in every pass of the others. A collective of these."""
        if self.grid.ep.size == 1:
            return count
        largest = torch.full((), count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.grid.ep.group)
        return int(largest)

    def arrivals(
        self, batches: Iterable[MicroBatch], chunk: StageModel, sees: Sequence[bool] | None = None
    ) -> Iterator[StageInput]:
        """Yield the batches on the device, in order. A batch that `sees` nothing has only words.

        Each is planned and copied once the work on the one before is queued, while the device
        computes. Ahead of that work, the first one would wait for two plans."""
        for number, batch in enumerate(batches):
            with self.copies.copying() as copies:
                is_seen = sees is None or sees[number]
                ready = stage_input(batch, number, chunk, is_seen, copies.move)
            copies.arrive()
            yield ready

    def call(self, chunk: Any, batch: StageInput, **more: Any) -> Any:
        """Return a chunk's output for a micro-batch."""
        return chunk(
            input_ids=batch.ids_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=self.pixels.images(batch.pixel_values_PC),
            pixel_values_videos=self.pixels.videos(batch.pixel_values_videos_PC),
            visuals=batch.visuals,
            has_visuals=batch.host.visual,
            pictures=batch.pictures,
            routing=batch.routing,
            **more,
        )

    def predict(self, chunk: Any, batch: StageInput, head: Head = log_probs_head) -> Any:
        """Return a chunk's output for a micro-batch; on the last stage, that of the head."""
        places = {"loss_mask": batch.places_N, "targets": batch.targets}
        return self.call(chunk, batch, **places, head=head)

    def evaluate(
        self,
        batches: Sequence[MicroBatch],
        head: Head = log_probs_head,
        read: Callable[[StageInput], Callable[..., Any]] = lambda _: pass_through,
    ) -> list[Any]:
        """Return what `read(batch)` makes of the head's output for each micro-batch, by default the
        output itself, without gradients, on the last stage, and nothing on the others. Replicas
        that share experts call it together; one that has nothing to evaluate passes no batches."""

        def step(data: Iterator[StageInput], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(data)
            return self.predict(chunk, batch, head), read(batch)

        with self.evaluating():
            return self.run(batches, step, forward_only=True)

    def share_last(
        self, outputs: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor
    ) -> tuple[Tensor, ...]:
        """Send a field of the last stage's output for each micro-batch to the host of every rank.
        `sizes` are the numbers of entries; `like` has their dtype and their other dimensions."""
        flat = torch.empty(sum(sizes), *like.shape[1:], dtype=like.dtype, device=self.device)
        if self.grid.is_last_stage and sizes:
            flat.copy_(torch.cat([output for output in outputs if output is not None]))
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


# The shapes of the tensors between stages are known in advance.
#
# With varying lengths, Megatron sends the shape of each tensor ahead of it, and the device stops
# twice for that. But the order in which its schedules take micro-batches through the chunks is
# fixed, and each stage knows the sizes of every micro-batch. So it knows what arrives, and when.

Shape = tuple[int, int, int]


class KnownShapeP2P(P2PCommunicator):
    """Megatron's communicator for one run of the schedule over these micro-batches, without its
    exchange of shapes. All that a stage sends and receives at a time is one batch."""

    def __init__(
        self,
        grid: RankGroups,
        config: Any,
        sizes: ModelSizes,
        batches: Sequence[MicroBatch],
        device: torch.device,
    ) -> None:
        super().__init__(grid.p2p, config)
        self.device = device
        dims, stage = grid.dims, grid.pp.rank
        pp, chunks, learns = dims.pp, dims.virtual_stages, torch.is_grad_enabled()
        order = get_schedule_table(len(batches), chunks, config.microbatch_group_size_per_vp_stage)

        def after(place: int, batch: MicroBatch) -> Shape:
            """Return the shape that a place in the pipeline sends on."""
            rows, tokens = batch.tokens_BS5.shape[:2]
            extras = Carry.extras(sizes, dims, place, bool(batch.visual), learns)
            return tokens * (1 + extras), rows, sizes.text.hidden

        def shapes(stage: int, back: bool = False) -> list[Shape]:
            """Return the shapes that a stage sends on, in order, or back: the gradient of each
            input, for which backward takes the chunks in the opposite order. The ends send none."""
            for_chunk = range(chunks)[::-1] if back else range(chunks)
            places = [(dims.place_of(stage, for_chunk[n]) - back, batches[m]) for m, n in order]
            return [after(place, batch) for place, batch in places if 0 <= place < pp * chunks - 1]

        # The last stage comes before the first: it sends on the outputs of its inner chunks.
        self.to_next = iter(shapes(stage))
        self.from_prev = iter(shapes((stage - 1) % pp))
        self.from_next = iter(shapes((stage + 1) % pp, back=True))

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Exchange tensors with the neighbours. Return the hidden states from the previous stage
        and the gradient from the next one.

        Of two interleaved stages each comes before and after the other. The messages between two
        ranks arrive in order, so on both sides hidden states come first.
        """
        assert wait_on_reqs, "overlap_p2p_comm is false"
        if tensor_send_next is not None:
            # Check before sending: a receiver that waits for another size would never report it.
            sent, expected = tuple(tensor_send_next.shape), next(self.to_next)
            assert sent == expected, f"the next stage waits for {expected}, and this one has {sent}"
        hidden = self._unset(next(self.from_prev)) if recv_prev else None
        gradient = self._unset(next(self.from_next)) if recv_next else None
        moves = [
            (dist.isend, tensor_send_next, self.next_rank),
            (dist.irecv, hidden, self.prev_rank),
            (dist.isend, tensor_send_prev, self.prev_rank),
            (dist.irecv, gradient, self.next_rank),
        ]
        batch = [
            dist.P2POp(move, tensor, rank, self.pp_group)
            for move, tensor, rank in moves
            if tensor is not None
        ]
        # One batch: two neighbours whose sends came first would wait for each other in NCCL.
        # On a GPU, a receive's `wait` holds up the device's queue, not the host.
        for work in dist.batch_isend_irecv(batch) if batch else []:
            work.wait()
        return hidden, gradient, None

    def _unset(self, shape: Shape) -> Tensor:
        dtype = self.config.pipeline_dtype
        # A leaf: Megatron's backward reads the gradient to send back from its `grad`.
        return torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)
