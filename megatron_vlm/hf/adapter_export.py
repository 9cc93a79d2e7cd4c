"""Adapters out: as PEFT's files, or merged into the weights beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_vlm.config.lora import Exported
from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.distributed.agree import fail_together
from megatron_vlm.distributed.grid import Grid
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.adapters import PREFIX, tensors_of
from megatron_vlm.family.sizes import TensorSpec
from megatron_vlm.hf.adapter_files import CONFIG, WEIGHTS, merged, render_config, saved_whole
from megatron_vlm.hf.adapter_form import file_tensors
from megatron_vlm.hf.card import CARD, Training, model_card
from megatron_vlm.hf.export import (
    check_finite,
    gather_tensors,
    new_export,
    write_folder,
    write_tensors,
)
from megatron_vlm.hf.export_mark import ExportMark
from megatron_vlm.hf.names import Entry, exported
from megatron_vlm.hf.source import FLOATS, HFCheckpoint


@dataclass(frozen=True)
class TrainedAdapter:
    """What a run with adapters has trained: whole tensors by their names in checkpoints."""

    lora: LoraConfig
    weights: Sequence[TensorSpec]  # that have an adapter
    source: HFCheckpoint
    tensors: Mapping[str, Tensor]

    def pair(self, weight: TensorSpec) -> tuple[Tensor, Tensor]:
        """A and B of a weight, in the type in which that is stored."""
        name = self.source.stored_as(weight.name)
        first, *_ = self.source.experts.stored(name, weight.shape)
        dtype = FLOATS[self.source.tensors[first].dtype]
        down, up = (self.tensors[each.name] for each in tensors_of(weight, self.lora.rank))
        return down.to(dtype), up.to(dtype)

    def in_file(self) -> dict[str, Tensor]:
        """Those of all weights, as PEFT's files have them."""
        forms = file_tensors(self.weights, self.lora.rank)
        pairs = chain.from_iterable(map(self.pair, self.weights))
        return {form.name: form.stored(value) for form, value in zip(forms, pairs, strict=True)}


def export_adapter(
    held: Mapping[Entry, nn.Parameter],
    trained: Sequence[Entry],
    table: Sequence[Entry],
    grid: Grid,
    form: tuple[LoraConfig, Sequence[TensorSpec], HFCheckpoint],
    out: str | Path,
    kind: Exported,
    mark: ExportMark | None = None,
    done: Training | None = None,
) -> None:
    """Write what the ranks hold of `trained`; `form` is what a TrainedAdapter has besides. A
    collective."""
    device = next(iter(held.values())).device
    chosen = set(trained)
    named: Iterator[tuple[str, Tensor | None]] = iter(())
    if grid.edp.rank == 0:  # the replicas that share experts with the first one send theirs
        named = gather_tensors(held, table, grid, of=lambda entry: entry in chosen)
    with fail_together(device, CheckpointError):
        try:
            if grid.dp.rank == 0 and grid.leads:
                tensors = {name: value for name, value in named if value is not None}
                write(TrainedAdapter(*form, tensors), table, out, kind, mark, done)
        finally:
            for _ in named:  # whatever became of the first rank's file, the others send theirs
                pass


def write(
    adapter: TrainedAdapter,
    table: Sequence[Entry],
    out: str | Path,
    kind: Exported,
    mark: ExportMark | None = None,
    done: Training | None = None,
) -> None:
    """The folder, in one form or the other."""
    lora, source = adapter.lora, adapter.source
    if kind == "merged":
        names, head = exported(table), source.sizes.head
        if source.sizes.tied and head in adapter.weights:
            names, source = [*names, head.name], source.untied()
        named = merged_tensors(adapter, names)
        write_folder(source, names, named, out, mark=mark, done=done)
        return
    _check_fits(lora)
    tensors = adapter.in_file()
    for tensor in saved_whole(source.sizes.tensors, lora):
        dtype = FLOATS[source.tensors[tensor.name].dtype]
        tensors[PREFIX + tensor.name] = adapter.tensors[tensor.name].to(dtype).contiguous()
    for name, value in tensors.items():
        check_finite(name, value, out)
    with new_export(out, mark) as partial:
        write_tensors(partial / WEIGHTS, dict(sorted(tensors.items())))
        config = render_config(lora, adapter.weights, source)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        card = model_card(source, done, is_adapter=True)
        (partial / CARD).write_text(card, encoding="utf-8")


def _check_fits(lora: LoraConfig) -> None:
    if whole := [part for part in lora.train if part != "merger"]:
        raise CheckpointError(
            f"lora.train has {whole[0]}, and PEFT's files have no place for its weights; write the "
            "merged model: megatron-vlm export --as merged"
        )


def merged_tensors(adapter: TrainedAdapter, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model: as it is stored, as it was trained, or with its adapter in it."""
    with_adapter = {weight.name: weight for weight in adapter.weights}
    source = adapter.source
    shapes = {each.name: each.shape for each in source.sizes.with_head}
    for name in names:
        if name in adapter.tensors:
            yield name, adapter.tensors[name]
            continue
        stored = source.read(source.stored_as(name), [(0, shapes[name][0])])
        if name in with_adapter:
            down, up = adapter.pair(with_adapter[name])
            with torch.no_grad():
                stored = merged(stored, down, up, adapter.lora)
        yield name, stored
    source.close()
