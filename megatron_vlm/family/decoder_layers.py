"""Decoder layers: a mixer of tokens and a feed-forward network, each behind a norm. Both list their
parameters, and say what they cost.

The table of names, the planner, the cost of a row, the LoRA targets, the built modules and the
caches are loops over these descriptions. Importing this file imports neither torch nor
transformers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Protocol

# How a parameter is sharded. hf/weight_map.py has the layout of each kind.


@dataclass(frozen=True)
class Whole:
    """Parameter that every rank holds."""


@dataclass(frozen=True)
class RowParts:
    """Rows cut over TP. The rows of each tensor are parts of these widths, one after the other, and
    each part is cut by itself: a rank has its piece of every part."""

    widths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Columns:
    """Columns cut over TP."""

    width: int


@dataclass(frozen=True)
class HeadGroups:
    """Groups of rows cut over TP. Each group has its rows of every tensor, one after the other:
    the queries of a group, its key and its value."""

    count: int


@dataclass(frozen=True)
class ByExpert:
    """Experts divided among the ranks of EP."""

    count: int


Sharding = Whole | RowParts | Columns | HeadGroups | ByExpert


@dataclass(frozen=True)
class LayerTensor:
    """A tensor of a layer in a Hugging Face checkpoint."""

    name: str  # after the prefix of the layer
    shape: tuple[int, ...]
    lora_group: str | None = None  # its group among the LoRA targets, if it can have an adapter
    learns: bool = True  # False: it always stays as it was loaded


@dataclass(frozen=True)
class LayerParam:
    """A parameter of a layer, and the tensors of a checkpoint that it is made of."""

    name: str  # our name, after the prefix of the layer
    tensors: tuple[LayerTensor, ...]
    sharding: Sharding = Whole()


def vector_param(our_name: str, hf_name: str, width: int) -> LayerParam:
    return LayerParam(our_name, (LayerTensor(hf_name, (width,)),))


@dataclass(frozen=True)
class MRoPE:
    """Rotary embedding of the first `dim` values of a head by positions in time, height and width,
    among which the frequencies alternate."""

    dim: int
    theta: float
    section: tuple[int, ...]  # number of frequencies of time, height and width


@dataclass(frozen=True)
class ProportionalRoPE:
    """Rotary embedding by the place of a token in its row. Of the frequencies of a whole head of
    `head_dim` values, the first `count` turn, each a value and the one half a head away."""

    head_dim: int
    count: int
    theta: float


# Limits of torch's attention kernels, by which layers call them and the planner counts memory.

WIDEST_OF_FLASH = 256  # values of a head that flash attention takes


def fits_flash(head_dim: int) -> bool:
    """Return whether flash attention takes sequences of any lengths with such heads."""
    return head_dim % 8 == 0 and head_dim <= WIDEST_OF_FLASH


def mask_columns(tokens: int) -> int:
    """Return the columns of a mask: efficient attention copies one whose rows are not aligned."""
    return -(-tokens // 16) * 16


# The `kind` of a mixer, a feed-forward or a layer names its builder in model/layer_specs.py.


@dataclass(frozen=True)
class Attention:
    """Softmax attention among the tokens of a row. Its kinds add what they have besides heads."""

    kind: ClassVar[str]
    heads: int
    kv_heads: int
    head_dim: int
    rotary: MRoPE | ProportionalRoPE
    gated: bool = field(default=False, kw_only=True)  # each query head has a gate for its output
    # Tokens that a token sees, itself included. None: all before it.
    window: int | None = field(default=None, kw_only=True)
    # A token of an image sees the later tokens of that image, too.
    sees_image: bool = field(default=False, kw_only=True)
    values_are_keys: bool = field(default=False, kw_only=True)  # they are keys before their norm
    # Operations per token besides the products with weights and the operations of pairs.
    flops_per_token: ClassVar[int] = 0

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    def pair_flops(self, lengths: Sequence[int], picture_pairs: int) -> int:
        """Return the operations of the pairs of tokens of rows of these lengths, which have
        `picture_pairs` of a visual token and a later one of its image."""
        return 4 * self.query * sum(tokens * (tokens + 1) // 2 for tokens in lengths)

    def projections(self, hidden: int, widths: Mapping[str, int]) -> Iterator[LayerParam]:
        """Yield the linears, the first with these output widths, and the norms of queries and
        keys."""
        tensors = tuple(
            LayerTensor(f"self_attn.{letter}_proj.weight", (width, hidden), "attention")
            for letter, width in widths.items()
        )
        yield LayerParam("self_attention.linear_qkv.weight", tensors, HeadGroups(self.kv_heads))
        for letter in "qk":
            our_name = f"self_attention.{letter}_layernorm.weight"
            yield vector_param(our_name, f"self_attn.{letter}_norm.weight", self.head_dim)
        out = LayerTensor("self_attn.o_proj.weight", (hidden, self.query), "attention")
        yield LayerParam("self_attention.linear_proj.weight", (out,), Columns(self.query))


@dataclass(frozen=True)
class FullAttention(Attention):
    """Causal attention among all tokens of a row, with norms of queries and keys."""

    kind: ClassVar[str] = "attention"
    rotary: MRoPE

    @property
    def divided_by_tp(self) -> dict[str, int]:
        """Counts that TP must divide, by their fields in config.json."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters. With a gate, q_proj has a head's query and gate, head by head."""
        widths = {"q": self.query * (1 + self.gated), "k": self.kv, "v": self.kv}
        yield from self.projections(hidden, widths)

    def kept_values(self, learns: bool) -> int:
        """Return the number of values per token that autograd keeps, over all TP ranks. Weights
        that do not learn need no inputs. With a gate, queries and gates are copied together, and
        the gate and the output times the gate are kept as well."""
        per_head = 5 if learns else 4
        return per_head * (self.query + self.kv) + (per_head - 1) * self.query * self.gated


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule: every value head has a state of constant size
    [key_dim, value_dim], which each token decays and corrects."""

    kind: ClassVar[str] = "delta_net"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the causal convolution sees

    @property
    def keys(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def divided_by_tp(self) -> dict[str, int]:
        """Counts that TP must divide, by their fields in config.json."""
        return {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads}

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters. One product gives queries, keys and values, the gate of the output,
        and the two numbers of each value head that say how much it writes and forgets."""
        mixed, heads = (self.keys, self.keys, self.values), self.value_heads
        widths = {"qkv": mixed, "z": (self.values,), "b": (heads,), "a": (heads,)}
        projections = tuple(
            LayerTensor(f"linear_attn.in_proj_{name}.weight", (sum(parts), hidden), "attention")
            for name, parts in widths.items()
        )
        sharding = RowParts(tuple(widths.values()))
        yield LayerParam("self_attention.in_proj.weight", projections, sharding)
        conv = LayerTensor("linear_attn.conv1d.weight", (sum(mixed), 1, self.kernel))
        yield LayerParam("self_attention.conv1d", (conv,), RowParts((mixed,)))
        for name in ("A_log", "dt_bias"):
            vector = LayerTensor(f"linear_attn.{name}", (heads,))
            yield LayerParam(f"self_attention.{name}", (vector,), RowParts(((heads,),)))
        yield vector_param("self_attention.norm", "linear_attn.norm.weight", self.value_dim)
        out = LayerTensor("linear_attn.out_proj.weight", (hidden, self.values), "attention")
        yield LayerParam("self_attention.out_proj.weight", (out,), Columns(self.values))

    @property
    def flops_per_token(self) -> int:
        """Operations per token of the rule in chunks, besides the products with weights. The
        products of keys with keys and with queries are made for key heads, all others for value
        heads: the inverse of the chunk's equations, what it is multiplied with, and reading,
        writing and keeping the state."""
        chunk, key, value = DELTA_CHUNK, self.key_dim, self.value_dim
        per_value_head = 6 * key * value + 4 * chunk * value + chunk * chunk
        return self.value_heads * per_value_head + self.key_heads * 4 * chunk * key

    def kept_values(self, learns: bool) -> int:
        """Return the number of values per token that autograd keeps, over all TP ranks. The rule is
        recomputed in the backward, so it keeps its inputs alone. The output of the first linear and
        its part before, after and within the convolution are kept, then the rule's output, and what
        the norm and the gate make of it. Weights that do not learn need no inputs."""
        mixed = 2 * self.keys + self.values
        per_value = 6 if learns else 4
        return 4 * mixed + per_value * self.values + 7 * self.value_heads


