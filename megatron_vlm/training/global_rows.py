"""Values of the rows of a global batch, gathered over data parallel ranks and scattered to them. A
loss that compares all rows takes two passes, as in GradCache: the first one has no gradients and
gives these values; the second one gets the derivative of the loss by the value of each row. So the
activations of one micro-batch are in memory at a time, as for other losses.

Shapes: R rows of a micro-batch, T rows of the global batch, H numbers of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch, RowPlace
from megatron_vlm.distributed.collectives import Group, all_gather_json
from megatron_vlm.distributed.device import to_device


@dataclass(frozen=True)
class GlobalRows:
    """A value of each row of a global batch, in an order that does not depend on the layout."""

    values_TH: Tensor
    places: tuple[RowPlace, ...]  # MicroBatch.rows
    local: tuple[int, ...]  # numbers of this replica's rows, micro-batch after micro-batch

    @staticmethod
    def gather(
        values: Sequence[Tensor], batches: Sequence[MicroBatch], group: Group, device: torch.device
    ) -> "GlobalRows":
        """Gather the values [R, H] of each micro-batch from all replicas. A collective."""
        pairs = zip(values, batches, strict=True)
        filled = [each for each, batch in pairs if batch.rows] or [values[0][:0]]
        local_RH = to_device(torch.cat(filled), device)
        own = [place for batch in batches for place in batch.rows]
        by_replica = all_gather_json(own, group, device)
        padded = local_RH.new_zeros(max(map(len, by_replica)), *local_RH.shape[1:])
        padded[: len(local_RH)] = local_RH
        parts = [torch.empty_like(padded) for _ in by_replica]
        dist.all_gather(parts, padded, group=group)
        gathered = torch.cat([part[: len(of)] for part, of in zip(parts, by_replica, strict=True)])
        flat: list[RowPlace] = [(example, row) for of in by_replica for example, row in of]
        order = sorted(range(len(flat)), key=flat.__getitem__)
        number = {flat[old]: new for new, old in enumerate(order)}
        values_TH = gathered[torch.tensor(order, dtype=torch.long, device=gathered.device)]
        return GlobalRows(
            values_TH, tuple(flat[old] for old in order), tuple(number[place] for place in own)
        )

    @property
    def example_T(self) -> Tensor:
        """Number of each row's example in the global batch."""
        examples = torch.tensor([example for example, _ in self.places], dtype=torch.long)
        return examples.to(self.values_TH.device)

    def scatter(
        self, name: str, table_TH: Tensor, batches: Sequence[MicroBatch]
    ) -> list[MicroBatch]:
        """Return this replica's batches with the row value `name`, from a table of all rows."""
        local_RH = table_TH[torch.tensor(self.local, dtype=torch.long, device=table_TH.device)]
        parts = local_RH.split([len(batch.rows) for batch in batches])
        pairs = zip(batches, parts, strict=True)
        return [batch.with_row_values(**{name: part}) for batch, part in pairs]
