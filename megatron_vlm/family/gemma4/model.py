"""Gemma 4 in the forms of 31B and 26B-A4B: without per-layer embeddings, layers that share keys,
and audio."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_vlm.family.decoder_layers import FeedForward, ProportionalRoPE
from megatron_vlm.family.family import Family
from megatron_vlm.family.field_rules import refuse_other_model
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.gemma4.engine_prompt import ENGINE_PROMPT
from megatron_vlm.family.gemma4.fields import GEMMA4_FIELDS
from megatron_vlm.family.gemma4.images import LARGEST_PIXEL, Gemma4Images, unpad
from megatron_vlm.family.gemma4.layer_kinds import (
    ExpertsBesideMLP,
    NormedMLP,
    ScaledLayer,
    UnscaledAttention,
)
from megatron_vlm.family.gemma4.tiny import TINY
from megatron_vlm.family.gemma4.tower import empty_tower, tower_inputs
from megatron_vlm.family.gemma4.videos import Gemma4Videos
from megatron_vlm.family.spec import (
    HFNames,
    ModelSizes,
    PlaceholderRun,
    TextSizes,
    Tokens,
    TowerHeads,
    VisionSizes,
    tower_tensors,
)

_MARKS = {
    **{"merger": "embed_vision", "vision_attention": ".self_attn.", "vision_mlp": ".mlp."},
    "patches": "input_proj",  # it has an adapter only where it is named
}
HF_NAMES = HFNames("model.language_model.", "model.", "lm_head.weight")
_KINDS = ("image", "video", "audio")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _fits(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    """Check that values fit each other, as Checks."""
    text, vision = config.text_config, config.vision_config
    kinds, count = list(text.layer_types), text.num_hidden_layers
    ropes = [*text.rope_parameters]
    fits = len(kinds) == count and kinds[-1] == _FULL and {*kinds} <= {_SLIDING, _FULL} & {*ropes}
    yield (
        fits,
        f"text_config.layer_types={kinds} and rope_parameters of {ropes}, not {_SLIDING} or "
        f"{_FULL} for each of the {count} layers with {_FULL} at the end",
    )
    for attention in {_attention(config, number) for number in range(count if fits else 0)}:
        heads, groups = text.num_attention_heads, attention.kv_heads
        width, name = attention.head_dim, "head_dim" if attention.window else "global_head_dim"
        yield (
            heads % groups == 0,
            f"text_config.{attention.kv_field}={groups}, which does not divide "
            f"num_attention_heads={heads}",
        )
        yield width % 2 == 0, f"text_config.{name}={width}, not an even number"
    ids, pad = range(text.vocab_size), text.pad_token_id
    marks = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in _KINDS}
    named = [token for token in marks.values() if token is not None]
    yield (
        pad is None or pad in ids,
        f"text_config.pad_token_id={pad}, not a token of the vocabulary of {len(ids)}",
    )
    yield (
        all(token in ids for token in named) and len(set(named)) == len(named),
        f"{marks}, not different tokens of the vocabulary of {len(ids)}",
    )
    heads, groups = vision.num_attention_heads, vision.num_key_value_heads
    yield groups == heads, f"vision_config.num_key_value_heads={groups}, not {heads} as its heads"
    yield (
        vision.head_dim % 4 == 0,
        f"vision_config.head_dim={vision.head_dim}, which 4 does not divide",
    )
    yield (
        vision.pooling_kernel_size > 1,
        "vision_config.pooling_kernel_size=1, with which transformers keeps padding for patches",
    )
    if text.enable_moe_block:
        experts, top_k = text.num_experts, text.top_k_experts
        yield (
            None not in (experts, top_k, text.moe_intermediate_size) and top_k <= experts,
            f"text_config.enable_moe_block with num_experts={experts}, top_k_experts={top_k} and "
            f"moe_intermediate_size={text.moe_intermediate_size}",
        )


def _attention(config: PretrainedConfig, number: int) -> UnscaledAttention:
    text = config.text_config
    kind, own = text.layer_types[number], text.per_layer_config[number]
    is_sliding, rope = kind == _SLIDING, text.rope_parameters[kind]
    share = 1.0 if is_sliding else rope.get("partial_rotary_factor", 1.0)
    return UnscaledAttention(
        heads=text.num_attention_heads,
        kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        rotary=ProportionalRoPE(own.head_dim, int(share * own.head_dim // 2), rope["rope_theta"]),
        window=text.sliding_window if is_sliding else None,
        sees_image=is_sliding and text.use_bidirectional_attention == "vision",
        values_are_keys=bool(text.attention_k_eq_v) and not is_sliding,
    )


def _text_sizes(config: PretrainedConfig) -> TextSizes:
    text = config.text_config
    ffn: FeedForward = NormedMLP(text.intermediate_size)
    if text.enable_moe_block:
        ffn = ExpertsBesideMLP(
            text.num_experts,
            text.top_k_experts,
            text.moe_intermediate_size,
            dense_width=text.intermediate_size,
        )
    numbers = range(text.num_hidden_layers)
    return TextSizes(
        hidden=text.hidden_size,
        layers=tuple(ScaledLayer(_attention(config, number), ffn) for number in numbers),
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        pad_id=text.pad_token_id,
        embed_scale=text.hidden_size**0.5,
        logit_cap=text.final_logit_softcapping,
    )


def gemma4_sizes(config: PretrainedConfig) -> ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    refuse_other_model(config, GEMMA4_FIELDS, _fits(config))
    text, vision = _text_sizes(config), config.vision_config
    width, query = vision.hidden_size, vision.num_attention_heads * vision.head_dim
    vision_sizes = VisionSizes(
        depth=vision.num_hidden_layers,
        hidden=width,
        query=query,
        ffn=vision.intermediate_size,
        out_hidden=text.hidden,
        patch_values=3 * vision.patch_size**2,
        megapixel=256 * vision.pooling_kernel_size**2,  # pictures of all sizes have about as many
        merge=vision.pooling_kernel_size,
        deepstack=0,
        # transformers' norms compute in fp32: four of a block, and those of the heads.
        block_values=3 * width + 4 * query + 4 * vision.intermediate_size,
        fp32_values=8 * width + 5 * query,
        merger_values=(2 * width + text.hidden) // vision.pooling_kernel_size**2,
        inputs=tower_inputs,
    )
    ids, audio = (config.image_token_id, config.video_token_id), config.audio_token_id
    pixels = (vision_sizes.patch_values, LARGEST_PIXEL)
    tokens = Tokens(text.vocab, *ids, vision_sizes.merge, _plain_positions, audio, *pixels)
    tower = empty_tower(config, torch.device("meta"))
    tensors = tower_tensors(tower, HF_NAMES.vision, _MARKS, "position_embedding_table")
    tied = bool(config.tie_word_embeddings)
    return ModelSizes.from_parts(text, vision_sizes, tokens, tied, tensors, HF_NAMES)


def _plain_positions(length: int, _: Sequence[PlaceholderRun]) -> Tensor:
    """Return position ids [3, S], which count up for pictures as well."""
    return torch.arange(length).expand(3, -1)


def build_tower(
    config: PretrainedConfig, device: torch.device, recompute: bool, _: TowerHeads
) -> nn.Module:
    """Build the tower with unset weights, which loading fills."""
    return empty_tower(config, device, recompute)


GEMMA4 = Family(
    "gemma4",
    CHAT,
    gemma4_sizes,
    build_tower,
    Gemma4Images.from_checkpoint,
    Gemma4Videos.from_checkpoint,
    ENGINE_PROMPT,
    tiny=TINY,
    unpad=unpad,
)
