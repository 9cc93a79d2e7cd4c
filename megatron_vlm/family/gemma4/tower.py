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
from megatron_vlm.family.spec import TowerInputs
from megatron_vlm.family.tower_attention import attend_in_frames


class Gemma4Tower(nn.Module):
    """The tower and the projector of transformers, with their parameters and names. It reads
    patches between -1 and 1."""

    def __init__(self, vision_tower: Any, embed_vision: nn.Module, recompute: bool = False):
        super().__init__()
        self.vision_tower, self.embed_vision = vision_tower, embed_vision
        self.recompute = recompute
        self.merge: int = vision_tower.config.pooling_kernel_size
        for layer in vision_tower.encoder.layers:
            layer.self_attn = _PackedAttention(layer.self_attn)
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
        self, patches_PC: Tensor, *, positions_P2: Tensor, lengths: Sequence[int], starts: Tensor
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


class _PackedAttention(nn.Module):
    """Attention within each image, in the place of transformers' module."""

    kernel = TORCH  # `set_kernel` sets it

    def __init__(self, given: Any):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = given.q_proj, given.k_proj, given.v_proj
        self.o_proj, self.q_norm, self.k_norm = given.o_proj, given.q_norm, given.k_norm
        self.v_norm, self.head_dim = given.v_norm, given.head_dim

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        starts: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        hidden_PH = hidden_states[0]
        cos_P1D, sin_P1D = (each[0][:, None] for each in position_embeddings)
        query_PND, key_PND, value_PND = (
            norm(proj(hidden_PH).unflatten(-1, (-1, self.head_dim)))
            for proj, norm in (
                (self.q_proj, self.q_norm),
                (self.k_proj, self.k_norm),
                (self.v_proj, self.v_norm),
            )
        )
        query_PND, key_PND = (_rotate_axes(x, cos_P1D, sin_P1D) for x in (query_PND, key_PND))
        parts_PND = query_PND, key_PND, value_PND
        out_PND = attend_in_frames(*parts_PND, lengths, starts, scale=1.0, kernel=self.kernel)
        return self.o_proj(out_PND.flatten(1))[None], None


def _rotate_axes(x_PND: Tensor, cos_P1D: Tensor, sin_P1D: Tensor) -> Tensor:
    """Rotate the first half of a head by x and the second by y, each half by its own halves."""
    first, second, third, fourth = x_PND.chunk(4, dim=-1)
    turned_PND = torch.cat([-second, first, -fourth, third], dim=-1)
    return x_PND * cos_P1D + turned_PND * sin_P1D


def empty_tower(
    config: PretrainedConfig, device: torch.device, recompute: bool = False
) -> Gemma4Tower:
    """Return the tower with unset weights."""
    config.vision_config._attn_implementation = "sdpa"  # overrides the choice in config.json
    with no_init_weights(), device:
        tower = Gemma4VisionModel(config.vision_config)
        projector = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
        return Gemma4Tower(tower, projector, recompute)


def tower_inputs(tower: nn.Module, grid_I3: Tensor) -> tuple[TowerInputs, TowerInputs]:
    """Return the lengths of images and frames on the host, and for the device their starts and the
    positions (x, y) of the patches. The patches of one token are adjacent."""
    merge = tower.merge
    assert isinstance(merge, int)
    positions, lengths = [], []
    for frames, height, width in grid_I3.tolist():
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        blocks = (height // merge, merge, width // merge, merge, 2)
        xy = torch.stack([x, y], -1).reshape(blocks).transpose(1, 2)
        positions += [xy.reshape(-1, 2)] * frames
        lengths += [height * width] * frames
    starts = F.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))
    return {"lengths": lengths}, {"positions_P2": torch.cat(positions), "starts": starts}
