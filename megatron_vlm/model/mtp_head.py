"""MTP head of Qwen3.5 ("multi-token prediction"): at each place it guesses the token after
the next one. It learns from the model's own distribution there, and nothing else learns from it.

Shapes: S tokens (Megatron is sequence first), B rows, H width of the decoder, N supervised places,
J most likely tokens of a place, R these and all others together.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.head import OutputLayer, Targets, top_events_head, top_tokens_head

COMPARED = 64  # tokens of the model's own distribution that are compared one by one


class MtpHead(nn.Module):
    """Product, layer and norms of the MTP head, in the last chunk of the model. Its weights
    are unset."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        layers: int,
        groups: ProcessGroupCollection,
        chunk: int | None,
    ):
        """Create the head after as many `layers` as this chunk of the model has."""
        super().__init__()
        self.config, width = config, config.hidden_size
        # Every rank has it whole. Like a norm's, its gradient is the same on all TP ranks.
        self.fc = nn.utils.skip_init(nn.Linear, 2 * width, width, bias=False)
        norm = partial(build_module, submodules.layer_norm, config=config, hidden_size=width)
        self.pre_fc_norm_embedding = norm(eps=config.layernorm_epsilon)
        self.pre_fc_norm_hidden = norm(eps=config.layernorm_epsilon)
        (layer,) = submodules.layer_specs
        number = layers + 1  # Megatron adds the layers of the chunks before
        of_chunk = {"layer_number": number, "pg_collection": groups, "vp_stage": chunk}
        self.layers = nn.ModuleList([build_module(layer, config=config, **of_chunk)])
        self.norm = norm(eps=config.layernorm_epsilon)

    def forward(
        self,
        input_SBH: Tensor,
        hidden_SBH: Tensor,
        rotary: Tensor,
        context: PassContext,
        places_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [N, H] of guesses of the targets of supervised places, from the
        decoder's input and its output after the final norm, and whether each is a guess. A place
        reads the input of the next one: the guess at place 3 reads the hidden state there and the
        input of place 4, and is compared with the target of place 4, which is token 5. So the guess
        of a supervised place is that of the place before; the first one of a row has none."""
        next_SBH = torch.cat([input_SBH[1:], torch.zeros_like(input_SBH[:1])])
        both = self.pre_fc_norm_embedding(next_SBH), self.pre_fc_norm_hidden(hidden_SBH)
        # It never rounds the weight's gradient to bf16, as in the decoder's layers.
        joined_SBH = linear_with_grad_accumulation_and_async_allreduce(
            torch.cat(both, dim=-1),
            self.fc.weight,
            None,
            self.config.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )

        def layer(hidden_SBH: Tensor) -> Tensor:
            given = {"rotary_pos_emb": rotary, "attention_bias": context}
            out_SBH: Tensor = self.layers[0](hidden_SBH, None, **given)[0]
            return out_SBH

        if self.config.recompute_granularity == "full" and self.training:
            out_SBH = tensor_parallel.checkpoint(layer, False, joined_SBH)
        else:
            out_SBH = layer(joined_SBH)
        before_N = places_N - input_SBH.shape[1]
        guess_NH = out_SBH.flatten(0, 1).index_select(0, before_N.clamp(min=0))
        return self.norm(guess_NH), before_N >= 0


@dataclass(frozen=True)
class MtpEvents:
    """Distributions of the token after the next one, at each supervised place. Only the MTP
    head gets a gradient from them."""

    guess_NR: Tensor  # log-probs of the head's guess
    own_NR: Tensor  # log-probs of the model itself
    accepted_N: Tensor  # probability of the head's most likely token in the model's distribution
    is_guess_N: Tensor  # false at the first place of a row, where the others mean nothing


def mtp_events(
    guess_NH: Tensor, is_guess_N: Tensor, own_NH: Tensor, layer: OutputLayer
) -> MtpEvents:
    """Compare the guesses with the model's own distribution, over its most likely tokens and
    all others together."""
    frozen = replace(layer, is_frozen=True)
    none = Targets(torch.zeros(len(own_NH), dtype=torch.long, device=own_NH.device))
    with torch.no_grad():
        count = min(COMPARED, layer.vocab)
        own = top_events_head(own_NH, frozen, none, count=count, temperature=1.0)
        best_N1 = top_tokens_head(guess_NH, frozen, none, count=1, temperature=1.0).top_ids_NJ
    assert own.top_ids_NJ is not None and own.events_NR is not None
    guess_NR = frozen.predict_events(guess_NH, none.ids_M, own.top_ids_NJ)[1]
    is_best_NJ = own.top_ids_NJ == best_N1
    accepted_N = (own.events_NR[:, :-1].exp() * is_best_NJ).sum(1)
    return MtpEvents(guess_NR, own.events_NR, accepted_N, is_guess_N)
