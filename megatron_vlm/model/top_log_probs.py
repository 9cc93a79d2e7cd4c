"""Most likely tokens at each place, without the logits of the whole vocabulary at once.

Shapes: N places, v a slice of this rank's part of the padded vocabulary, k requested tokens per
place, T the ranks of TP, 2 an id and its log-prob.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.model.log_probs import Factors, logits_of, part_of, slices


@torch.no_grad()
def likeliest_tokens(
    products: Sequence[Factors],
    count: int,
    temperature: float,
    vocab: int,
    tp_group: dist.ProcessGroup,
) -> Tensor:
    """Return the `count` most likely tokens of each place, in falling order, with their log-probs
    at this temperature, from the same logits as `predict`: [N, k, 2] in float64, which holds both
    exactly. The result is the same on all TP ranks."""
    first, valid = part_of(products, vocab, tp_group)
    hidden_NH = products[0][0]
    places = len(hidden_NH)
    logits_Nk = hidden_NH.new_full((places, count), -torch.inf, dtype=torch.float)
    ids_Nk = torch.zeros(places, count, dtype=torch.long, device=hidden_NH.device)
    total_N = hidden_NH.new_full((places,), -torch.inf, dtype=torch.float)  # log of the sum
    for start, end in slices(places, valid):
        logits_Nv = logits_of(products, start, end) / temperature
        total_N = torch.logaddexp(total_N, logits_Nv.logsumexp(dim=1))
        ids_v = torch.arange(first + start, first + end, device=ids_Nk.device)
        slice_top_Nk = logits_Nv.topk(min(count, end - start), dim=1)
        logits_Nk, ids_Nk = _top_logits(
            torch.cat([logits_Nk, slice_top_Nk.values], dim=1),
            torch.cat([ids_Nk, ids_v[slice_top_Nk.indices]], dim=1),
            count,
        )
    local_top = torch.cat([logits_Nk.double(), ids_Nk.double(), total_N.double()[:, None]], dim=1)
    rank_tops = [torch.empty_like(local_top) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(rank_tops, local_top, group=tp_group)
    logits, ids, totals = torch.stack(rank_tops, dim=1).split([count, count, 1], dim=2)
    best_Nk, best_ids_Nk = _top_logits(logits.flatten(1), ids.flatten(1), count)
    log_probs_Nk = best_Nk - totals[..., 0].logsumexp(dim=1, keepdim=True)
    return torch.stack([best_ids_Nk, log_probs_Nk], dim=-1)


def _top_logits(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(count, dim=1)
    return best.values, ids.gather(1, best.indices)
