"""Keys and values of the tokens so far, for decoding one token of each row at a time.

Shapes: B rows, S tokens that come in at once (Megatron is sequence first), T columns of the cache,
G key/value heads, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vlm.distributed.device import to_device


class KVCache:
    """The cache of one batch, in the decoder layers of one stage.

    Column t of a row holds its token t, so rows of different lengths need no common start. What
    is to the right of a row's tokens is masked, and overwritten as the row grows.
    """

    def __init__(self, lengths: Sequence[int], columns: int, device: torch.device):
        self.lengths = list(lengths)  # tokens of each row, those of the pass under way included
        self.columns = columns
        self.device = device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [B, T, G, D]
        self.last_B: Tensor | None = None  # the column of each row's newest token
        self.mask_B11T: Tensor | None = None  # what that token attends to; None in the prefill

    @property
    def in_prefill(self) -> bool:
        return self.mask_B11T is None

    def advance(self, rows: Sequence[int]) -> None:
        """Continue with these rows, each by one token."""
        if len(rows) < len(self.lengths):
            kept = to_device(torch.tensor(rows), self.device)
            self.layers = {
                layer: (key_BTGD[kept], value_BTGD[kept])
                for layer, (key_BTGD, value_BTGD) in self.layers.items()
            }
        self.lengths = [self.lengths[row] + 1 for row in rows]
        lengths_B = to_device(torch.tensor(self.lengths), self.device)
        columns_T = torch.arange(max(self.lengths), device=self.device)
        self.last_B = lengths_B - 1
        self.mask_B11T = (columns_T < lengths_B[:, None])[:, None, None]

    def store(self, layer: int, key_SBGD: Tensor, value_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Put one layer's new keys and values into their columns; all of its columns in use."""
        if self.last_B is None:
            self.layers[layer] = (self._columns_of(key_SBGD), self._columns_of(value_SBGD))
            return self.layers[layer]
        key_BTGD, value_BTGD = self.layers[layer]
        rows_B = torch.arange(len(self.last_B), device=self.device)
        key_BTGD[rows_B, self.last_B] = key_SBGD[0]
        value_BTGD[rows_B, self.last_B] = value_SBGD[0]
        longest = max(self.lengths)
        return key_BTGD[:, :longest], value_BTGD[:, :longest]

    def _columns_of(self, new_SBGD: Tensor) -> Tensor:
        length, rows, *head = new_SBGD.shape
        # Zeros: a masked column has weight 0, but 0 x NaN of unset memory would be NaN.
        columns_BTGD = new_SBGD.new_zeros(rows, self.columns, *head)
        columns_BTGD[:, :length] = new_SBGD.transpose(0, 1)
        return columns_BTGD
