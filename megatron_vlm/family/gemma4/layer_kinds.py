"""Decoder layers of Gemma 4: two kinds of attention, norms before and after both parts of a layer,
a scalar that does not learn, and an MLP beside experts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_vlm.family.decoder_layers import (
    WIDEST_OF_FLASH,
    Attention,
    ByExpert,
    DenseMLP,
    Experts,
    LayerParam,
    LayerSpec,
    LayerTensor,
    ProportionalRoPE,
    mlp_params,
    vector_param,
)


@dataclass(frozen=True, kw_only=True)
class UnscaledAttention(Attention):
    """Attention with norms of queries, keys and values, whose scores are not scaled. Its output has
    a norm as well."""

    kind: ClassVar[str] = "unscaled_attention"
    rotary: ProportionalRoPE

    @property
    def divided_by_tp(self) -> dict[str, int]:
        """Counts that TP must divide, by their fields in config.json."""
        return {"num_attention_heads": self.heads, self.kv_field: self.kv_heads}

    @property
    def kv_field(self) -> str:
        """The field of config.json with the number of key heads."""
        return "num_global_key_value_heads" if self.window is None else "num_key_value_heads"

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters."""
        widths = {"q": self.query, "k": self.kv}
        if not self.values_are_keys:
            widths["v"] = self.kv
        yield from self.projections(hidden, widths)
        post_norm = "post_attention_layernorm.weight"
        yield vector_param("self_attention.post_norm.weight", post_norm, hidden)

    def pair_flops(self, lengths: Sequence[int], picture_pairs: int) -> int:
        """Return the operations of the pairs that are seen: the last tokens of a window, and the
        later ones of an image at any distance."""
        if self.window is None:
            return super().pair_flops(lengths, picture_pairs)
        seen = sum(
            tokens * near - near * (near - 1) // 2
            for tokens in lengths
            for near in [min(tokens, self.window)]
        )
        return 4 * self.query * (seen + self.sees_image * picture_pairs)

    def kept_values(self, learns: bool) -> int:
        """Return the number of values per token that autograd keeps, over all TP ranks: the output
        of the first linear, queries and keys before their weights and queries before rotation, the
        inputs of attention and its output. Keys and values are repeated for heads that no kernel
        shares them for, which a window's mask needs as well. (Of one key head on a rank, queries
        are not copied before their norm, which is left out.)"""
        mixed = self.query + (1 if self.values_are_keys else 2) * self.kv
        norms = 2 * self.query + self.kv if learns else self.query
        is_repeated = self.window is not None or self.head_dim > WIDEST_OF_FLASH
        return mixed + norms + 2 * self.query + 2 * (self.query if is_repeated else self.kv)


@dataclass(frozen=True)
class NormedMLP(DenseMLP):
    """MLP with a gate through GELU, and norms before and after it."""

    kind: ClassVar[str] = "normed_mlp"

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters."""
        yield vector_param("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", hidden)
        yield from super().params(hidden)
        yield vector_param("mlp.post_norm.weight", "post_feedforward_layernorm.weight", hidden)


@dataclass(frozen=True)
class ExpertsBesideMLP(Experts):
    """Experts and an MLP, which each have norms of their own, and a norm of their sum. The router
    reads the residual stream. It has a scale of its inputs and one of each expert's output."""

    kind: ClassVar[str] = "experts_beside_mlp"

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters."""
        yield vector_param("mlp.pre_norm.weight", "pre_feedforward_layernorm.weight", hidden)
        ours, width = ("mlp.dense.gate_up", "mlp.dense.down"), self.dense_width
        yield from mlp_params("mlp", *ours, hidden, width)
        router = LayerTensor("router.proj.weight", (self.count, hidden))
        yield LayerParam("mlp.router", (router,))
        yield vector_param("mlp.router_scale", "router.scale", hidden)
        yield vector_param("mlp.expert_scale", "router.per_expert_scale", self.count)
        shapes = {"gate_up": (2 * self.width, hidden), "down": (hidden, self.width)}
        for name, shape in shapes.items():
            tensor = LayerTensor(f"experts.{name}_proj", (self.count, *shape), "mlp")
            yield LayerParam(f"mlp.{name}.weight", (tensor,), ByExpert(self.count))
        names = {
            "dense_norm": "post_feedforward_layernorm_1",
            "experts_norm": "post_feedforward_layernorm_2",
            "input_norm": "pre_feedforward_layernorm_2",
        }
        for name, theirs in names.items():
            yield vector_param(f"mlp.{name}.weight", f"{theirs}.weight", hidden)
        yield vector_param("mlp.post_norm.weight", "post_feedforward_layernorm.weight", hidden)

    def kept_values(self, hidden: int, is_frozen: bool, inputs: bool, tp: int) -> int:
        """Return the number of values per token that a rank keeps."""
        dense = (3 if is_frozen else 4) * self.dense_width
        norms = (7 if inputs else 2) * hidden  # what the router and both parts have norms for
        return super().kept_values(hidden, is_frozen, inputs, tp) + dense + norms


@dataclass(frozen=True)
class ScaledLayer(LayerSpec):
    """Layer whose parts have their own norms of inputs and outputs. Its output is multiplied by a
    scalar that does not learn."""

    kind: ClassVar[str] = "scaled"
    post_norms: ClassVar[int] = 2

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield every parameter, in the order of the checkpoint."""
        yield vector_param("input_layernorm.weight", "input_layernorm.weight", hidden)
        yield from self.mixer.params(hidden)
        yield from self.ffn.params(hidden)
        yield LayerParam("layer_scalar", (LayerTensor("layer_scalar", (1,), learns=False),))
