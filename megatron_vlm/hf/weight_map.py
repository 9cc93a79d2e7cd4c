"""The two-way table of names: which Hugging Face tensors make up one of our parameters, how it is
cut, and which rank holds it. Loading, exporting and checkpoints all follow it.

Shapes: G key/value groups, R query heads of a group, D head size, H width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import learns
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import CutGroup
from megatron_vlm.family.spec import Family, ModelSizes, Part, TensorSpec, TextSizes

# Names of ours: of the head, and of the norm before it.
HEAD, LAST_NORM = "output_layer", "decoder.final_layernorm.weight"

# Reads a slice of a checkpoint tensor: name, and for each of its first dimensions (start, end).
ReadSlice = Callable[[str, Sequence[tuple[int, int] | None]], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut: over which group and along which axis, None for a parameter that
    every rank holds whole. `load` makes rank r's part from slices of the checkpoint's tensors;
    `save` makes those tensors from the parts of all ranks of the group."""

    cut: CutGroup | None
    axis: int
    load: Callable[[ReadSlice, Sequence[str], int, int], Tensor]
    save: Callable[[Sequence[Tensor]], list[Tensor]]
    groups: int = 1  # in which the rows of its tensors alternate


class Origin(Enum):
    """Where a parameter comes from and goes to."""

    hub = auto()  # loaded from a Hugging Face checkpoint, exported to one
    copy = auto()  # loaded from a tensor that another entry exports: the tied head of a last stage
    ours = auto()  # no such tensor: kept in our checkpoints alone, as adapters are


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, who holds it, and its tensors in a checkpoint."""

    ours: str
    theirs: tuple[TensorSpec, ...]
    layout: Layout
    stage: int
    part: Part
    chunk: int = 0  # of the chunks of the model that a stage holds
    origin: Origin = Origin.hub

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors in a checkpoint."""
        return tuple(tensor.name for tensor in self.theirs)

    def is_frozen(self, cfg: Config) -> bool:
        """Whether the parameter stays as it was loaded."""
        return self.origin is not Origin.ours and not learns(cfg, self.part.switch)

    @property
    def num_values(self) -> int:
        """Numbers in the whole parameter, without padding."""
        return sum(tensor.num_values for tensor in self.theirs)


def exported(table: Sequence[Entry]) -> list[str]:
    """The names of the tensors in a Hugging Face checkpoint, in the order of the table."""
    return [name for entry in table if entry.origin is Origin.hub for name in entry.names]


def _part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return rank * size // ranks, (rank + 1) * size // ranks


WHOLE = Layout(
    None,
    0,
    load=lambda read, names, rank, ranks: read(names[0], ()),
    save=lambda parts: [parts[0]],
)


def rows(height: int) -> Layout:
    """Each rank holds its rows of one tensor."""
    return Layout(
        "tp",
        0,
        load=lambda read, names, rank, ranks: read(names[0], (_part(height, rank, ranks),)),
        save=lambda parts: [torch.cat(list(parts))],
    )


def columns(width: int) -> Layout:
    """Each rank holds its columns of one tensor."""
    return Layout(
        "tp",
        1,
        load=lambda read, names, rank, ranks: read(names[0], (None, _part(width, rank, ranks))),
        save=lambda parts: [torch.cat(list(parts), dim=1)],
    )


def vocab_rows(vocab: int) -> Layout:
    """Rows padded to a multiple of TP; the padding is zero and never leaves memory."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        rows = -(-vocab // ranks)
        start, end = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        real = read(names[0], ((start, end),))
        return torch.cat([real, real.new_zeros(rows - len(real), *real.shape[1:])])

    return Layout("tp", 0, load, lambda parts: [torch.cat(list(parts))[:vocab]])


def _gate_up(width: int) -> Layout:
    """Each rank holds its part of the gate over its part of the up projection."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        return torch.cat([read(name, (_part(width, rank, ranks),)) for name in names])

    def save(parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    return Layout("tp", 0, load, save)


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

    return Layout("tp", 0, load, save, groups)


def experts(count: int) -> Layout:
    """Each rank holds some of the experts."""
    return Layout(
        "ep",
        0,
        load=lambda read, names, rank, ranks: read(names[0], (_part(count, rank, ranks),)),
        save=lambda parts: [torch.cat(list(parts))],
    )


def _layer_rows(
    text: TextSizes, backend: str, number: int
) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    """One decoder layer: our name, Hugging Face's names, the layout. TE fuses each norm into the
    linear layer that follows it."""
    fused = backend == "te"
    yield (
        "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight",
        ("input_layernorm.weight",),
        WHOLE,
    )
    yield (
        "self_attention.linear_qkv.weight",
        tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
        _qkv(text.heads, text.kv_heads, text.head_dim),
    )
    for x in "qk":
        yield f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), WHOLE
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), columns(text.query)
    if text.experts is not None and number in text.experts.layers:
        yield "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), WHOLE
        yield "mlp.router", ("mlp.gate.weight",), WHOLE
        for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            names = (f"mlp.experts.{theirs}",)
            yield f"mlp.{ours}.weight", names, experts(text.experts.count)
        return
    yield (
        "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight",),
        WHOLE,
    )
    yield (
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        _gate_up(text.ffn),
    )
    yield "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), columns(text.ffn)


def name_table(family: Family, sizes: ModelSizes, backend: str, dims: ParallelDims) -> list[Entry]:
    """Every parameter of every stage, in one order on all ranks."""
    specs = {tensor.name: tensor for tensor in sizes.tensors}
    names, last = family.names, (dims.pp - 1, dims.virtual_stages - 1)
    vocab = vocab_rows(sizes.text.vocab)

    def entry(
        ours: str,
        theirs: Sequence[str],
        layout: Layout,
        place: tuple[int, int],  # stage and chunk
        origin: Origin = Origin.hub,
    ) -> Entry:
        found = tuple(specs[name] for name in theirs)
        part = Part.head if origin is Origin.copy else found[0].part
        stage, chunk = place
        return Entry(ours, found, layout, stage, part, chunk, origin)

    entries = [
        entry(f"vision_model.{name.removeprefix(names.vision)}", [name], WHOLE, (0, 0))
        for name in specs
        if name.startswith(names.vision)
    ]
    entries.append(entry("embedding.word_embeddings.weight", [names.embedding], vocab, (0, 0)))
    for chunk, stage in product(range(dims.virtual_stages), range(dims.pp)):
        for local, number in enumerate(dims.layers_of(stage, chunk)):
            for ours, theirs, layout in _layer_rows(sizes.text, backend, number):
                full = [names.layer(number) + name for name in theirs]
                place = stage, chunk
                entries.append(entry(f"decoder.layers.{local}.{ours}", full, layout, place))
    entries.append(entry(LAST_NORM, [names.final_norm], WHOLE, last))
    if not sizes.tied:
        entries.append(entry(f"{HEAD}.weight", [names.head], vocab, last))
    elif dims.pp > 1:
        copy = [names.embedding]
        entries.append(entry(f"{HEAD}.weight", copy, vocab, last, Origin.copy))
    return entries
