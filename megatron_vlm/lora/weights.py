"""Adapters in the table of names: two entries for each, and the values that they begin with."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, exports
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes, Part, TensorSpec
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import (
    HEAD,
    LAST_NORM,
    WHOLE,
    Entry,
    Layout,
    Origin,
    ReadSlice,
    columns,
    experts,
    rows,
    vocab_rows,
)
from megatron_vlm.lora.peft_folder import AdapterFolder
from megatron_vlm.lora.targets import (
    PREFIX,
    AdaptedLinear,
    HFLinear,
    adapted,
    check_parts,
    is_of_experts,
    seed_from,
    tensors_of,
)


def adapted_weights(cfg: Config, sizes: ModelSizes) -> list[TensorSpec]:
    """The weights beside which there is an adapter; ConfigError where lora.targets cannot be."""
    if not cfg.lora.rank:
        return []
    chosen = adapted(sizes.with_head, cfg.lora.targets)
    frozen = [part for part in SWITCHES if getattr(cfg.model, f"freeze_{part}")]
    check_parts(chosen, cfg.lora.train, frozen)
    if cfg.lora.dropout and any(map(is_of_experts, chosen)):
        raise ConfigError(
            f"cannot be combined with lora.targets=[{','.join(cfg.lora.targets)}], which means "
            "experts: PEFT has no dropout there, since it adds their adapters to the weights "
            "themselves",
            key="lora.dropout",
            found=cfg.lora.dropout,
            remedy="set lora.dropout=0, or leave the experts out: lora.targets=[attention]",
        )
    return chosen


def serving_remark(cfg: Config, weights: Sequence[TensorSpec]) -> str:
    """What a person who serves the adapter should know when training begins; empty where there is
    nothing to know."""
    if "adapter" not in exports(cfg):
        return ""
    found, beyond = [], {weight.part.switch for weight in weights} - {"language"}
    if beyond:
        found.append(
            f"ignores the adapters of {' and '.join(sorted(beyond))} without a word unless it is "
            "started with --enable-tower-connector-lora"
        )
    if cfg.lora.train:
        found.append(f"refuses an adapter with the whole {' and '.join(cfg.lora.train)} beside it")
    layers = Counter(weight.name.rpartition(".")[0] for weight in weights if is_of_experts(weight))
    if 1 in layers.values():
        found.append("takes adapters of experts only where both of a layer's weights have one")
    if not found:
        return ""
    return (
        f"lora: vLLM {', and '.join(found)}; checkpoint.export=both also writes the merged model, "
        "which it serves"
    )


def adapted_linears(table: Sequence[Entry], weights: Sequence[TensorSpec]) -> list[AdaptedLinear]:
    """Our linear layers that hold one of these weights, of every stage."""
    chosen, found = {weight for weight in weights if weight.part is not Part.head}, []
    for entry in table:
        if entry.origin is Origin.hub and chosen.intersection(entry.theirs):
            slots = tuple(HFLinear(tensor, tensor in chosen) for tensor in entry.theirs)
            cut = None if entry.layout.cut is None else entry.layout.axis
            name = entry.ours.removesuffix(".weight")
            found.append(
                AdaptedLinear(name, entry.stage, entry.chunk, slots, cut, entry.layout.groups)
            )
        if entry.ours == LAST_NORM:  # where the head is: a tied one has no entry of its own
            place = entry.stage, entry.chunk
            heads = [weight for weight in weights if weight.part is Part.head]
            found += [AdaptedLinear(HEAD, *place, (HFLinear(head, True),), 0, 1) for head in heads]
    return found


def adapter_entries(linears: Sequence[AdaptedLinear], rank: int) -> Iterator[Entry]:
    """A and B of each slot that has an adapter, cut as their weight is."""
    for linear in linears:
        for slot in linear.slots:
            if slot.adapted:
                where = "lora" if linear.is_of_experts else f"lora.{slot.leaf}"
                pairs = zip(tensors_of(slot.base, rank), _layouts(linear, slot.base), strict=True)
                for name, (tensor, layout) in zip("AB", pairs, strict=True):
                    yield Entry(
                        f"{linear.name}.{where}.{name}",
                        (tensor,),
                        layout,
                        linear.stage,
                        slot.base.part,
                        linear.chunk,
                        Origin.ours,
                    )


def _layouts(linear: AdaptedLinear, base: TensorSpec) -> tuple[Layout, Layout]:
    """Of A and B: where the rows of their weight are cut, B's are, and where its columns are, A's.
    Each rank has those of its own experts."""
    *count, height, width = base.shape
    if count:
        return experts(*count), experts(*count)
    if linear.is_head:
        return WHOLE, vocab_rows(height)
    return columns(width) if linear.cut == 1 else WHOLE, rows(height) if linear.cut == 0 else WHOLE


def fill(
    held: Mapping[Entry, nn.Parameter],
    grid: RankGroups,
    value_of: Callable[[TensorSpec, str], Tensor | None],
) -> None:
    """Each rank's part of the values that there are, whole, for a tensor by its name in PEFT's
    files. Those of Hugging Face's own tensors are of parameters that have one each."""
    for entry, param in held.items():
        if len(entry.theirs) > 1:
            continue
        name = entry.names[0] if entry.origin is Origin.ours else PREFIX + entry.names[0]
        whole = value_of(entry.theirs[0], name)
        if whole is not None:
            part = entry.layout.load(_slices_of(whole), [name], *grid.along(entry.layout.cut))
            with torch.no_grad():
                param.copy_(part)


def _slices_of(whole: Tensor) -> ReadSlice:
    def read(_: str, spans: Sequence[tuple[int, int] | None]) -> Tensor:
        return whole[tuple(slice(None) if span is None else slice(*span) for span in spans)]

    return read


def values(
    cfg: Config, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> Callable[[TensorSpec, str], Tensor | None]:
    """What training begins with: the values of lora.path, or else as PEFT begins. A is drawn, and B
    is zero; the numbers are the same in every layout."""
    lora, seed = cfg.lora, cfg.train.seed
    if lora.path is not None:
        folder = AdapterFolder(lora.path, lora, weights, source)
        return lambda _, name: folder.read(name)

    def begin(tensor: TensorSpec, name: str) -> Tensor | None:
        if ".lora_" not in name:
            return None
        whole = torch.zeros(tensor.shape)
        if name.endswith("lora_A.weight"):
            generator = torch.Generator().manual_seed(seed_from(seed, name))
            rows_I = whole.flatten(0, -2)  # of all experts at once, as PEFT has them
            if lora.init == "gaussian":
                nn.init.normal_(rows_I, std=1 / lora.rank, generator=generator)
            else:
                nn.init.kaiming_uniform_(rows_I, a=math.sqrt(5), generator=generator)
        return whole

    return begin
