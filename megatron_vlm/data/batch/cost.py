"""How much work a row is, in floating point operations of its forward, from its sizes alone.

Padding is not work. Used to balance micro-batches and to say how well the hardware is used.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class WorkModel:
    """Operations per unit; a multiplication and an addition count as two."""

    per_token: int  # linear layers of the decoder
    per_token_pair: int  # causal attention, over half of all pairs
    per_supervised: int  # the head
    per_patch: int  # linear layers of the vision tower, mergers included
    per_patch_pair: int  # attention within a frame

    @staticmethod
    def of(hf_config: PretrainedConfig) -> "WorkModel":
        """The work of a Qwen3-VL with this config.json."""
        text, vision = hf_config.text_config, hf_config.vision_config
        query = text.num_attention_heads * text.head_dim
        kv = text.num_key_value_heads * text.head_dim
        layer = text.hidden_size * (2 * query + 2 * kv + 3 * text.intermediate_size)
        merged = vision.hidden_size * vision.spatial_merge_size**2
        mergers = 1 + len(vision.deepstack_visual_indexes)
        block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
        merger = (merged * merged + merged * vision.out_hidden_size) // vision.spatial_merge_size**2
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return WorkModel(
            per_token=2 * text.num_hidden_layers * layer,
            per_token_pair=4 * text.num_hidden_layers * query,
            per_supervised=2 * text.hidden_size * text.vocab_size,
            per_patch=2 * (vision.depth * block + mergers * merger + values * vision.hidden_size),
            per_patch_pair=4 * vision.depth * vision.hidden_size,
        )

    def row(self, tokens: int, supervised: int, patches: int, patch_pairs: int) -> int:
        """Of one row's forward; its backward is twice that."""
        return (
            self.per_token * tokens
            + self.per_token_pair * tokens * (tokens + 1) // 2
            + self.per_supervised * supervised
            + self.per_patch * patches
            + self.per_patch_pair * patch_pairs
        )
