"""Vision tower of Gemma 4 over the patches of all images without padding.

transformers pads each image to its budget of tokens. Here images follow each other, and the patches
of one token are adjacent, so that pooling is a mean of neighbours.

Shapes: P patches, V tokens, C values of a patch, H width, N heads, D head size, 2 the axes x, y.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

from megatron_vlm.family.flash_attention import TORCH
from megatron_vlm.family.spec import TowerChains
from megatron_vlm.family.tower_attention import attend_in_frames


class Gemma4Tower(nn.Module):
    """The tower and the projector of transformers, with their parameters and names. It reads
    patches between -1 and 1."""

    def __init__(self, vision_tower: Any, embed_vision: nn.Module, recompute: bool):
        super().__init__()
        self.vision_tower, self.embed_vision = vision_tower, embed_vision
        self.recompute = recompute
        self.merge: int = vision_tower.config.pooling_kernel_size
        if vision_tower.config.standardize:  # parameters are loaded and exported, buffers are not
            for name in ("std_bias", "std_scale"):
                value = getattr(vision_tower, name)
                delattr(vision_tower, name)
                vision_tower.register_parameter(name, nn.Parameter(value, requires_grad=False))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = self.vision_tower.patch_embedder.input_proj.weight.dtype
        return dtype

    def forward(
        self,
        patches_PC: Tensor,
        *,
        positions_P2: Tensor,
        lengths: Sequence[int],
        starts: Tensor,
        **_: Any,
    ) -> Any:
        """Return the features [V, H of the decoder] as `pooler_output`."""
        tower = self.vision_tower
        embedder, (x_P, y_P) = tower.patch_embedder, positions_P2.unbind(-1)
        x_table, y_table = embedder.position_embedding_table
        hidden_PH = embedder.input_proj(patches_PC)
        hidden_PH = hidden_PH + (F.embedding(x_P, x_table) + F.embedding(y_P, y_table))
        # transformers' layers want a row of tokens.
        hidden_1PH = hidden_PH[None]
        rotary = tower.encoder.rotary_emb(hidden_1PH, positions_P2[None])
        for layer in tower.encoder.layers:
            run = partial(layer, position_embeddings=rotary, lengths=lengths, starts=starts)
            if self.recompute and torch.is_grad_enabled():
                hidden_1PH = checkpoint(run, hidden_1PH, use_reentrant=False)
            else:
                hidden_1PH = run(hidden_1PH)
        dtype, width = hidden_1PH.dtype, tower.config.hidden_size
        pooled_VH = hidden_1PH[0].unflatten(0, (-1, self.merge**2)).float().mean(1)
        pooled_VH = pooled_VH.to(dtype).float() * width**0.5
        if tower.config.standardize:
            pooled_VH = (pooled_VH - tower.std_bias.float()) * tower.std_scale.float()
        return SimpleNamespace(pooler_output=self.embed_vision(pooled_VH.to(dtype)))


class _Block(nn.Module):
    """A block in the place of transformers', with its parameters and their names."""

    mlp: Any

    def __init__(self, given: Any, chains: Any):
        super().__init__()
        for name, part in given.named_children():
            self.add_module(name, part)
        self.self_attn, self.chains = _PackedAttention(given.self_attn, chains), chains

    def forward(self, hidden_1PH: Tensor, **images: Any) -> Any:
        def norm(x_1PH: Tensor, given: Any, *residual: Tensor) -> Any:
            return self.chains.upcast_norm(x_1PH, given.weight, given.eps, *residual)

        mixed_1PH = self.self_attn(norm(hidden_1PH, self.input_layernorm), **images)
        hidden_1PH = norm(mixed_1PH, self.post_attention_layernorm, hidden_1PH)
        out_1PH = self.mlp(norm(hidden_1PH, self.pre_feedforward_layernorm))
        return norm(out_1PH, self.post_feedforward_layernorm, hidden_1PH)


class _PackedAttention(nn.Module):
    """Attention within each image, in the place of transformers' module."""

    kernel = TORCH  # `set_kernel` sets it

    def __init__(self, given: Any, chains: Any):
        super().__init__()
        self.chains = chains
        self.q_proj, self.k_proj, self.v_proj = given.q_proj, given.k_proj, given.v_proj
        self.o_proj, self.q_norm, self.k_norm = given.o_proj, given.q_norm, given.k_norm

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        starts: Tensor,
    ) -> Any:
        hidden_PH = hidden_states[0]
        projected = (proj(hidden_PH) for proj in (self.q_proj, self.k_proj, self.v_proj))
        turns, eps = (each[0] for each in position_embeddings), self.q_norm.eps
        weights = self.q_norm.weight, self.k_norm.weight
        query, key, value = self.chains.axial_heads(*projected, *turns, *weights, eps)
        images = lengths, starts
        out_PND = attend_in_frames(query, key, value, *images, scale=1.0, kernel=self.kernel)
        return self.o_proj(out_PND.flatten(1))[None]


def empty_tower(
    config: PretrainedConfig,
    device: torch.device,
    recompute: bool = False,
    chains: TowerChains | None = None,
) -> Gemma4Tower:
    """Return the tower with unset weights. Without chains it only has names and shapes."""
    config.vision_config._attn_implementation = "sdpa"  # overrides the choice in config.json
    with no_init_weights(), device:
        tower = Gemma4VisionModel(config.vision_config)
        projector = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
        blocks = (_Block(layer, chains) for layer in tower.encoder.layers)
        tower.encoder.layers = nn.ModuleList(blocks)
        return Gemma4Tower(tower, projector, recompute)


def patch_inputs(grid_I3: Tensor, merge: int) -> dict[str, Tensor]:
    """Return the positions (x, y) of the patches. The patches of one token are adjacent."""
    positions = []
    for frames, height, width in grid_I3.tolist():
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        blocks = (height // merge, merge, width // merge, merge, 2)
        xy = torch.stack([x, y], -1).reshape(blocks).transpose(1, 2)
        positions += [xy.reshape(-1, 2)] * frames
    return {"positions_P2": torch.cat(positions)}
