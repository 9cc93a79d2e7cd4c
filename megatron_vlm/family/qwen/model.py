"""Parts that all of Qwen's vision-language models share: checks of the fields of config.json, names
of tensors, the tower, the positions, and prompts for vLLM.

Shapes: S tokens of a row, P patches, C values of a patch, 3 the axes time, height, width.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.initialization import no_init_weights
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from megatron_vlm.errors import ConfigError
from megatron_vlm.family import spec
from megatron_vlm.family.engine_prompt import Decode, EnginePrompt
from megatron_vlm.family.family import Family
from megatron_vlm.family.field_rules import Checks, ModelFields, refuse_other_model
from megatron_vlm.family.qwen.chat import CHAT
from megatron_vlm.family.qwen.images import ImageSettings
from megatron_vlm.family.qwen.videos import VideoSettings
from megatron_vlm.family.tiny import TinyParts
from megatron_vlm.family.tower_attention import PackedAttention
from megatron_vlm.io.untrusted import UntrustedFile

_MARKS = {"merger": "merger", "vision_attention": ".attn.", "vision_mlp": ".mlp."}
HF_NAMES = spec.HFNames("model.language_model.", "model.visual.", "lm_head.weight")

TowerClass = Callable[[Any], nn.Module]  # transformers' module, made from its part of the config


def check_fields(
    config: PretrainedConfig, known: ModelFields, checks: Callable[[PretrainedConfig], Checks]
) -> None:
    """Refuse a config.json of another model. `checks` come from one family."""

    def all_checks() -> Checks:
        yield from _text_fits(config)
        yield from checks(config)
        yield from _vision_fits(config)

    refuse_other_model(config, known, all_checks())


def _text_fits(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    text, top_tied = config.text_config, config.tie_word_embeddings
    heads, groups, pad = text.num_attention_heads, text.num_key_value_heads, text.pad_token_id
    yield (
        heads % groups == 0,
        f"text_config.num_attention_heads={heads}, not a multiple of num_key_value_heads={groups}",
    )
    yield text.head_dim % 2 == 0, f"text_config.head_dim={text.head_dim}, not an even number"
    section = text.rope_parameters.get("mrope_section")
    yield (
        section is None or len(section) == 3,
        f"text_config.rope_parameters.mrope_section={section}, not three whole numbers",
    )
    ids, images, videos = range(text.vocab_size), config.image_token_id, config.video_token_id
    yield pad is None or pad in ids, f"text_config.pad_token_id={pad}, not in the vocabulary"
    yield (
        images in ids and videos in ids and images != videos,
        f"image_token_id={images} and video_token_id={videos}, not two tokens of the vocabulary of "
        f"{len(ids)}",
    )
    tied = getattr(text, "tie_word_embeddings", top_tied)  # transformers does not read this field
    yield tied == top_tied, f"text_config.tie_word_embeddings={tied}, and {top_tied} at the top"


def _vision_fits(config: PretrainedConfig) -> Iterator[tuple[bool, str]]:
    vision, hidden = config.vision_config, config.text_config.hidden_size
    out, indexes = vision.out_hidden_size, _deepstack_blocks(vision)
    yield vision.hidden_act in ACT2FN, f"vision_config.hidden_act={vision.hidden_act!r}, unknown"
    yield (
        out == hidden,
        f"vision_config.out_hidden_size={out}, not text_config.hidden_size={hidden}",
    )
    yield (
        vision.hidden_size % (4 * vision.num_heads) == 0,
        f"vision_config.num_heads={vision.num_heads}, of which no head of hidden_size="
        f"{vision.hidden_size} has a width that 4 divides",
    )
    yield (
        len(set(indexes)) == len(indexes) and set(indexes) <= set(range(vision.depth)),
        f"vision_config.deepstack_visual_indexes={list(indexes)}, not different blocks of "
        f"depth={vision.depth}",
    )


def _deepstack_blocks(vision: PretrainedConfig) -> Sequence[int]:
    blocks: Sequence[int] = getattr(vision, "deepstack_visual_indexes", ())
    return blocks


def model_sizes(
    config: PretrainedConfig, text: spec.TextSizes, make_tower: TowerClass
) -> spec.ModelSizes:
    """Return the sizes of a model with this decoder, from checked fields."""
    vision = config.vision_config
    deepstack = len(_deepstack_blocks(vision))
    # Hugging Face's own module names the tensors. Its weights are not allocated.
    tower = _empty_tower(config, make_tower, torch.device("meta"))
    out, merge = vision.out_hidden_size, vision.spatial_merge_size
    vision_sizes = spec.VisionSizes(
        depth=vision.depth,
        hidden=vision.hidden_size,
        query=vision.hidden_size,
        head_dim=vision.hidden_size // vision.num_heads,
        ffn=vision.intermediate_size,
        out_hidden=out,
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        megapixel=2**20 // vision.patch_size**2,
        merge=merge,
        deepstack=deepstack,
        block_values=2 * vision.intermediate_size + 9 * vision.hidden_size,
        merger_values=(1 + deepstack) * (3 * vision.hidden_size + out // merge**2),
        patch_inputs=partial(
            patch_inputs,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            merge=merge,
        ),
    )
    tokens = spec.Tokens(
        text.vocab,
        config.image_token_id,
        config.video_token_id,
        vision_sizes.merge,
        mrope_positions,
        patch_values=vision_sizes.patch_values,
    )
    tensors = spec.tower_tensors(tower, HF_NAMES.vision, _MARKS, "pos_embed.weight")
    tied = bool(config.tie_word_embeddings)
    return spec.ModelSizes.from_parts(text, vision_sizes, tokens, tied, tensors, HF_NAMES)


class LinearPatchEmbed(nn.Module):
    """The patch embedding as one GEMM. The Conv3d's kernel equals its stride, and convolution
    kernels for that shape are orders of magnitude slower on some GPUs. Parameter names stay the
    same."""

    def __init__(self, proj: nn.Conv3d):
        super().__init__()
        self.proj = proj

    def forward(self, patches_PC: Tensor) -> Tensor:
        return F.linear(patches_PC, self.proj.weight.flatten(1), self.proj.bias)


def _empty_tower(config: PretrainedConfig, make_tower: TowerClass, device: torch.device) -> Any:
    config.vision_config._attn_implementation = "sdpa"  # overrides the choice in config.json
    file = UntrustedFile(f"the config.json of {config.name_or_path}", ConfigError)
    border = file.wrap_errors("transformers cannot make its vision tower")
    with border, no_init_weights(), device:
        return make_tower(config.vision_config)


def build_tower(
    make_tower: TowerClass,
    config: PretrainedConfig,
    device: torch.device,
    recompute: bool,
    chains: spec.TowerChains,
) -> nn.Module:
    """Build Hugging Face's tower with unset weights, which loading fills."""
    tower = _empty_tower(config, make_tower, device)
    tower.patch_embed = LinearPatchEmbed(tower.patch_embed.proj)
    for block in tower.blocks:
        block.attn = PackedAttention(block.attn, chains.tower_heads)
    if recompute:
        # The checkpoint is not reentrant: a reentrant one detaches everything that is not returned
        # as a bare tensor, and the DeepStack mergers would silently stop learning. transformers'
        # public method also looks for embeddings of tokens, and warns that a tower has none.
        tower._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
        )
    built: nn.Module = tower
    return built


