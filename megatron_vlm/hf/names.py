"""The two-way table of names: which Hugging Face tensors make one of our parameters, and how it
is cut over TP. Loading and exporting both read it.

Shapes: G key/value groups, R query heads of a group, D head size, H width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_vlm.distributed.dims import ParallelDims

# Reads a slice of a checkpoint tensor: name, and for each of its first dimensions (start, end).
ReadSlice = Callable[[str, Sequence[tuple[int, int] | None]], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut. `load` makes rank r's part out of slices of the checkpoint's
    tensors; `save` makes those tensors out of the parts of all TP ranks."""

    load: Callable[[ReadSlice, Sequence[str], int, int], Tensor]
    save: Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, the stage that holds it, and its tensors in the checkpoint."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    stage: int
    is_copy: bool = False  # the tied head of the last stage: loaded, never exported


def _part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return rank * size // ranks, (rank + 1) * size // ranks


REPLICATED = Layout(
    load=lambda read, names, rank, ranks: read(names[0], ()),
    save=lambda parts: [parts[0]],
)


def _columns(width: int) -> Layout:
    return Layout(
        load=lambda read, names, rank, ranks: read(names[0], (None, _part(width, rank, ranks))),
        save=lambda parts: [torch.cat(list(parts), dim=1)],
    )


def _vocab_rows(vocab: int) -> Layout:
    """Rows padded to a multiple of TP; the padding is zero and never leaves memory."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        rows = -(-vocab // ranks)
        start, end = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        real = read(names[0], ((start, end),))
        return torch.cat([real, real.new_zeros(rows - len(real), *real.shape[1:])])

    return Layout(load, lambda parts: [torch.cat(list(parts))[:vocab]])


def _gate_up(width: int) -> Layout:
    """Each rank holds its part of the gate over its part of the up projection."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        return torch.cat([read(name, (_part(width, rank, ranks),)) for name in names])

    def save(parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    return Layout(load, save)


def _qkv(heads: int, groups: int, head_dim: int) -> Layout:
    """Group by group: its query heads, its key, its value."""
    per_group = (heads // groups * head_dim, head_dim, head_dim)

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        first, last = _part(groups, rank, ranks)
        pieces = [
            read(name, ((first * rows, last * rows),)).unflatten(0, (last - first, rows))
            for name, rows in zip(names, per_group, strict=True)
        ]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def save(parts: Sequence[Tensor]) -> list[Tensor]:
        grouped = torch.cat([part.unflatten(0, (-1, sum(per_group))) for part in parts])
        return [piece.flatten(0, 1) for piece in grouped.split(per_group, dim=1)]

    return Layout(load, save)


def decoder_layer_entries(
    config: PretrainedConfig, backend: str, layer: int, local: int, stage: int
) -> list[Entry]:
    """The parameters of one decoder layer. TE fuses each norm into the linear that follows it."""
    hf, ours = f"model.language_model.layers.{layer}.", f"decoder.layers.{local}."
    fused = backend == "te"
    input_norm = (
        "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    )
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    ffn, head_dim = config.intermediate_size, config.head_dim
    table = [
        (input_norm, ("input_layernorm.weight",), REPLICATED),
        (
            "self_attention.linear_qkv.weight",
            tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
            _qkv(heads, groups, head_dim),
        ),
        ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), REPLICATED),
        ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), REPLICATED),
        (
            "self_attention.linear_proj.weight",
            ("self_attn.o_proj.weight",),
            _columns(heads * head_dim),
        ),
        (mlp_norm, ("post_attention_layernorm.weight",), REPLICATED),
        (
            "mlp.linear_fc1.weight",
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            _gate_up(ffn),
        ),
        ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), _columns(ffn)),
    ]
    return [
        Entry(ours + name, tuple(hf + x for x in theirs), layout, stage)
        for name, theirs, layout in table
    ]


def name_table(
    hf_config: PretrainedConfig, backend: str, dims: ParallelDims, vision_names: Iterable[str]
) -> list[Entry]:
    """Every parameter of every stage, in one order on all ranks."""
    text, last = hf_config.text_config, dims.pp - 1
    vocab = _vocab_rows(text.vocab_size)
    embedding = "model.language_model.embed_tokens.weight"
    entries = [
        Entry(f"vision_model.{name}", (f"model.visual.{name}",), REPLICATED, 0)
        for name in vision_names
    ]
    entries.append(Entry("embedding.word_embeddings.weight", (embedding,), vocab, 0))
    for stage in range(dims.pp):
        for local, layer in enumerate(dims.layers_of(stage)):
            entries += decoder_layer_entries(text, backend, layer, local, stage)
    norm = "model.language_model.norm.weight"
    entries.append(Entry("decoder.final_layernorm.weight", (norm,), REPLICATED, last))
    if not hf_config.tie_word_embeddings:
        entries.append(Entry("output_layer.weight", ("lm_head.weight",), vocab, last))
    elif last > 0:
        entries.append(Entry("output_layer.weight", (embedding,), vocab, last, is_copy=True))
    return entries
