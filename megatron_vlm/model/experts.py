"""MLP of a decoder layer with experts, which are divided among the ranks of an expert parallel
group: tokens travel to the ranks of their experts and back. Then an MLP with a norm of its output,
and an MLP beside experts.

Shapes: S tokens of a row, B rows, H width of the decoder, N tokens without padding, K experts per
token, M token-expert pairs on one rank, F width of an expert, E all experts, e this rank's experts,
I inputs and O outputs of a layer.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.distributed.device import is_blackwell, to_device
from megatron_vlm.family.decoder_layers import Experts
from megatron_vlm.hf.block_weight import BlockWeight
from megatron_vlm.model.fused_ops import FusedOps, Norm
from megatron_vlm.model.megatron_versions import LayerMLP
from megatron_vlm.model.router import Counts, Routing, RowCounts, route


class ExpertLinear(nn.Module):
    """Linear layer for each of this rank's experts; its weight is unset."""

    def __init__(self, weight_eOI: Tensor, shared_out: bool):
        super().__init__()
        self.weight = nn.Parameter(weight_eOI)
        # Megatron sums the gradients of parameters with this mark over the expert data parallel
        # group, because the ranks of one expert parallel group hold different experts.
        self.weight.allreduce = not shared_out  # type: ignore[attr-defined]

    def forward(self, x_MI: Tensor, counts: RowCounts) -> Tensor:
        """Multiply the rows of x, of which `counts` belong to each expert in turn."""
        if isinstance(self.weight, BlockWeight):
            out_MO: Tensor = _TimesBlocks.apply(x_MI, self.weight, counts)
            return out_MO
        return times(x_MI, self.weight, counts)


