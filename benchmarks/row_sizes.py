"""Sizes of a row, for the planner."""

from megatron_vlm import Row
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.planner.row_sizes import BatchSizes


def sizes_of_row(row: Row) -> BatchSizes:
    """Return the sizes of a row with one image or none, as a micro-batch of its own."""
    grid_I3 = row.image_grid_I3
    assert grid_I3 is None or len(grid_I3) == 1
    patches = 0 if grid_I3 is None else int(grid_I3.prod())
    supervised = int((row.labels_S[1:] != IGNORE).sum())
    return BatchSizes(1, len(row.ids_S), supervised, patches, patches, patches**2)
