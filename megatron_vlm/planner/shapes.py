"""The sizes of micro-batches, which is all that the planner knows of data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a micro-batch."""

    rows: int
    tokens: int  # of its longest row
    supervised: int
    patches: int
    largest_image: int  # in patches
    patch_pairs: int = 0  # within frames, summed over all of them

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.tokens

    def patches_of_rank(self, ranks: int) -> int:
        """Of the rank that has most, where `ranks` share the images out."""
        return max(-(-self.patches // ranks), self.largest_image)
