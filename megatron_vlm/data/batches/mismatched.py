"""Mismatched rows: a prompt with the answer to another prompt. KTO estimates a divergence with
them."""

from collections.abc import Sequence

import torch

from megatron_vlm.data.tokens.row import IGNORE, PlacedRow, continue_row, cut_row, place_row
from megatron_vlm.data.tokens.sample import Example, Sample
from megatron_vlm.family.spec import Tokens


def mismatched_rows(rows: Sequence[PlacedRow], partner: Example, tokens: Tokens) -> list[PlacedRow]:
    """Return the prompt of each row, with its pictures, followed by an answer of the partner."""
    return [
        _with_answer(placed, partner[min(number, len(partner) - 1)], tokens)
        for number, placed in enumerate(rows)
    ]


def _with_answer(placed: PlacedRow, other: Sample, tokens: Tokens) -> PlacedRow:
    row = placed.row
    start = int((row.labels_S != IGNORE).nonzero()[0])
    first = int(other.trained_S.nonzero()[0][0])
    ids, trained = other.ids_S[first:], other.trained_S[first:]
    # Pictures in the other answer are left out, since the row has no pixels of them.
    is_text = ~torch.isin(
        torch.from_numpy(ids), torch.tensor([tokens.image_id, tokens.video_id])
    ).numpy()
    ids, trained = ids[is_text], trained[is_text]
    joined = continue_row(cut_row(row, start, tokens), ids.tolist())
    joined.labels_S[start:][torch.from_numpy(~trained)] = IGNORE
    return place_row(joined, tokens, "a prompt with another answer")
