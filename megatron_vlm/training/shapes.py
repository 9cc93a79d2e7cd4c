"""What travels between stages, known in advance.

With lengths that vary, Megatron sends the shape of each tensor ahead of it, and the device stands
still twice for that. But the order in which its schedules take micro-batches through the chunks is
fixed, and each stage knows the sizes of every micro-batch: so it knows what arrives, and when.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.grid import Grid
from megatron_vlm.family.spec import ModelSizes

Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one run of the schedule over these micro-batches, without its
    exchange of shapes."""

    def __init__(
        self, grid: Grid, config: Any, sizes: ModelSizes, batches: Sequence[MicroBatch]
    ) -> None:
        super().__init__(grid.pp.group, config)
        dims, stage = grid.dims, grid.pp.rank
        pp, chunks = dims.pp, dims.virtual_stages
        order = get_schedule_table(len(batches), chunks, config.microbatch_group_size_per_vp_stage)

        def after(place: int, batch: MicroBatch) -> Shape:
            """What a place in the pipeline sends on: hidden states, then the features that no
            layer has added yet."""
            rows, tokens = batch.tokens_BS5.shape[:2]
            features = sizes.vision.deepstack if batch.visual else 0
            return tokens * (1 + dims.features_after(place, features)), rows, sizes.text.hidden

        def outputs(stage: int) -> list[Shape]:
            """What a stage sends on, in order; the end of the pipeline sends nothing."""
            places = [(dims.place_of(stage, chunk), batches[item]) for item, chunk in order]
            return [after(place, batch) for place, batch in places if place < pp * chunks - 1]

        def gradients(stage: int) -> list[Shape]:
            """What a stage sends back, in order: for each input its gradient. Backward takes the
            chunks in the opposite order."""
            places = [
                (dims.place_of(stage, chunks - 1 - chunk), batches[item]) for item, chunk in order
            ]
            return [after(place - 1, batch) for place, batch in places if place > 0]

        # The last stage is the one before the first: it sends on what its inner chunks give.
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
        """The shapes of what this call receives."""
        if tensor_send_next is not None:
            # Told before it is sent: a receiver that waits for another size would never say so.
            sent, known = tuple(tensor_send_next.shape), next(self.to_next)
            assert sent == known, f"the next stage waits for {known}, and this one has {sent}"
        return (
            next(self.from_prev) if recv_prev else None,
            next(self.from_next) if recv_next else None,
        )
