"""The next token of a row: which of its logits take part, and which of them is drawn.

Shapes: B rows, V the vocabulary, v this rank's part of it with its padding, T the ranks of TP, 2 an
id and its log-prob.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.distributed.grid import GroupAxis
from megatron_vlm.training.completions import SamplingSettings


def whole_logits(logits_Bv: Tensor, vocab: int, tp: GroupAxis) -> Tensor:
    """The logits [B, V] of all TP ranks in fp32, without the padding of the vocabulary."""
    rows, width = logits_Bv.shape
    found = logits_Bv.new_empty(tp.size * rows, width)
    dist.all_gather_into_tensor(found, logits_Bv.contiguous(), group=tp.group)
    return found.view(tp.size, rows, width).transpose(0, 1).flatten(1)[:, :vocab].float()


def pick(
    logits_BV: Tensor,
    settings: SamplingSettings,
    never: Sequence[int],
    turns: Sequence[tuple[int, int]],
) -> Tensor:
    """An id for each row, and its log-prob before anything is cut off, at temperature 1, or with
    settings.tempered at that of the settings: [B, 2] in float64, which holds both exactly. `turns`
    are the seed of each row and the number of its token. Ids that are in `never` are not drawn;
    greedily, they may be taken."""
    ids_B = logits_BV.argmax(dim=-1)  # of several equal ones the lowest id
    if settings.temperature > 0:
        scores_BV = logits_BV / settings.temperature
        scores_BV[:, list(never)] = -torch.inf
        scores_BV = likeliest(scores_BV, settings.top_k, settings.top_p)
        ids_B = (scores_BV + gumbel(turns, logits_BV)).argmax(dim=-1)
    if settings.tempered and settings.temperature > 0:
        logits_BV = logits_BV / settings.temperature
    log_probs_B = logits_BV.log_softmax(dim=-1).gather(1, ids_B[:, None])[:, 0]
    return torch.stack([ids_B.double(), log_probs_B.double()], dim=-1)


def likeliest(scores_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """The scores that take part; the others are -inf. As in vLLM and transformers: the `top_k`
    highest, with all that are equal to the last of them; of these the fewest whose probabilities
    add up to `top_p`, of equal ones those with the higher ids; but at least one."""
    if 0 < top_k < scores_BV.shape[1]:
        least_B1 = scores_BV.topk(top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if top_p < 1:
        rising_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
        out_BV = rising_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        out_BV[:, -1] = False
        scores_BV = scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)
    return scores_BV


def gumbel(turns: Sequence[tuple[int, int]], like_BV: Tensor) -> Tensor:
    """Noise [B, V]: the id of the largest score with it is a sample. Drawn for each row alone, so
    that it depends on nothing but the row's turn."""
    noise_BV = torch.empty(like_BV.shape, dtype=torch.float64, device=like_BV.device)
    generator = torch.Generator(like_BV.device)
    for row, (seed, token) in enumerate(turns):
        # Similar seeds give similar first numbers: spread the seeds.
        spread = hashlib.blake2b(f"{seed} {token}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(spread, "little") >> 1)
        noise_BV[row].exponential_(generator=generator)
    return noise_BV.log_().neg_().float()
