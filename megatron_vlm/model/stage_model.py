"""Qwen3-VL as a Megatron GPTModel: embed, see, scatter, decode, predict.

Shapes: S tokens (Megatron is sequence first), B rows, H width of the decoder, V visual features,
K DeepStack features still to be added, N supervised positions, 3 the axes time, height, width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.data.tokens.mrope_positions import check_placeholders
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.model.attention import using_cache
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.model.log_probs import ExtraOutput, predict
from megatron_vlm.model.rope import InterleavedMRoPE
from megatron_vlm.model.router import Routing
from megatron_vlm.model.top_log_probs import likeliest_tokens
from megatron_vlm.model.vision import VisualPlan, encode, mark_ready_with_zero_grads


class StageModel(GPTModel):
    """One pipeline stage, or one of its chunks. The vision tower is in the first chunk of stage 0.

    To the next one travels cat([hidden, DeepStack features not yet added]) along the sequence, so
    any of them may hold the first decoder layers and the first may hold none.
    """

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
        rotary: InterleavedMRoPE,
        chunk: int | None = None,
    ):
        """`layers` are the decoder layers, `rotary` makes what they rotate by; the first chunk of
        the pipeline alone has a `tower`. `chunk`: its number in the stage, where it has several."""
        super().__init__(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab,
            max_sequence_length=sizes.text.max_positions,
            pre_process=tower is not None,
            post_process=last,
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="mrope",
            rotary_base=sizes.text.rope_theta,
            scatter_embedding_sequence_parallel=False,
            vp_stage=chunk,
        )
        self.sizes = sizes
        self.share_images = share_images
        self.rotary_pos_emb = rotary
        if tower is not None:
            self.vision_model = tower

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Megatron's schedules hand over what the stage before sent."""
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
    ) -> Tensor:
        """A stage's output: for the next stage; on the last stage what `predict` gives for the
        supervised positions (labels given; labels[b, s] is what position s predicts), or logits: of
        all positions [B, S, V], or of those that a loss_mask [B, S] picks [N, V].

        Who knows these on the host gives them from there, lest the device be asked and waited for:
        `visuals` as `plan_visuals` makes them, in place of the grids; as loss_mask the places [N]
        that it would pick in the flattened [S * B], and labels [N] of these, or [M], and as `of_M`
        the place of each; as `routing`, which tokens are real, for a model with experts.

        Attention is causal and rows are padded on the right, so no mask is needed; Hugging Face's
        attention_mask [B, S] is taken, and refused where it says anything else.
        """
        if head.pop("packed_seq_params", None) is not None:
            raise ConfigError(
                ": sequence packing is not supported",
                key="packed_seq_params",
                allowed=(None,),
                remedy="pass None",
            )
        routing: Routing | None = head.pop("routing", None)
        if attention_mask is not None:
            _check_right_padded(attention_mask)
            routing = routing or Routing(_places(attention_mask.bool()))
        if self.pre_process:
            hidden_SBH = self._embed(input_ids)
            features_KSBH = None
            # Past the prefill come generated tokens: a placeholder among them shows nothing.
            if cache is None or cache.in_prefill:
                if visuals is None:
                    visuals = self.plan_visuals(input_ids, image_grid_thw, video_grid_thw)
                    visuals = visuals.moved(lambda tensor: tensor.to(input_ids.device))
                given = [pixel_values, pixel_values_videos]
                hidden_SBH, features_KSBH = self._see(hidden_SBH, given, visuals)
            hidden_SBH = self._for_recompute(hidden_SBH)
        else:
            assert self.stage_input is not None
            hidden_SBH, features_KSBH = _split_stages(self.stage_input, input_ids.shape[1])
            self.decoder.set_input_tensor(hidden_SBH)
        with using_cache(cache, self.decoder.layers):
            output = super().forward(
                input_ids,
                position_ids,
                None,
                decoder_input=hidden_SBH if self.pre_process else None,
                extra_block_kwargs={
                    "context": features_KSBH,
                    "attention_bias": routing or Routing(),
                },
            )
        if self.post_process:
            return self._head(output, labels, **head)
        return self._join_stages(output, features_KSBH)

    def _embed(self, ids_BS: Tensor) -> Tensor:
        """The tokens' embeddings; that of the padding token is used but does not learn here, as in
        transformers."""
        hidden_SBH: Tensor = self.embedding(input_ids=ids_BS, position_ids=None)
        if self.sizes.text.pad_id is None:
            return hidden_SBH
        is_pad_SB1 = (ids_BS == self.sizes.text.pad_id).T[..., None]
        # Contiguous, whatever the strides of the mask: a stage without layers sends it on.
        return torch.where(is_pad_SB1, hidden_SBH.detach(), hidden_SBH).contiguous()

    def _for_recompute(self, hidden_SBH: Tensor) -> Tensor:
        """What goes into the decoder. Recomputed layers learn only where an input of theirs has a
        gradient, which it has not where nothing before them learns."""
        full = self.config.recompute_granularity == "full" and self.training
        if hidden_SBH.requires_grad or not full or not torch.is_grad_enabled():
            return hidden_SBH
        learns = any(param.requires_grad for param in self.decoder.parameters())
        return hidden_SBH.detach().requires_grad_() if learns else hidden_SBH

    def plan_visuals(
        self, ids_BS: Tensor, image_grid_I3: Tensor | None, video_grid_I3: Tensor | None
    ) -> VisualPlan:
        """The plan of the images and videos of these rows, checked against their placeholders."""
        ids_BS = ids_BS.cpu()
        grids = [None if grid is None else grid.cpu() for grid in (image_grid_I3, video_grid_I3)]
        tokens = self.sizes.tokens
        check_placeholders(ids_BS, grids[0], grids[1], tokens)
        present = [grid for grid in grids if grid is not None]
        # Images first, then videos: their patches come in the same order.
        places = [_places(ids_BS == token) for token in (tokens.image_id, tokens.video_id)]
        return VisualPlan.create(
            self.vision_model,
            self.sizes.vision,
            torch.cat(present or [torch.empty(0, 3, dtype=torch.long)]),
            torch.cat(places),
            self.pg_collection.tp if self.share_images else None,
        )

    def _see(
        self, hidden_SBH: Tensor, pixels: Sequence[Tensor | None], plan: VisualPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Encode images and videos in one pass and put their features in their tokens' places."""
        given = [each for each in pixels if each is not None]
        if not given:
            return mark_ready_with_zero_grads(hidden_SBH, self.vision_model), None
        visual = encode(
            self.vision_model,
            self.sizes.vision,
            torch.cat(given),
            plan,
            self.pg_collection.tp,
        ).to(hidden_SBH.dtype)
        flat = hidden_SBH.flatten(0, 1).index_copy(0, plan.places_V, visual[0])
        if len(visual) == 1:  # a tower without DeepStack
            return flat.view_as(hidden_SBH), None
        features = hidden_SBH.new_zeros(len(visual) - 1, *flat.shape)
        features = features.index_copy(1, plan.places_V, visual[1:])
        return flat.view_as(hidden_SBH), features.unflatten(1, hidden_SBH.shape[:2])

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        """Megatron's forward ends with the hidden states: what is wanted of the head, it cannot
        pass on."""
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """On the last stage this rank's part of the head's weight, which may be the embedding's."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _head(
        self,
        hidden_SBH: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        also: ExtraOutput | None = None,
        of_M: Tensor | None = None,
        likeliest: tuple[int, float] | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """The head, on supervised positions only: the others carry no loss."""
        weight = self.head_weight
        places_N = loss_mask
        if places_N is None or places_N.dim() == 2:
            picked_BS = loss_mask if labels is None else labels != IGNORE
            if picked_BS is None:
                logits_SBV, _ = self.output_layer(hidden_SBH, weight=weight)
                return logits_SBV.transpose(0, 1)
            places_N = _places(picked_BS)
            labels = None if labels is None else labels.T.flatten()[places_N]
        hidden_NH = hidden_SBH.flatten(0, 1).index_select(0, places_N)
        if likeliest is None and labels is None:
            logits_N1V, _ = self.output_layer(hidden_NH[:, None], weight=weight)
            return logits_N1V[:, 0]
        products = [(hidden_NH, weight)]
        if (adapters := getattr(self.output_layer, "lora", None)) is not None:
            products.append(adapters.factors(hidden_NH))
        vocab, tp_group = self.sizes.text.vocab, self.pg_collection.tp
        if likeliest is not None:
            return likeliest_tokens(products, *likeliest, vocab, tp_group)
        assert labels is not None
        return predict(products, labels, vocab, tp_group, also, of_M, temperature)

    def _join_stages(self, hidden_SBH: Tensor, features_KSBH: Tensor | None) -> Tensor:
        """What the next stage gets: the hidden states, then the features its layers will add."""
        layers = len(self.decoder.layers)
        if features_KSBH is None or len(features_KSBH) <= layers:
            return hidden_SBH
        return torch.cat([hidden_SBH, features_KSBH[layers:].flatten(0, 1)])


def _split_stages(joined: Tensor, seq_len: int) -> tuple[Tensor, Tensor | None]:
    """Undo `_join_stages`: the number of features is what the length says."""
    hidden_SBH, rest = joined[:seq_len], joined[seq_len:]
    return hidden_SBH, rest.unflatten(0, (-1, seq_len)) if len(rest) else None


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
    """Places in the flattened [S * B] order of the true ones, row by row."""
    row, column = mask_BS.nonzero(as_tuple=True)
    return column * len(mask_BS) + row
