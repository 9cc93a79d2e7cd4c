"""Export of adapters: as PEFT's files, or merged into the model's weights."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.config.trainable import Exported, scale_of
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.spec import TensorSpec
from megatron_vlm.hf import write_export
from megatron_vlm.hf.block_weight import rounded
from megatron_vlm.hf.export_mark import ExportMark
from megatron_vlm.hf.gather_weights import write_gathered
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint
from megatron_vlm.hf.model_card import CARD, TrainingSummary, model_card
from megatron_vlm.hf.weight_map import Entry, exported_names
from megatron_vlm.io.hub import hub_name
from megatron_vlm.lora import peft_folder, targets


@dataclass(frozen=True)
class TrainedAdapter:
    """Weights that a run with adapters has trained: whole tensors by their names in checkpoints."""

    lora: LoraConfig
    weights: Sequence[TensorSpec]  # weights with an adapter
    source: HFCheckpoint
    tensors: Mapping[str, Tensor]

    def pair(self, weight: TensorSpec) -> tuple[Tensor, Tensor]:
        """Return A and B of a weight, in the dtype in which the weight is stored."""
        name = self.source.stored_name(weight.name)
        first, *_ = self.source.experts.stored(name, weight.shape)
        dtype = FLOATS[self.source.tensors[first].dtype]
        down, up = (
            self.tensors[tensor.name] for tensor in targets.tensors_of(weight, self.lora.rank)
        )
        return down.to(dtype), up.to(dtype)


def export_adapter(
    held: Mapping[Entry, nn.Parameter],
    trained: Sequence[Entry],
    table: Sequence[Entry],
    grid: RankGroups,
    form: tuple[LoraConfig, Sequence[TensorSpec], HFCheckpoint],
    out: str | Path,
    kind: Exported,
    mark: ExportMark | None = None,
    done: TrainingSummary | None = None,
) -> None:
    """Write the weights of `trained`; `form` is the rest of a TrainedAdapter. A collective."""

    def write_trained(named: Iterator[tuple[str, Tensor | None]]) -> None:
        tensors = {name: value for name, value in named if value is not None}
        write(TrainedAdapter(*form, tensors), table, out, kind, mark, done)

    write_gathered(held, table, grid, write_trained, of=set(trained).__contains__)


def write(
    adapter: TrainedAdapter,
    table: Sequence[Entry],
    out: str | Path,
    kind: Exported,
    mark: ExportMark | None = None,
    done: TrainingSummary | None = None,
    change: write_export.ChangeFolder | None = None,
) -> None:
    """Write the folder as an adapter or as a merged model, which `change` changes then."""
    lora, source = adapter.lora, adapter.source
    if kind == "merged":
        names, head = exported_names(table), source.sizes.head
        if source.sizes.tied and head in adapter.weights:
            names, source = [*names, head.name], source.without_tied_head()
        frozen = targets.entries_in_blocks(lora, table, adapter.source)
        named = merged_tensors(adapter, names, {name for entry in frozen for name in entry.names})
        write_export.write_folder(source, names, named, out, mark=mark, done=done, change=change)
        return
    if whole := [part for part in lora.train if part != "merger"]:
        raise CheckpointError(
            f"has {whole[0]}, and PEFT's files have no place for its weights",
            key="lora.train",
            found=lora.train,
            remedy="write the merged model: megatron-vlm export --as merged",
        )
    if source.sizes.trains_mtp:
        raise CheckpointError(
            ": PEFT's files have no place for the MTP head",
            key="model.mtp",
            found="train",
            remedy="write the merged model: megatron-vlm export --as merged",
        )
    forms = peft_folder.file_tensors(adapter.weights, lora.rank)
    pairs = chain.from_iterable(map(adapter.pair, adapter.weights))
    tensors = {form.name: form.stored(value) for form, value in zip(forms, pairs, strict=True)}
    for tensor in peft_folder.tensors_saved_whole(source.sizes.tensors, lora):
        dtype = FLOATS[source.tensors[tensor.name].dtype]
        tensors[targets.PREFIX + tensor.name] = adapter.tensors[tensor.name].to(dtype).contiguous()
    for name, value in tensors.items():
        write_export.check_finite(name, value, out)
    with write_export.new_export(out, mark) as partial:
        write_export.write_tensors(
            partial / peft_folder.ADAPTER_FILE, dict(sorted(tensors.items()))
        )
        config = _render_config(lora, adapter.weights, source)
        (partial / peft_folder.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        card = model_card(source, done, is_adapter=True)
        (partial / CARD).write_text(card, encoding="utf-8")


def _render_config(
    lora: LoraConfig, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> dict[str, Any]:
    base = hub_name(source.name)
    # Mergers are saved whole: model.visual.merger, model.visual.deepstack_merger_list.0. So is a
    # scalar head.
    whole = map(targets.module_of, peft_folder.tensors_saved_whole(source.sizes.tensors, lora))
    modules = sorted({name.split(".linear_fc")[0].split(".norm")[0] for name in whole})
    linears = [weight for weight in weights if not targets.is_of_experts(weight)]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if source.sizes.has_score else "CAUSAL_LM",
        "base_model_name_or_path": base.repo if base else str(source.path),
        "revision": base.commit if base else None,
        "inference_mode": True,
        "r": lora.rank,
        # PEFT and other programs declare an integer.
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _shortest_names(linears, source.sizes.with_head),
        "target_parameters": peft_folder.parameters(weights, source.sizes.tensors) or None,
        "modules_to_save": modules or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _shortest_names(weights: Sequence[TensorSpec], tensors: Sequence[TensorSpec]) -> list[str]:
    """Return target_modules. PEFT adapts every module with one of these names, or whose name ends
    with one after a dot. The names are shortened to their last parts if those match no other
    module, such as one that consists of others."""
    chosen = {targets.module_of(weight) for weight in weights}
    leaves = {name.rpartition(".")[2] for name in chosen}
    parts = (tensor.name.split(".")[:-1] for tensor in tensors)
    modules = {tuple(path[:end]) for path in parts for end in range(1, len(path) + 1)}
    matched = {".".join(path) for path in modules if path[-1] in leaves}
    return sorted(leaves if matched == chosen else chosen)


def merged_tensors(
    adapter: TrainedAdapter, names: Sequence[str], in_blocks: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model: as it is stored, as it was trained, or merged with its
    adapter. Weights `in_blocks` have the values beside which the adapters were trained."""
    with_adapter = {weight.name: weight for weight in adapter.weights}
    source = adapter.source
    shapes = {tensor.name: tensor.shape for tensor in source.sizes.with_head}
    for name in names:
        if name in adapter.tensors:
            yield name, adapter.tensors[name]
            continue
        stored = source.read(source.stored_name(name), [(0, shapes[name][0])])
        if name in in_blocks:
            assert adapter.lora.base is not None
            stored = rounded(stored, adapter.lora.base)
        if name in with_adapter:
            down, up = adapter.pair(with_adapter[name])
            with torch.no_grad():
                stored = stored.float() + scale_of(adapter.lora) * (up.float() @ down.float())
        yield name, stored
    source.close()
