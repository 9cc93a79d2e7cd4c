"""Qwen3-VL: the fields of its config.json, its tensors, its tower and its positions.

Shapes: S tokens of a row, P patches, C values of a patch, 3 the axes time, height, width.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_vlm.family.family import Family, HFNames, VisionMarks
from megatron_vlm.family.sizes import (
    ModelSizes,
    Part,
    PlaceholderRun,
    TensorSpec,
    TextSizes,
    VisionSizes,
    VisionTokens,
)

NAMES = HFNames("model.language_model.", "model.visual.", "lm_head.weight")
_MROPE_SECTION = (24, 20, 20)  # transformers' default


def sizes_of(config: PretrainedConfig) -> ModelSizes:
    """Everything that the rest of the package asks of config.json."""
    text, vision = config.text_config, config.vision_config
    text_sizes = TextSizes(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        ffn=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
        norm_eps=text.rms_norm_eps,
        rope_theta=text.rope_parameters["rope_theta"],
        mrope_section=tuple(text.rope_parameters.get("mrope_section", _MROPE_SECTION)),
    )
    vision_sizes = VisionSizes(
        depth=vision.depth,
        hidden=vision.hidden_size,
        ffn=vision.intermediate_size,
        out_hidden=vision.out_hidden_size,
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merge=vision.spatial_merge_size,
        deepstack=len(vision.deepstack_visual_indexes),
    )
    tokens = VisionTokens(
        config.image_token_id, config.video_token_id, vision_sizes.merge, mrope_positions
    )
    tensors = [*_vision_tensors(config), *_text_tensors(text_sizes)]
    tied = bool(config.tie_word_embeddings)
    if not tied:
        tensors.append(TensorSpec(NAMES.head, (text_sizes.vocab, text_sizes.hidden), Part.head))
    return ModelSizes(text_sizes, vision_sizes, tokens, tied, tuple(tensors))


def _vision_tensors(config: PretrainedConfig) -> Iterator[TensorSpec]:
    """Asked of Hugging Face's own module, without making its weights."""
    with torch.device("meta"), no_init_weights():
        tower = Qwen3VLVisionModel(config.vision_config)
    for name, param in tower.named_parameters():
        part = Part.merger if "merger" in name else Part.vision
        yield TensorSpec(NAMES.vision + name, tuple(param.shape), part)


def _text_tensors(text: TextSizes) -> Iterator[TensorSpec]:
    hidden, ffn, query, kv = text.hidden, text.ffn, text.query, text.kv
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_norm.weight": (text.head_dim,),
        "self_attn.k_norm.weight": (text.head_dim,),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    yield TensorSpec(NAMES.embedding, (text.vocab, hidden), Part.embed)
    for number in range(text.layers):
        for name, shape in layer.items():
            yield TensorSpec(NAMES.layer(number) + name, shape, Part.decoder)
    yield TensorSpec(NAMES.final_norm, (hidden,), Part.decoder)


class LinearPatchEmbed(nn.Module):
    """The patch embedding as one GEMM: the Conv3d's kernel equals its stride, and convolution
    kernels for that shape are orders of magnitude slower on some GPUs. Parameter names stay."""

    def __init__(self, proj: nn.Conv3d):
        super().__init__()
        self.proj = proj

    def forward(self, patches_PC: Tensor) -> Tensor:
        return F.linear(patches_PC, self.proj.weight.flatten(1), self.proj.bias)


def build_tower(
    config: PretrainedConfig, device: torch.device, recompute: bool
) -> Qwen3VLVisionModel:
    """Hugging Face's tower with unset weights; loading fills them."""
    config.vision_config._attn_implementation = "sdpa"
    with no_init_weights(), device:
        tower = Qwen3VLVisionModel(config.vision_config)
    tower.patch_embed = LinearPatchEmbed(tower.patch_embed.proj)
    if recompute:
        # Not reentrant: a reentrant checkpoint detaches what is not returned as a bare tensor,
        # and the DeepStack mergers would silently stop learning.
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


def mrope_positions(length: int, runs: Sequence[PlaceholderRun]) -> Tensor:
    """Position ids [3, S]: text counts up on all three axes; an image keeps one time and spans
    height and width; what follows continues after its longer side."""
    positions_3S = torch.empty(3, length, dtype=torch.long)
    cursor, position = 0, 0
    for run in [*runs, PlaceholderRun(length, 0, 0)]:
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


MARKS = VisionMarks("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN3_VL = Family("qwen3_vl", NAMES, MARKS, sizes_of, build_tower)
