"""Two-way table of names: the Hugging Face tensors that make up one of our parameters, how it is
sharded, and which rank holds it. Loading, exporting and checkpoints all follow this table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, product

import torch
from torch import Tensor

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import learns
from megatron_vlm.distributed.dims import ParallelDims, ShardGroup
from megatron_vlm.family import decoder_layers
from megatron_vlm.family.spec import SCORE, ModelSizes, Part, TensorSpec
from megatron_vlm.hf.expert_layouts import ReadSlice
from megatron_vlm.hf.layer_backends import BACKENDS

# Our names of the head and of the norm before it.
HEAD, LAST_NORM = "output_layer", "decoder.final_layernorm.weight"
MTP_PREFIX = "mtp_head."  # prefix of our names of the MTP head


@dataclass(frozen=True)
class Layout:
    """Sharding of a parameter: the group and the axis, with None as the group of a parameter that
    every rank holds whole. `load` makes rank r's part from slices of the checkpoint's tensors;
    `save` makes those tensors from the parts of all ranks of the group."""

    shard_group: ShardGroup | None
    axis: int
    load: Callable[[ReadSlice, Sequence[str], int, int], Tensor]
    save: Callable[[Sequence[Tensor]], list[Tensor]]
    groups: int = 1  # number of groups in which the rows of its tensors alternate
    # For each of its tensors, the parts whose rows are sharded by themselves.
    parts: tuple[tuple[int, ...], ...] = ()


class Origin(Enum):
    """Source and destination of a parameter."""

    hub = auto()  # loaded from a Hugging Face checkpoint, exported to one
    copy = auto()  # loaded from a tensor that another entry exports: a last stage's tied head
    added = auto()  # no such tensor: only in our checkpoints, like adapters


@dataclass(frozen=True)
class Entry:
    """Entry for one of our parameters: its place and its tensors in a checkpoint."""

    our_name: str
    hf_tensors: tuple[TensorSpec, ...]
    layout: Layout
    stage: int
    part: Part
    chunk: int = 0  # number of the chunk of the model within its stage
    origin: Origin = Origin.hub

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameter's tensors in a checkpoint."""
        return tuple(tensor.name for tensor in self.hf_tensors)

    def is_frozen(self, cfg: Config) -> bool:
        """Return whether the parameter stays as it was loaded."""
        if not all(tensor.learns for tensor in self.hf_tensors):
            return True
        if self.part is Part.mtp:
            return cfg.model.mtp != "train"
        is_new = self.origin is Origin.added or self.part is Part.score
        return not is_new and not learns(cfg, self.part.switch)

    def is_in_blocks(self, lora: LoraConfig) -> bool:
        """Return whether lora.base stores the parameter in 4 or 8 bits: a weight of a linear layer
        that is not trained, with the same exceptions as in transformers, the embedding and the
        head."""
        return (
            lora.base is not None
            and self.origin is Origin.hub
            and self.part not in (Part.embed, Part.head, Part.score)
            and self.part.switch not in lora.train
            and all(tensor.lora_group for tensor in self.hf_tensors)
        )

    @property
    def num_values(self) -> int:
        """Number of values in the whole parameter, without padding."""
        return sum(tensor.num_values for tensor in self.hf_tensors)

    def values_per_rank(self, dims: ParallelDims) -> int:
        """Return the number of values that each rank with the parameter holds, with padding."""
        ranks = {None: 1, "tp": dims.tp, "ep": dims.ep}[self.layout.shard_group]
        lengths = [(tensor, tensor.shape[self.layout.axis]) for tensor in self.hf_tensors]
        return sum(tensor.num_values // length * -(-length // ranks) for tensor, length in lengths)


def exported_names(table: Sequence[Entry]) -> list[str]:
    """Return the names of the tensors in a Hugging Face checkpoint, in the order of the table."""
    return [name for entry in table if entry.origin is Origin.hub for name in entry.names]


def _part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    return rank * size // ranks, (rank + 1) * size // ranks


WHOLE = Layout(
    None, 0, load=lambda read, names, rank, ranks: read(names[0], ()), save=lambda parts: [parts[0]]
)


def rows(*widths: Sequence[int]) -> Layout:
    """Return the layout of rows. Each tensor has parts of these widths, each sharded by itself."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        pieces = []
        for name, parts in zip(names, widths, strict=True):
            for start, width in zip(accumulate(parts, initial=0), parts, strict=False):
                first, last = _part(width, rank, ranks)
                pieces.append(read(name, ((start + first, start + last),)))
        return torch.cat(pieces)

    def save(parts: Sequence[Tensor]) -> list[Tensor]:
        local = [width // len(parts) for tensor in widths for width in tensor]
        by_rank = [iter(part.split(local)) for part in parts]
        return [
            torch.cat([next(pieces) for _ in tensor for pieces in by_rank]) for tensor in widths
        ]

    return Layout("tp", 0, load, save, parts=tuple(map(tuple, widths)))


def columns(width: int) -> Layout:
    """Return the layout in which each rank holds its columns of one tensor."""
    return Layout(
        "tp",
        1,
        load=lambda read, names, rank, ranks: read(names[0], (None, _part(width, rank, ranks))),
        save=lambda parts: [torch.cat(list(parts), dim=1)],
    )


def vocab_rows(vocab: int) -> Layout:
    """Return the layout of rows, padded with zeros to a multiple of TP, in memory alone."""

    def load(read: ReadSlice, names: Sequence[str], rank: int, ranks: int) -> Tensor:
        rows = -(-vocab // ranks)
        start, end = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
        real = read(names[0], ((start, end),))
        return torch.cat([real, real.new_zeros(rows - len(real), *real.shape[1:])])

    return Layout("tp", 0, load, lambda parts: [torch.cat(list(parts))[:vocab]])


def head_groups(groups: int, heights: Sequence[int]) -> Layout:
    """Return the layout that has, group by group, the rows of the group in each of these tensors:
    the queries of a group, its key and its value."""
    per_group = [height // groups for height in heights]

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
    """Return the layout in which each rank holds some of the experts."""
    return Layout(
        "ep",
        0,
        load=lambda read, names, rank, ranks: read(names[0], (_part(count, rank, ranks),)),
        save=lambda parts: [torch.cat(list(parts))],
    )


def _layout_of(param: decoder_layers.LayerParam) -> Layout:
    match param.sharding:
        case decoder_layers.Whole():
            return WHOLE
        case decoder_layers.RowParts(widths):
            return rows(*widths)
        case decoder_layers.Columns(width):
            return columns(width)
        case decoder_layers.HeadGroups(count):
            return head_groups(count, [tensor.shape[0] for tensor in param.tensors])
        case decoder_layers.ByExpert(count):
            return experts(count)


def name_table(sizes: ModelSizes, backend: str, dims: ParallelDims) -> list[Entry]:
    """Return every parameter of every stage, in the same order on all ranks."""
    specs = {tensor.name: tensor for tensor in sizes.tensors}
    names, last = sizes.names, (dims.pp - 1, dims.virtual_stages - 1)
    vocab = vocab_rows(sizes.text.vocab)

    def entry(
        our_name: str,
        hf_names: Sequence[str],
        layout: Layout,
        place: tuple[int, int],  # stage and chunk
        origin: Origin = Origin.hub,
    ) -> Entry:
        tensors = tuple(specs[name] for name in hf_names)
        part = Part.head if origin is Origin.copy else tensors[0].part
        stage, chunk = place
        return Entry(our_name, tensors, layout, stage, part, chunk, origin)

    entries = [
        entry(f"vision_model.{name.removeprefix(names.vision)}", [name], WHOLE, (0, 0))
        for name, tensor in specs.items()
        if tensor.part in (Part.vision, Part.merger)
    ]
    entries.append(entry("embedding.word_embeddings.weight", [names.embedding], vocab, (0, 0)))
    for chunk, stage in product(range(dims.virtual_stages), range(dims.pp)):
        for local, number in enumerate(dims.layers_of(stage, chunk)):
            layer = sizes.text.layers[number]
            for param in layer.params(sizes.text.hidden):
                our_name = f"decoder.layers.{local}.{BACKENDS[backend].our_name(layer, param)}"
                full = [names.layer(number) + tensor.name for tensor in param.tensors]
                entries.append(entry(our_name, full, _layout_of(param), (stage, chunk)))
    entries.append(entry(LAST_NORM, [names.final_norm], WHOLE, last))
    if sizes.has_score:
        entries.append(entry(SCORE, [SCORE], WHOLE, last))
    if not sizes.tied:
        entries.append(entry(f"{HEAD}.weight", [names.head], vocab, last))
    elif dims.pp > 1:
        copy = [names.embedding]
        entries.append(entry(f"{HEAD}.weight", copy, vocab, last, Origin.copy))
    if sizes.trains_mtp and (mtp := sizes.mtp) is not None:
        for param in mtp.params(sizes.text.hidden):
            full = [mtp.prefix + tensor.name for tensor in param.tensors]
            entries.append(entry(MTP_PREFIX + param.name, full, _layout_of(param), last))
    return entries