class ExpertMLP(MegatronModule):
    """Router and experts. No token is dropped, and padding goes to no expert.

    Megatron's own (0.16) is not used because it routes padding as well, needs CUDA streams, and
    replays a routing from one list for all models of a process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        chains: FusedOps,
        sizes: Experts,
        **_: Any,
    ):
        super().__init__(config=config)
        self.group, self.activation = group, chains.swiglu
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        experts, width = sizes.count, sizes.width
        assert experts % self.ranks == 0
        self.experts, self.top_k = experts, sizes.top_k
        self.layer = 0  # `set_layer_number` sets it
        self.routing: Routing | None = None  # the pass sets it: model/decoder_layer.py
        self.load: Tensor | int = 0  # per expert, the tokens that this rank has sent in training
        # Those among them that a batch routes, and that the router would send elsewhere.
        self.rerouted: Tensor | int = 0

        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=config.params_dtype)

        self.num_local = num_local = experts // self.ranks
        self.router = nn.Parameter(weight(experts, config.hidden_size))
        self.gate_up = ExpertLinear(
            weight(num_local, 2 * width, config.hidden_size), self.ranks > 1
        )
        self.down = ExpertLinear(weight(num_local, config.hidden_size, width), self.ranks > 1)
        self.shared_expert: SharedExpert | None = None
        if sizes.shared_width:
            self.shared_expert = SharedExpert(
                config.hidden_size, sizes.shared_width, chains, device, config.params_dtype
            )

    def set_layer_number(self, number: int) -> None:
        """Set the layer's number in the whole model, counted from 1. Megatron calls this."""
        self.layer = number

    def forward(self, hidden_SBH: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Return the experts' output, zero for padding, and no bias. This is a collective of the
        expert parallel group: a rank without tokens takes part."""
        routing, flat_H = self.routing, hidden_SBH.flatten(0, 1)
        assert routing is not None
        places_N = routing.places_N
        hidden_NH = flat_H if places_N is None else flat_H.index_select(0, places_N)
        out_NH = self.mix(hidden_NH, routing)
        if places_N is None:
            return out_NH.view_as(hidden_SBH), None
        out_H = torch.zeros_like(flat_H).index_copy(0, places_N, out_NH)
        return out_H.view_as(hidden_SBH), None

    def mix(self, hidden_NH: Tensor, routing: Routing) -> Tensor:
        """Return the sum of the experts' outputs for each token."""
        given = route(hidden_NH, self.router, self.top_k, routing, self.layer)
        out_NH = self.weighted_sum(hidden_NH, *given, routing)
        if self.shared_expert is not None:
            out_NH = out_NH + self.shared_expert(hidden_NH)
        return out_NH

    def weighted_sum(
        self, hidden_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor, routing: Routing
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        is_replay = self.layer in routing.sent
        sent = routing.sent_of(self.layer, self.experts)
        if self.training and not is_replay:  # a recomputed layer would count its tokens twice
            self.load = self.load + sent.counts_E
            self.rerouted = self.rerouted + routing.rerouted.get(self.layer, 0)

        # By expert, and so by rank. Stable: weight gradients are summed in the order of the rows.
        order_M = chosen_NK.flatten().argsort(stable=True)
        back_M = order_M.argsort()
        sent_MH = _Take.apply(hidden_NH, order_M // self.top_k, back_M)
        # With all experts here, the host needs no count and does not wait.
        got_MH = self._mlp(sent_MH, sent) if self.ranks == 1 else self._exchange(sent_MH, routing)
        by_token_NKH = _Take.apply(got_MH, back_M, order_M).unflatten(0, (-1, self.top_k))
        return (weights_NK[:, None] @ by_token_NKH)[:, 0]

    def _exchange(self, sent_MH: Tensor, routing: Routing) -> Tensor:
        """Return the experts' results, from all ranks, for this rank's rows, sorted by expert."""
        num_local, counts = self.num_local, routing.counts_of(self.layer, self.group)
        first = self.rank * num_local
        by_rank = [ranks[first : first + num_local] for ranks in counts]  # rows for my experts
        totals = RowCounts(torch.tensor(by_rank).sum(0))
        local_counts = counts[self.rank]
        send = [
            sum(local_counts[start : start + num_local])
            for start in range(0, self.experts, num_local)
        ]
        receive = [sum(ranks) for ranks in by_rank]
        by_rank_MH = _Exchange.apply(sent_MH, send, receive, self.group)
        order_M = to_device(_by_expert(by_rank), sent_MH.device)
        back_M = order_M.argsort()
        by_expert_MH = _Take.apply(by_rank_MH, order_M, back_M)
        done_MH = self._mlp(by_expert_MH, totals)
        done_by_rank_MH = _Take.apply(done_MH, back_M, order_M)
        out_MH: Tensor = _Exchange.apply(done_by_rank_MH, receive, send, self.group)
        return out_MH

    def _mlp(self, x_MH: Tensor, counts: RowCounts) -> Tensor:
        out_MH: Tensor = self.down(self.activation(self.gate_up(x_MH, counts)), counts)
        return out_MH


class SharedExpert(nn.Module):
    """Expert that every token goes to, and the gate of its output. Each rank has it whole."""

    def __init__(
        self, hidden: int, width: int, chains: FusedOps, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.swiglu = chains.swiglu
        unset = {"bias": False, "device": device, "dtype": dtype}
        linear = partial(nn.utils.skip_init, nn.Linear, **unset)
        self.gate_up, self.down = linear(hidden, 2 * width), linear(width, hidden)
        self.gate = linear(hidden, 1)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        out_NH: Tensor = self.down(self.swiglu(self.gate_up(hidden_NH)))
        return self.gate(hidden_NH).sigmoid() * out_NH


def expert_mlps(chunks: Sequence[Any]) -> Iterator[ExpertMLP]:
    """Yield the expert MLPs of the decoder layers of these chunks of the model, in order."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if isinstance(layer.mlp, ExpertMLP):
            yield layer.mlp


def times(x_MI: Tensor, weight_eOI: Tensor, counts: RowCounts) -> Tensor:
    """Multiply each expert's rows [I] by its weight into O values. The kernel for all experts needs
    rows of a multiple of 16 bytes, which the rows of an adapter of small rank are not."""
    outputs, inputs = weight_eOI.shape[1:]
    aligned = outputs % 8 == inputs % 8 == 0
    grouped = x_MI.is_cuda and x_MI.dtype is torch.bfloat16 and len(x_MI) and aligned
    return (times_grouped if grouped else times_in_turn)(x_MI, weight_eOI, counts)


def times_grouped(x_MI: Tensor, weight_eOI: Tensor, counts: RowCounts) -> Tensor:
    """Multiply like `times`, by one kernel for all experts, which needs at least one row. It knows
    no other type of results than that of its inputs, so bf16 rounds weight gradients."""
    counts_e = counts.on_device(x_MI.device)
    # There the gradients of experts without rows are unset, not zero: pytorch issue 172439.
    if is_blackwell(x_MI.device):
        weight_eOI = _NoGradient.apply(weight_eOI, counts_e == 0)
    return F.grouped_mm(x_MI, weight_eOI.mT, offs=counts_e.cumsum(0, dtype=torch.int32))


def times_in_turn(x_MI: Tensor, weight_eOI: Tensor, counts: RowCounts) -> Tensor:
    """Multiply like `times`, one expert after the other."""
    # All weights are unbound at once: the gradient of each expert taken alone would be as large as
    # all of them. An expert without a row is multiplied as well, because every parameter must have
    # a gradient, even if it is zero.
    parts = zip(x_MI.split(counts.on_host), weight_eOI.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight_OI) for rows, weight_OI in parts])


class _TimesBlocks(torch.autograd.Function):
    """Rows multiplied by the frozen weights of their experts, which are stored as codes. The
    backward computes the weights once more."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_eOI: BlockWeight, counts: RowCounts) -> Tensor:
        ctx.save_for_backward(weight_eOI)
        ctx.counts = counts
        return times(x_MI, weight_eOI.dequantize(), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight_eOI,) = ctx.saved_tensors
        return times(grads[0], weight_eOI.dequantize().mT, ctx.counts), None, None


def _by_expert(held: Counts) -> Tensor:
    """Return the places [M] that sort rows by expert, from rank by rank. This runs on the host."""
    sizes = torch.tensor(held)  # [ranks, e]
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    lengths, firsts = sizes.T.flatten(), starts.T.flatten()
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(sizes.sum())) + (firsts - before).repeat_interleave(lengths)


class _Take(torch.autograd.Function):
    """Rows x[index], where the index takes each row of x equally often. Backward also takes and
    then sums: scattering would sum in a different order each time on a GPU. `back` inverts the
    index: it lists, row by row of x, the places of the row's copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = len(index) // max(len(x), 1)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        grad = grads[0].index_select(0, back)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None


class _NoGradient(torch.autograd.Function):
    """Identity with a zero gradient for some experts."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, is_idle_e: Tensor) -> Tensor:
        ctx.save_for_backward(is_idle_e)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (is_idle_e,) = ctx.saved_tensors
        return grads[0].masked_fill(is_idle_e[:, None, None], 0), None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, by the numbers that each rank of the group gets and gives."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.given = (send, receive, group)
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.given
        return _all_to_all(grads[0], receive, send, group), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class PostNormMLP(LayerMLP):
    """Megatron's MLP, and the norm of its output, which `norm_and_add` of model/layer_specs.py
    applies."""

    def __init__(self, config: TransformerConfig, *args: Any, chains: FusedOps, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_norm = Norm(chains, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_SBH: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out_SBH, _bias = super().forward(hidden_SBH, *args, **kwargs)
        return out_SBH, self.post_norm.weight


class MLPBesideExperts(ExpertMLP):
    """An MLP and experts, each with norms of their own. It reads the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device,
        chains: FusedOps,
        sizes: Experts,
        **kwargs: Any,
    ):
        super().__init__(config, device=device, chains=chains, sizes=sizes, **kwargs)
        self.activation = chains.geglu
        hidden, eps, dtype = config.hidden_size, config.layernorm_epsilon, config.params_dtype
        self.eps = eps
        unset = {"bias": False, "device": device, "dtype": dtype}
        linear = partial(nn.utils.skip_init, nn.Linear, **unset)
        width = sizes.dense_width
        parts = {"gate_up": linear(hidden, 2 * width), "down": linear(width, hidden)}
        self.dense = nn.ModuleDict(parts)
        self.router_scale = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.expert_scale = nn.Parameter(torch.empty(sizes.count, device=device, dtype=dtype))
        for name in ("pre_norm", "dense_norm", "input_norm", "experts_norm", "post_norm"):
            setattr(self, name, Norm(chains, hidden, eps))

    def mix(self, hidden_NH: Tensor, routing: Routing) -> Tensor:
        """Return the norm of the sum of the MLP's output and that of each token's experts."""
        gated_NI = self.activation(self.dense["gate_up"](self.pre_norm(hidden_NH)))
        dense_NH = self.dense["down"](gated_NI)
        width = hidden_NH.shape[-1]
        router_NH = F.rms_norm(hidden_NH, (width,), None, self.eps)
        router_NH = router_NH * self.router_scale * width**-0.5
        chosen_NK, weights_NK = route(router_NH, self.router, self.top_k, routing, self.layer)
        weights_NK = weights_NK * self.expert_scale[chosen_NK]
        of_experts = self.input_norm(hidden_NH), chosen_NK, weights_NK, routing
        experts_NH = self.weighted_sum(*of_experts)
        out_NH: Tensor = self.post_norm(self.dense_norm(dense_NH) + self.experts_norm(experts_NH))
        return out_NH