def patch_inputs(
    grid_I3: Tensor, num_grid_per_side: int, mode: str, align_corners: bool, merge: int
) -> dict[str, Tensor]:
    """Compute what `Qwen3VLVisionModel.forward` would otherwise make of the grids for each patch,
    from the sizes of its table of positions."""
    indices_P4, weights_P4 = get_vision_interpolation_indices_and_weights(
        grid_I3, num_grid_per_side, mode, align_corners, spatial_merge_size=merge
    )
    return {
        "interp_indices": indices_P4,
        "interp_weights": weights_P4,
        "position_ids": get_vision_position_ids(grid_I3, merge),
    }


def mrope_positions(length: int, runs: Sequence[spec.PlaceholderRun]) -> Tensor:
    """Return position ids [3, S]: text counts up on all three axes; an image keeps one time and
    spans height and width; the next token continues after its longer side."""
    positions_3S = torch.empty(3, length, dtype=torch.long)
    cursor, position = 0, 0
    for run in [*runs, spec.PlaceholderRun(length, 0, 0)]:
        text = run.start - cursor
        positions_3S[:, cursor : run.start] = torch.arange(position, position + text)
        position += text
        end = run.start + run.height * run.width
        rows = torch.arange(run.height).repeat_interleave(run.width)
        positions_3S[0, run.start : end] = position
        positions_3S[1, run.start : end] = position + rows
        positions_3S[2, run.start : end] = position + torch.arange(run.width).repeat(run.height)
        position += max(run.height, run.width)
        cursor = end
    return positions_3S


# Prompts for vLLM have one placeholder for each picture and video.


def _video_start(ids: list[int], first_frame: int, min_start: int, _: Decode) -> int:
    """Return the place of the time, which is after the bracket that opens the whole video."""
    inner = first_frame - 1
    places = (i for i in range(inner - 1, min_start - 1, -1) if ids[i] == ids[inner])
    return next(places, inner) + 1


ENGINE_PROMPT = EnginePrompt(
    video_start=_video_start,
    time=re.compile(r"<(\d+)\.(\d) seconds>"),
    time_example="<0.5 seconds>",
    unit=10,
    fps=10.0,  # frames are numbered in tenths of a second, like the times in prompts
    processor={"do_resize": False},
    names={
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    },
    tower="visual",
)


def make_family(
    model_type: str,
    sizes_of: Callable[[PretrainedConfig], spec.ModelSizes],
    make_tower: TowerClass,
    passthrough: tuple[str, ...] = (),
    tiny: TinyParts | None = None,
) -> Family:
    """Return a family of Qwen's models."""
    return Family(
        model_type,
        CHAT,
        sizes_of,
        partial(build_tower, make_tower),
        ImageSettings.from_checkpoint,
        VideoSettings.from_checkpoint,
        ENGINE_PROMPT,
        passthrough,
        tiny,
    )
