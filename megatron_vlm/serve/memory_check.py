"""Check that a forward_backward fits into memory, by the planner's estimate, before it starts."""

from collections.abc import Sequence

from megatron_vlm.config.schema import Config
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.memory import estimate
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.serve.protocol.payloads import RequestError

_GIB = 2**30


def check_fits(
    rows: Sequence[Row],
    cfg: Config,
    sizes: ModelSizes,
    dims: ParallelDims,
    itemsize: int,
    memory: int,
) -> None:
    """Raise RequestError if the rows would not fit into memory even if their model were the only
    one there. The rows are dealt to the replicas, longest first, so the first replica has the
    longest row. `itemsize`: bytes of a weight; `memory`: bytes of a device."""
    local_rows, batch_rows = rows[: -(-len(rows) // dims.dp)], cfg.train.micro_batch_size
    batches = [
        BatchSizes.from_rows([_size(row) for row in local_rows[first : first + batch_rows]])
        for first in range(0, len(local_rows), batch_rows)
    ]
    needed = max(stage.total for stage in estimate(cfg, sizes, dims, batches, itemsize))
    if needed > memory:
        largest = max(batch.padded_tokens for batch in batches)
        raise RequestError(
            f"needs {needed / _GIB:.1f} GiB on a rank for micro-batches of up to {largest} tokens "
            f"({batch_rows} datums, as long as the longest of them), and its device has "
            f"{memory / _GIB:.1f} GiB",
            key="data",
            remedy="send shorter datums, or have the service started with a smaller "
            "train.micro_batch_size, or model.recompute=full",
        )


def _size(row: Row) -> BatchSizes:
    supervised = 0 if row.targets is None else int((row.targets != IGNORE).any(-1).sum())
    pixels, grids = row.pixel_values_PC, row.image_grid_I3
    patches = 0 if pixels is None else len(pixels)
    largest = 0 if grids is None or not len(grids) else int(grids.prod(-1).max())
    return BatchSizes(1, len(row.ids_S), supervised, patches, largest)
