"""Gemma 4 in the forms of 31B and 26B-A4B: without per-layer embeddings, layers that share keys,
and audio.

Shapes: F frames, P patches, C values of a patch, 2 the axes x, y."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_vlm.family import spec
from megatron_vlm.family.decoder_layers import FeedForward, ProportionalRoPE
from megatron_vlm.family.engine_prompt import Decode, EnginePrompt
from megatron_vlm.family.family import Family
from megatron_vlm.family.field_rules import refuse_other_model
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.gemma4.fields import GEMMA4_FIELDS
from megatron_vlm.family.gemma4.images import LARGEST_PIXEL, Gemma4Images, unpad
from megatron_vlm.family.gemma4.layer_kinds import (
    ExpertsBesideMLP,
    NormedMLP,
    ScaledLayer,
    UnscaledAttention,
)
from megatron_vlm.family.gemma4.tiny import TINY
from megatron_vlm.family.gemma4.tower import empty_tower, patch_inputs
from megatron_vlm.family.gemma4.videos import Gemma4Videos
from megatron_vlm.family.video_plan import Grid

_MARKS = {
    **{"merger": "embed_vision", "vision_attention": ".self_attn.", "vision_mlp": ".mlp."},
    "patches": "input_proj",  # it has an adapter only where it is named
}
HF_NAMES = spec.HFNames("model.language_model.", "model.", "lm_head.weight")
_KINDS = ("image", "video", "audio")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_TIME = re.compile(r" ?(\d\d+):(\d\d) ")
_LONGEST = 16  # tokens of the time before a video's first frame, at most


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


def _text_sizes(config: PretrainedConfig) -> spec.TextSizes:
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
    return spec.TextSizes(
        hidden=text.hidden_size,
        layers=tuple(ScaledLayer(_attention(config, number), ffn) for number in numbers),
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        pad_id=text.pad_token_id,
        embed_scale=text.hidden_size**0.5,
        logit_cap=text.final_logit_softcapping,
    )


def gemma4_sizes(config: PretrainedConfig) -> spec.ModelSizes:
    """Return everything that the rest of the package needs from config.json."""
    refuse_other_model(config, GEMMA4_FIELDS, _fits(config))
    text, vision = _text_sizes(config), config.vision_config
    width, query = vision.hidden_size, vision.num_attention_heads * vision.head_dim
    vision_sizes = spec.VisionSizes(
        depth=vision.num_hidden_layers,
        hidden=width,
        query=query,
        head_dim=vision.head_dim,
        ffn=vision.intermediate_size,
        out_hidden=text.hidden,
        patch_values=3 * vision.patch_size**2,
        megapixel=256 * vision.pooling_kernel_size**2,  # pictures of all sizes have about as many
        merge=vision.pooling_kernel_size,
        deepstack=0,
        # transformers' norms compute in fp32: the four norms of a block, and its heads' norms.
        block_values=3 * width + 4 * query + 4 * vision.intermediate_size,
        fp32_values=8 * width + 5 * query,
        merger_values=(2 * width + text.hidden) // vision.pooling_kernel_size**2,
        patch_inputs=partial(patch_inputs, merge=vision.pooling_kernel_size),
    )
    ids, audio = (config.image_token_id, config.video_token_id), config.audio_token_id
    pixels = (vision_sizes.patch_values, LARGEST_PIXEL)
    tokens = spec.Tokens(text.vocab, *ids, vision_sizes.merge, _plain_positions, audio, *pixels)
    tower = empty_tower(config, torch.device("meta"))
    tensors = spec.tower_tensors(tower, HF_NAMES.vision, _MARKS, "position_embedding_table")
    tied = bool(config.tie_word_embeddings)
    return spec.ModelSizes.from_parts(text, vision_sizes, tokens, tied, tensors, HF_NAMES)


def _plain_positions(length: int, _: Sequence[spec.PlaceholderRun]) -> Tensor:
    """Return position ids [3, S], which count up for pictures as well."""
    return torch.arange(length).expand(3, -1)


def build_tower(
    config: PretrainedConfig, device: torch.device, recompute: bool, chains: spec.TowerChains
) -> nn.Module:
    """Build the tower with unset weights, which loading fills."""
    return empty_tower(config, device, recompute, chains)


# Prompts for vLLM have one placeholder for each picture and video, without the marks around it,
# which vLLM writes itself.


def _video_start(ids: list[int], first_frame: int, min_start: int, decode: Decode) -> int:
    last = first_frame - 1  # the first frame's mark
    shortest = range(last - 1, max(min_start, last - _LONGEST) - 1, -1)
    return next((i for i in shortest if _TIME.fullmatch(decode(ids[i:last]))), last)


def _unfold(patches_FPC: Tensor, places: list[int], merge: int) -> tuple[Grid, Tensor]:
    """Return the grid and the patches as the tower's first product reads them, with the patches
    of a token adjacent. The processor pads them to the same number, at places of -1."""
    patches_FPC = patches_FPC.view(-1, *patches_FPC.shape[-2:])
    places_FP2 = torch.tensor(places).view(*patches_FPC.shape[:2], 2)
    width, height = (places_FP2[0].amax(0) + 1).tolist()
    by_token = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    order, frames = by_token.transpose(1, 2).flatten(), []
    for patches_PC, (x_P, y_P) in zip(patches_FPC, places_FP2.transpose(1, 2), strict=True):
        is_real_P = x_P >= 0
        rows = (y_P * width + x_P)[is_real_P].argsort()
        frames.append(patches_PC[is_real_P][rows][order])
    return (len(frames), height, width), 2 * (torch.cat(frames) - 0.5)


ENGINE_PROMPT = EnginePrompt(
    video_start=_video_start,
    time=_TIME,
    time_example="'00:01 '",
    unit=60,
    fps=1.0,
    marks=(CHAT.marks.start, CHAT.marks.end),
    processor={"do_resize": False},
    names={
        "image": ("pixel_values", "pixel_position_ids"),
        "video": ("pixel_values_videos", "pixel_position_ids_videos"),
    },
    tower="vision_tower",
    unfold=_unfold,
    # vLLM plans its memory with this field, and not with the budget of the processor.
    args=lambda images: {
        "hf_overrides": {"vision_config": {"default_output_length": images.most_tokens}}
    },
    fault_on_cpu="vLLM's attention on a CPU hides the later tokens of a picture from its earlier "
    "ones, which Gemma 4 shows them: without an error, it would draw from another model",
    fault_of_adapters="in layers whose values are their keys, vLLM adapts the keys alone",
)


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