DELTA_CHUNK = 32  # tokens that the rule takes together: model/delta_rule.py


class Mixer(Protocol):
    """Description of a mixer of tokens."""

    kind: ClassVar[str]

    @property
    def divided_by_tp(self) -> dict[str, int]: ...
    @property
    def flops_per_token(self) -> int: ...
    def params(self, hidden: int) -> Iterator[LayerParam]: ...
    def kept_values(self, learns: bool) -> int: ...


@dataclass(frozen=True)
class DenseMLP:
    """MLP with a gate."""

    kind: ClassVar[str] = "mlp"
    width: int

    @property
    def divided_by_tp(self) -> dict[str, int]:
        """Counts that TP must divide, by their fields in config.json."""
        return {"intermediate_size": self.width}

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters."""
        yield from mlp_params("mlp", "mlp.linear_fc1", "mlp.linear_fc2", hidden, self.width)

    def kept_values(self, hidden: int, is_frozen: bool, inputs: bool, tp: int) -> int:
        """Return the number of values per token that a rank keeps. `inputs` says whether adapters
        or weights need the inputs of their layers."""
        return (3 if is_frozen else 4) * self.width // tp


@dataclass(frozen=True)
class Experts:
    """Experts, of which each token goes to a few, and perhaps one more that every token shares."""

    kind: ClassVar[str] = "experts"
    count: int
    top_k: int  # experts that each token goes to
    width: int  # each expert's
    shared_width: int = 0  # the shared expert's, whose output has a gate; 0: there is none
    dense_width: int = 0  # an MLP's beside the experts
    divided_by_tp: ClassVar[dict[str, int]] = {}  # TP is 1 with experts

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield the parameters."""
        router = LayerTensor("mlp.gate.weight", (self.count, hidden))
        yield LayerParam("mlp.router", (router,))
        shapes = {"gate_up": (2 * self.width, hidden), "down": (hidden, self.width)}
        for name, shape in shapes.items():
            tensor = LayerTensor(f"mlp.experts.{name}_proj", (self.count, *shape), "mlp")
            yield LayerParam(f"mlp.{name}.weight", (tensor,), ByExpert(self.count))
        if self.shared_width:
            name, width = "mlp.shared_expert", self.shared_width
            yield from mlp_params(name, f"{name}.gate_up", f"{name}.down", hidden, width)
            gate = LayerTensor("mlp.shared_expert_gate.weight", (1, hidden), "mlp")
            yield LayerParam("mlp.shared_expert.gate.weight", (gate,))

    def idle_values(self, hidden: int) -> int:
        """Return how many values of the weights a token does not use."""
        return (self.count - self.top_k) * 3 * self.width * hidden

    def kept_values(self, hidden: int, is_frozen: bool, inputs: bool, tp: int) -> int:
        """Return the number of values per token that a rank keeps: for the router, for each copy
        of a token that goes to an expert, and for the shared expert."""
        rows = (2 if inputs else 1) * hidden + (4 if inputs else 3) * self.width
        shared = self.shared_width and (3 if is_frozen else 4) * self.shared_width + hidden
        return self.top_k * rows + hidden + 3 * self.count + shared


