"""Stage of the model as a Megatron GPTModel: embed, encode images, scatter, decode, predict.

Shapes: S tokens (Megatron is sequence first), B rows, H width of the decoder, V visual features,
K DeepStack features, N supervised positions, 3 the axes time, height, width.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.data.tokens.visuals import check_placeholders, join_grids
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.carry import Carry
from megatron_vlm.model.decoder_layer import PassContext
from megatron_vlm.model.flash_windows import PictureTokens
from megatron_vlm.model.head import Head, HeadOutput, OutputLayer, Targets, log_probs_head
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.model.mtp_head import MtpHead, mtp_events
from megatron_vlm.model.offload_activations import ActivationOffload, OffloadPass
from megatron_vlm.model.router import Routing
from megatron_vlm.model.vision import VisualPlan, encode, mark_ready_with_zero_grads

# From supervised places [N], the hidden states [N, H] of guesses and which are any.
Draft = Callable[[Tensor], tuple[Tensor, Tensor]]


class StageModel(GPTModel):
    """Pipeline stage or one of its chunks. The vision tower is in the first chunk of stage 0. A
    stage sends a `Carry` to the next one."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: ModelSizes,
        *,
        padded_vocab: int,
        layers: TransformerBlockSubmodules,
        tower: nn.Module | None,
        last: bool,
        share_images: bool,
        rotary: nn.Module,
        chunk: int | None = None,
        offload: ActivationOffload | None = None,
    ):
        """Create the chunk, number `chunk` of a stage with several. Only the first one of the
        pipeline has a `tower`. `rotary` makes rotary embeddings, and `offload` moves activations to
        the host."""
        super().__init__(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab,
            max_sequence_length=sizes.text.max_positions,
            pre_process=tower is not None,
            post_process=last,
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="mrope",
            scatter_embedding_sequence_parallel=False,
            vp_stage=chunk,
        )
        self.sizes = sizes
        self.share_images = share_images
        self.rotary_pos_emb = rotary
        self.offload = offload
        self.kernels: dict[Any, str] = {}  # by kind of attention, the same for all chunks
        self.ends_at_places = last and bool(layers.layer_specs) and sizes.text.ends_at_places
        if self.ends_at_places:
            self.decoder.layers[-1].is_last = True
        if offload is not None:
            offload.watch(self.decoder, config.gradient_accumulation_fusion)
        if tower is not None:
            self.vision_model = tower
        if last and sizes.has_score:
            self.score = nn.Linear(sizes.text.hidden, 1, bias=False)

    def add_mtp_head(self, submodules: TransformerBlockSubmodules) -> None:
        """Add an MTP head, which the last chunk of the pipeline has if it is trained."""
        self.mtp_head = MtpHead(
            self.config, submodules, len(self.decoder.layers), self.pg_collection, self.vp_stage
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Store the previous stage's output, which Megatron's schedules hand over."""
        self.stage_input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        visuals: VisualPlan | None = None,
        cache: KVCache | None = None,
        **head: Any,
    ) -> Tensor | HeadOutput:
        """Return the input of the next stage; on the last stage return logits, or with labels what
        `head` computes at the supervised positions, which are log-probs by default. labels[b, s] is
        the target of position s. The logits are for all positions [B, S, V], or [N, V] for the
        positions that a loss_mask [B, S] picks.

        A caller that knows these values on the host passes them from there, so that the host does
        not wait for the device: `visuals` from `plan_visuals` in place of the grids; on each stage,
        whether the micro-batch `has_visuals`, and for attention in windows its `pictures`; as
        loss_mask the places [N] that it would pick in the flattened [S * B], with their `targets`
        in place of labels; and as `routing` the real tokens, for a model with experts.

        Rows are padded on the right, so no mask of padding is needed. Hugging Face's
        attention_mask [B, S] is accepted, and refused where rows are not padded on the right.
        """
        if head.pop("packed_seq_params", None) is not None:
            raise ConfigError(
                ": sequence packing is not supported",
                key="packed_seq_params",
                allowed=(None,),
                remedy="pass None",
            )
        routing: Routing | None = head.pop("routing", None)
        has_visuals: bool = head.pop("has_visuals", True)
        pictures: PictureTokens | None = head.pop("pictures", None)
        if attention_mask is not None:
            _check_right_padded(attention_mask)
            routing = routing or Routing(_places(attention_mask.bool()))
        trains_mtp = self.sizes.trains_mtp and torch.is_grad_enabled()
        if self.pre_process:
            hidden_SBH = self._embed(input_ids)
            features_KSBH = None
            # Generated tokens follow the prefill: a placeholder among them has no image or video.
            if cache is None or cache.in_prefill:
                if visuals is None:
                    grids = image_grid_thw, video_grid_thw
                    check_placeholders(input_ids, *grids, tokens=self.sizes.tokens)
                    visuals = self.plan_visuals(input_ids.cpu(), join_grids(*grids), {})
                    visuals = visuals.moved(lambda tensor: tensor.to(input_ids.device))
                pixels = [pixel_values, pixel_values_videos]
                hidden_SBH, features_KSBH = self._see(hidden_SBH, pixels, visuals)
            mtp_input_SBH = hidden_SBH.detach() if trains_mtp else None
            carry = Carry(self._for_recompute(hidden_SBH), features_KSBH, mtp_input_SBH)
        else:
            assert self.stage_input is not None
            carry = Carry.from_tensor(self.stage_input, input_ids.shape[1], trains_mtp)
            self.decoder.set_input_tensor(carry.hidden_SBH)
        offload = self._begin_offload()
        places = head.get("loss_mask") if self.ends_at_places and cache is None else None
        places_N = places if places is not None and places.dim() == 1 else None
        more: dict[str, Any] = {"places_N": places_N, "pictures": pictures}
        more["all_places"] = [] if trains_mtp and places_N is not None else None
        given = PassContext(input_ids, routing or Routing(), cache, offload, has_visuals, **more)
        with nullcontext() if offload is None else offload.saving():
            output = super().forward(
                input_ids,
                position_ids,
                None,
                decoder_input=carry.hidden_SBH if self.pre_process else None,
                extra_block_kwargs={"context": carry.deepstack_KSBH, "attention_bias": given},
            )
        if self.post_process:
            if trains_mtp:
                head["draft"] = self._drafting(carry, output, position_ids, given)
            return self._head(output, labels, is_picked=places_N is not None, **head)
        return replace(carry, hidden_SBH=output).to_tensor(len(self.decoder.layers))

    def _drafting(
        self, carry: Carry, output_SBH: Tensor, position_ids_3BS: Tensor, given: PassContext
    ) -> Draft:
        """Return the MTP head with all that it reads, from which nothing else learns."""
        assert carry.input_SBH is not None
        hidden_SBH = output_SBH.detach()
        if given.all_places:
            with torch.no_grad():
                hidden_SBH = self.decoder.final_layernorm(given.all_places[0])
            given.all_places[0] = hidden_SBH.new_empty(0)  # a recomputation makes no other one
        # Its router follows no given choices, and adds no losses.
        own = PassContext(given.ids_BS, Routing(given.routing.places_N))
        rotary = self.rotary_pos_emb(position_ids_3BS)
        return partial(self.mtp_head, carry.input_SBH, hidden_SBH, rotary, own)

    def _embed(self, ids_BS: Tensor) -> Tensor:
        """Return the tokens' embeddings, times the family's scale. The padding token's embedding is
        used but does not learn here, as in transformers."""
        hidden_SBH: Tensor = self.embedding(input_ids=ids_BS, position_ids=None)
        if (scale := self.sizes.text.embed_scale) is not None:
            hidden_SBH = hidden_SBH * hidden_SBH.new_tensor(scale)
        if self.sizes.text.pad_id is None:
            return hidden_SBH
        is_pad_SB1 = (ids_BS == self.sizes.text.pad_id).T[..., None]
        # Contiguous for any strides of the mask, because a stage without layers sends this tensor
        # on.
        return torch.where(is_pad_SB1, hidden_SBH.detach(), hidden_SBH).contiguous()

    def _for_recompute(self, hidden_SBH: Tensor) -> Tensor:
        """Return the decoder's input with a gradient where the decoder learns: recomputed layers
        learn only if one of their inputs has one, and it has none if nothing before them learns."""
        full = self.config.recompute_granularity == "full" and self.training
        if hidden_SBH.requires_grad or not full or not torch.is_grad_enabled():
            return hidden_SBH
        learns = any(param.requires_grad for param in self.decoder.parameters())
        return hidden_SBH.detach().requires_grad_() if learns else hidden_SBH

    def _begin_offload(self) -> OffloadPass | None:
        """Return the pass that moves activations to the host; None outside of training. A stage's
        input stays on the device, because Megatron's schedules keep it."""
        if self.offload is None or not self.training or not torch.is_grad_enabled():
            return None
        staying = []
        if not self.pre_process:
            assert self.stage_input is not None
            staying = [self.stage_input]
        return OffloadPass(self.offload, self.decoder.layers, staying)

    def plan_visuals(
        self,
        ids_BS: Tensor,
        grid_I3: Tensor,
        of_patches: Mapping[str, Tensor],
        visual_of_O: Tensor | None = None,
    ) -> VisualPlan:
        """Return the plan of the images, then the videos, of these rows, all on the host, where the
        placeholders have been checked. For the last two, see MicroBatch."""
        tokens = self.sizes.tokens
        # Images come first, then videos, in the same order as their patches.
        places = [_places(ids_BS == token) for token in (tokens.image_id, tokens.video_id)]
        group = self.pg_collection.tp if self.share_images else None
        more = group, of_patches, visual_of_O
        return VisualPlan.create(self.sizes.vision, grid_I3, torch.cat(places), *more)

    def _see(
        self, hidden_SBH: Tensor, pixels: Sequence[Tensor | None], plan: VisualPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Encode images and videos in one pass and put their features in their tokens' places."""
        patches = [part for part in pixels if part is not None]
        if not patches:
            return mark_ready_with_zero_grads(hidden_SBH, self.vision_model), None
        visual = encode(
            self.vision_model, self.sizes.vision, torch.cat(patches), plan, self.pg_collection.tp
        ).to(hidden_SBH.dtype)
        flat = hidden_SBH.flatten(0, 1).index_copy(0, plan.places_V, visual[0])
        if len(visual) == 1:  # a tower without DeepStack
            return flat.view_as(hidden_SBH), None
        features = hidden_SBH.new_zeros(len(visual) - 1, *flat.shape)
        features = features.index_copy(1, plan.places_V, visual[1:])
        return flat.view_as(hidden_SBH), features.unflatten(1, hidden_SBH.shape[:2])

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        """Return the hidden states: Megatron's forward cannot pass on the arguments of `_head`."""
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """Part of the head's weight on this rank of the last stage; it may be the embedding's."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _head(
        self,
        hidden_SBH: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        head: Head | None = None,
        targets: Targets | None = None,
        is_picked: bool = False,
        draft: Draft | None = None,
    ) -> Tensor | HeadOutput:
        """Apply the head at supervised positions only, because the others carry no loss. If
        `is_picked`, only these positions have hidden states, [N, 1, H]. `draft` returns the
        hidden states of guesses of the same targets."""
        text, tp_group = self.sizes.text, self.pg_collection.tp
        layer = OutputLayer(
            self.output_layer, self.head_weight, text.vocab, tp_group, text.logit_cap
        )
        if self.sizes.has_score:
            layer = replace(layer, score_1H=self.score.weight)
        places_N = loss_mask
        if places_N is None or places_N.dim() == 2:
            picked_BS = loss_mask if labels is None else labels != IGNORE
            if picked_BS is None:
                return layer.logits(hidden_SBH).transpose(0, 1)
            places_N = _places(picked_BS)
            targets = None if labels is None else Targets(labels.T.flatten()[places_N])
        hidden_NH = hidden_SBH.flatten(0, 1)
        if not is_picked:
            hidden_NH = hidden_NH.index_select(0, places_N)
        if targets is None:
            return layer.logits(hidden_NH[:, None])[:, 0]
        output = (head or log_probs_head)(hidden_NH, layer, targets)
        if draft is None:
            return output
        return replace(output, mtp=mtp_events(*draft(places_N), hidden_NH.detach(), layer))


def _check_right_padded(mask_BS: Tensor) -> None:
    if mask_BS.dim() != 2:
        shape = tuple(mask_BS.shape)
        raise DataError(key="attention_mask.shape", found=shape, allowed="[rows, tokens]")
    wrong_B = (mask_BS[:, 1:] > mask_BS[:, :-1]).any(dim=1)
    if wrong_B.any():
        row = int(wrong_B.nonzero()[0])
        raise DataError(
            "is not padded on the right", key=f"attention_mask[{row}]", remedy="pad it there"
        )


def _places(mask_BS: Tensor) -> Tensor:
    """Return the places of the true elements in the flattened [S * B] order, row by row."""
    row, column = mask_BS.nonzero(as_tuple=True)
    return column * len(mask_BS) + row
