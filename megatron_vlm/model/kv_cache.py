"""KV cache of the tokens so far, for decoding one token per row at a time. Layers with linear
attention keep a state of constant size instead.

Shapes: B rows, S tokens that arrive at once (Megatron is sequence first), T columns of the cache, G
key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.distributed.device import to_device

# A cache grows by this number of columns, so it is copied once in this number of tokens.
CACHE_BLOCK = 64


Pair = tuple[Tensor, Tensor]


class KVCache:
    """KV cache of rows that run each pass together, in the decoder layers of one stage.

    Column t of a row holds its token t, so rows of different lengths need no common start. Columns
    to the right of a row's tokens are masked, and overwritten as the row grows. The number of
    columns is that of the longest row, rounded up to a multiple of CACHE_BLOCK.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.lengths = list(lengths)  # tokens of each row, including the current pass
        self.before = 0  # tokens before this pass, in a prefill of one row that takes several
        self.device = device
        self.layers: dict[int, Pair] = {}  # keys and values [B, T, G, D]
        # States of layers with linear attention: the newest outputs of their first linear
        # [B, W, X] and the state of the rule in fp32 [B, V, D, E].
        self.states: dict[int, Pair] = {}
        self.last_B: Tensor | None = None  # the column of each row's newest token
        self.mask_B11T: Tensor | None = None  # columns that it attends to; None in the prefill

    @property
    def in_prefill(self) -> bool:
        return self.mask_B11T is None

    def extend(self, lengths: Sequence[int]) -> None:
        """Continue the prefill by this number of tokens of each row. Only one row continues."""
        assert not self.lengths or len(self.lengths) == len(lengths) == 1
        self.before = sum(self.lengths)
        self.lengths = [self.before + length for length in lengths]

    def advance(self) -> None:
        """Continue each row by one token."""
        self.lengths = [length + 1 for length in self.lengths]
        for layer, (key_BTGD, value_BTGD) in self.layers.items():
            self.layers[layer] = (self._with_room(key_BTGD), self._with_room(value_BTGD))
        lengths_B = to_device(torch.tensor(self.lengths), self.device)
        columns_T = torch.arange(max(self.lengths), device=self.device)
        self.last_B = lengths_B - 1
        self.mask_B11T = (columns_T < lengths_B[:, None])[:, None, None]

    def mask_of(self, window: int | None) -> Tensor | None:
        """Return the columns that a newest token attends to; a window has the last ones."""
        if window is None or max(self.lengths) <= window or self.mask_B11T is None:
            return self.mask_B11T
        assert self.last_B is not None
        columns_T = torch.arange(max(self.lengths), device=self.device)
        return self.mask_B11T & (columns_T > self.last_B[:, None, None, None] - window)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order. Only rows whose place changes are copied."""
        all_stay = list(rows) == list(range(len(self.lengths)))
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.layers, self.states = {}, {}
        if self.states and not all_stay:  # unlike the columns, they have no spare rows
            rows_B = to_device(torch.tensor(rows), self.device)
            for layer, state in self.states.items():
                self.states[layer] = (state[0][rows_B], state[1][rows_B])
        moves = [(place, row) for place, row in enumerate(rows) if place != row]
        if moves:
            target, source = to_device(torch.tensor(moves), self.device).unbind(1)
            for key_BTGD, value_BTGD in self.layers.values():
                key_BTGD[target] = key_BTGD[source]
                value_BTGD[target] = value_BTGD[source]

    def add(self, other: "KVCache", rows: Sequence[int], spent: bool) -> None:
        """Append rows of another cache behind the rows of this one; a row may be taken several
        times. A `spent` cache is not used afterwards, so its memory is freed on the way."""
        first, longest = len(self.lengths), max(other.lengths[row] for row in rows)
        self.lengths += [other.lengths[row] for row in rows]
        rows_B = to_device(torch.tensor(rows), self.device)
        for layer in list(other.layers):
            other_layer = other.layers.pop(layer) if spent else other.layers[layer]
            own_layer = self.layers.pop(layer, (other_layer[0][:0, :0], other_layer[1][:0, :0]))
            key_BTGD, value_BTGD = (self._with_room(each) for each in own_layer)
            for into_BTGD, of_BTGD in zip((key_BTGD, value_BTGD), other_layer, strict=True):
                into_BTGD[first : len(self.lengths), :longest] = of_BTGD[rows_B, :longest]
            self.layers[layer] = (key_BTGD, value_BTGD)
        for layer in list(other.states):
            new = other.states.pop(layer) if spent else other.states[layer]
            added = [part[rows_B] for part in new]
            if layer in self.states:
                own = self.states[layer]
                added = [torch.cat(pair) for pair in zip(own, added, strict=True)]
            self.states[layer] = (added[0], added[1])

    def real_tokens(self, tokens: int) -> Tensor:
        """Return [B, S]: which tokens of a prefill of this length are no padding."""
        lengths_B = to_device(torch.tensor(self.lengths), self.device) - self.before
        return torch.arange(tokens, device=self.device) < lengths_B[:, None]

    def newest_tokens(self, x_BSC: Tensor, count: int) -> Tensor:
        """Return the last `count` real tokens [B, W, C] of each row of a prefill, after zeros."""
        padded_BSC = F.pad(x_BSC, (0, 0, count, 0))
        lengths_B = to_device(torch.tensor(self.lengths), self.device)
        places_BW = lengths_B[:, None] + torch.arange(count, device=self.device)
        rows_B1 = torch.arange(len(self.lengths), device=self.device)[:, None]
        return padded_BSC[rows_B1, places_BW]

    def store(self, layer: int, key_SBGD: Tensor, value_SBGD: Tensor) -> Pair:
        """Store one layer's new keys and values, and return all of its columns in use."""
        if self.last_B is None:
            new = _rows_first(key_SBGD), _rows_first(value_SBGD)
            if self.before:
                pairs = zip(self.layers[layer], new, strict=True)
                new = cast(Pair, tuple(torch.cat(pair, dim=1) for pair in pairs))
            self.layers[layer] = new
            return new
        key_BTGD, value_BTGD = self.layers[layer]
        rows, longest = len(self.lengths), max(self.lengths)
        rows_B = torch.arange(rows, device=self.device)
        key_BTGD[rows_B, self.last_B] = key_SBGD[0]
        value_BTGD[rows_B, self.last_B] = value_SBGD[0]
        return key_BTGD[:rows, :longest], value_BTGD[:rows, :longest]

    def _with_room(self, held_BTGD: Tensor) -> Tensor:
        """Return this tensor, or a larger copy where the cache has outgrown it."""
        rows, columns, *head = held_BTGD.shape
        longest = max(self.lengths)
        if rows >= len(self.lengths) and columns >= longest:
            return held_BTGD
        rows = max(rows, len(self.lengths))
        columns = max(columns, -(-longest // CACHE_BLOCK) * CACHE_BLOCK)
        # Filled with zeros: a masked column has weight 0, but 0 x NaN of unset memory would be NaN.
        wider_BTGD = held_BTGD.new_zeros(rows, columns, *head)
        wider_BTGD[: len(held_BTGD), : held_BTGD.shape[1]] = held_BTGD
        return wider_BTGD


def _rows_first(new_SBGD: Tensor) -> Tensor:
    # Copied, because a view would keep the queries next to these in memory as well.
    return new_SBGD.transpose(0, 1).clone(memory_format=torch.contiguous_format)
