"""The next token of a row: the logits that take part, and the id that is sampled.

Shapes: B rows, V the vocabulary, v this rank's part of it with its padding, N ids, T the ranks of
TP, 2 an id and its log-prob.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.distributed.grid import GroupAxis


def whole_logits(logits_Bv: Tensor, vocab: int, tp: GroupAxis) -> Tensor:
    """Gather the logits [B, V] of all TP ranks in fp32, without the padding of the vocabulary."""
    rows, width = logits_Bv.shape
    gathered = logits_Bv.new_empty(tp.size * rows, width)
    dist.all_gather_into_tensor(gathered, logits_Bv.contiguous(), group=tp.group)
    return gathered.view(tp.size, rows, width).transpose(0, 1).flatten(1)[:, :vocab].float()


def pick(
    logits_BV: Tensor, settings: SamplingSettings, never_N: Tensor, turns: Sequence[tuple[int, int]]
) -> Tensor:
    """Pick an id for each row, none of `never_N`. Return it with its log-prob before any cut-off,
    [B, 2] in float64, which holds both exactly. The log-prob is at temperature 1, or with
    settings.tempered at that of the settings. `turns` are the seed of each row and the number of
    its token."""
    scores_BV = logits_BV.index_fill(1, never_N, -torch.inf)
    ids_B = scores_BV.argmax(dim=-1)  # the lowest id among equal logits
    if settings.temperature > 0:
        scores_BV = likeliest(scores_BV / settings.temperature, settings.top_k, settings.top_p)
        ids_B = (scores_BV + gumbel(turns, logits_BV)).argmax(dim=-1)
    if settings.tempered and settings.temperature > 0:
        logits_BV = logits_BV / settings.temperature
    log_probs_B = logits_BV.log_softmax(dim=-1).gather(1, ids_B[:, None])[:, 0]
    return torch.stack([ids_B.double(), log_probs_B.double()], dim=-1)


def likeliest(scores_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the scores that do not take part to -inf, as vLLM and transformers do. The `top_k`
    highest scores remain, with all that are equal to the last of them. Among these, the fewest
    remain whose probabilities add up to `top_p`; among equal scores, those with the higher ids
    remain. At least one score remains."""
    if 0 < top_k < scores_BV.shape[1]:
        lowest_B1 = scores_BV.topk(top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < lowest_B1, -torch.inf)
    if top_p < 1:
        rising_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
        out_BV = rising_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        out_BV[:, -1] = False
        scores_BV = scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)
    return scores_BV


def gumbel(turns: Sequence[tuple[int, int]], like_BV: Tensor) -> Tensor:
    """Return noise [B, V]: the id of the largest score with noise is a sample. Each row is drawn
    separately, so that its noise depends on nothing but the row's turn."""
    noise_BV = torch.empty(like_BV.shape, dtype=torch.float64, device=like_BV.device)
    generator = torch.Generator(like_BV.device)
    for row, (seed, token) in enumerate(turns):
        # Similar seeds give similar first numbers, so the seeds are spread by a hash.
        spread = hashlib.blake2b(f"{seed} {token}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(spread, "little") >> 1)
        noise_BV[row].exponential_(generator=generator)
    return noise_BV.log_().neg_().float()
