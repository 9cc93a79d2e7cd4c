"""Work of a row, to balance micro-batches and to show how well the hardware is used: the floating
point operations of its forward. Padding is not work."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_vlm.data.batches.balance import RowSize
from megatron_vlm.data.tokens.sample import Example
from megatron_vlm.family.decoder_layers import Attention
from megatron_vlm.family.spec import ModelSizes, Part, VisionSizes


@dataclass(frozen=True)
class WorkModel:
    """Operations per unit; a multiplication and an addition count as two."""

    per_token: int  # decoder without attention; only those experts that a token goes to
    attentions: tuple[tuple[Attention, int], ...]  # each kind, and the layers that have it
    per_supervised: int  # the head
    per_patch_of_tower: int  # linear layers of the vision tower
    per_patch_of_mergers: int  # linear layers of its mergers
    per_patch_pair: int  # attention within a frame
    vision: VisionSizes

    @staticmethod
    @lru_cache(maxsize=8)
    def from_sizes(sizes: ModelSizes) -> "WorkModel":
        """Return the work of a model of these sizes."""
        text, vision = sizes.text, sizes.vision
        tower, mergers = _matrices(sizes, Part.vision), _matrices(sizes, Part.merger)
        return WorkModel(
            per_token=sum(layer.flops_per_token(text.hidden) for layer in text.layers),
            attentions=tuple(
                Counter(x.mixer for x in text.layers if isinstance(x.mixer, Attention)).items()
            ),
            per_supervised=2 * text.hidden * text.vocab,
            per_patch_of_tower=2 * tower,
            per_patch_of_mergers=2 * (mergers // vision.merge**2),
            per_patch_pair=4 * vision.depth * vision.query,
            vision=vision,
        )

    @property
    def per_patch(self) -> int:
        """Operations of the linear layers of the vision tower, mergers included."""
        return self.per_patch_of_tower + self.per_patch_of_mergers

    def row(self, lengths: Sequence[int], supervised: int, patches: int, patch_pairs: int) -> int:
        """Return the operations of the forward of a row, or of several rows together, of these
        lengths. A backward takes twice as many."""
        return (
            self.per_token * sum(lengths)
            + self.attention(lengths, self.vision.token_pairs(patches, patch_pairs))
            + self.per_supervised * supervised
            + self.visual(patches, patch_pairs)
        )

    def attention(self, lengths: Sequence[int], picture_pairs: int) -> int:
        """Return the operations of the attention of all layers."""
        return sum(n * each.pair_flops(lengths, picture_pairs) for each, n in self.attentions)

    def visual(self, patches: int, patch_pairs: int) -> int:
        """Return the operations of the vision tower for these patches."""
        return self.per_patch * patches + self.per_patch_pair * patch_pairs

    def row_size(
        self, tokens: int, supervised: int, patches: int, patch_pairs: int, images: int = 0
    ) -> RowSize:
        """Return the size of a row with these counts, as planning needs it."""
        cost = float(self.row((tokens,), supervised, patches, patch_pairs))
        return RowSize(tokens, cost, patches, images)

    def example_size(self, example: Example) -> RowSize:
        """Return the size of the rows of a record, as planning needs it."""
        rows = [
            self.row_size(
                *(len(row.ids_S), row.num_supervised, row.num_patches, row.patch_pairs),
                len(row.image_grids),
            )
            for row in example
        ]
        return RowSize.of_rows(rows)


def _matrices(sizes: ModelSizes, part: Part) -> int:
    """Count the values in the matrices of a part, without its embedding tables."""
    return sum(
        tensor.num_values
        for tensor in sizes.tensors
        if tensor.part is part and len(tensor.shape) > 1 and not tensor.is_table
    )