class FeedForward(Protocol):
    """Description of a feed-forward network."""

    kind: ClassVar[str]

    @property
    def width(self) -> int: ...
    @property
    def divided_by_tp(self) -> dict[str, int]: ...
    def params(self, hidden: int) -> Iterator[LayerParam]: ...
    def kept_values(self, hidden: int, is_frozen: bool, inputs: bool, tp: int) -> int: ...


def mlp_params(hf: str, gate_up: str, down: str, hidden: int, width: int) -> Iterator[LayerParam]:
    """Yield the parameters of an MLP with a gate, whose first two projections are one here."""
    first = tuple(
        LayerTensor(f"{hf}.{name}_proj.weight", (width, hidden), "mlp") for name in ("gate", "up")
    )
    yield LayerParam(f"{gate_up}.weight", first, RowParts(((width,), (width,))))
    last = LayerTensor(f"{hf}.down_proj.weight", (hidden, width), "mlp")
    yield LayerParam(f"{down}.weight", (last,), Columns(width))


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer."""

    kind: ClassVar[str] = "plain"
    mixer: Mixer
    ffn: FeedForward
    post_norms: ClassVar[int] = 0  # norms of the outputs of its parts

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield every parameter, in the order of the checkpoint."""
        yield vector_param("input_layernorm.weight", "input_layernorm.weight", hidden)
        yield from self.mixer.params(hidden)
        yield vector_param("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
        yield from self.ffn.params(hidden)

    def flops_per_token(self, hidden: int) -> int:
        """Return the operations per token without pairs of tokens. A multiply-add counts as two."""
        idle = self.ffn.idle_values(hidden) if isinstance(self.ffn, Experts) else 0
        weights = _matrix_values(self.params(hidden)) - idle
        return 2 * weights + self.mixer.flops_per_token

    def mlp_flops_per_token(self, hidden: int) -> int:
        """Return the part of these operations that a dense feed-forward network has."""
        return 2 * _matrix_values(self.ffn.params(hidden))


@dataclass(frozen=True)
class MtpHeadSpec:
    """MTP head of speculative decoding ("multi-token prediction"): from the decoder's input
    at a token and the hidden state of the token before, a product, a layer and a norm make a hidden
    state from which the model's own head predicts the next token."""

    layer: LayerSpec
    prefix: ClassVar[str] = "mtp."  # begins the names of its tensors in a checkpoint

    def params(self, hidden: int) -> Iterator[LayerParam]:
        """Yield every parameter, without the prefix. None of them can have an adapter."""
        yield LayerParam("fc.weight", (LayerTensor("fc.weight", (hidden, 2 * hidden)),))
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield vector_param(f"{name}.weight", f"{name}.weight", hidden)
        for param in self.layer.params(hidden):
            tensors = (LayerTensor(f"layers.0.{each.name}", each.shape) for each in param.tensors)
            yield replace(param, name=f"layers.0.{param.name}", tensors=tuple(tensors))


def _matrix_values(params: Iterator[LayerParam]) -> int:
    tensors = (tensor for param in params for tensor in param.tensors)
    return sum(prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)
