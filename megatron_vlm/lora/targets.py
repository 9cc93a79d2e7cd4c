"""LoRA targets: the linear layers with an adapter, the adapter's two tensors, and their entries in
the table of names; and the frozen weights that are stored in blocks.

A layer y = W x becomes y = W x + scale * B A x, with A [rank, in] and B [out, rank]. Each expert
has an adapter of its own: A [experts, rank, in] and B [experts, out, rank].
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b

from megatron_vlm.config.lora_base_types import WEIGHTS_PER_BLOCK
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import SWITCHES, exports
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes, Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import (
    HEAD,
    LAST_NORM,
    WHOLE,
    Entry,
    Layout,
    Origin,
    columns,
    experts,
    rows,
    vocab_rows,
)

PREFIX = "base_model.model."  # prefix of every name in PEFT's files
GROUPS = ("attention", "mlp", "head", "merger", "vision_attention", "vision_mlp")
_ROUTERS = (".mlp.gate.weight", ".router.proj.weight")
_SHOWN = 8  # maximum number of names in an error


@dataclass(frozen=True)
class HFLinear:
    """Linear layer of Hugging Face, or all experts' layers, in one of our linear layers."""

    base: TensorSpec  # its weight
    adapted: bool
    parts: tuple[int, ...] = ()  # parts of its rows that TP cuts by themselves; (): all its rows

    @property
    def leaf(self) -> str:
        """Last part of the layer's name, such as q_proj."""
        return module_of(self.base).rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLinear:
    """Linear layer of our model with adapters. PEFT has separate adapters for q, k and v, and for
    gate and up. They are separate here as well, although the weights themselves are one."""

    name: str  # name of the module
    stage: int
    chunk: int
    slots: tuple[HFLinear, ...]
    shard_axis: int | None  # axis of the weight that is sharded over TP
    groups: int  # number of groups in which the rows of the slots alternate, over all TP ranks

    @property
    def is_of_experts(self) -> bool:
        return is_of_experts(self.slots[0].base)

    @property
    def is_head(self) -> bool:
        return self.slots[0].base.part is Part.head


def module_of(tensor: TensorSpec) -> str:
    """Return the name of a weight's module."""
    return tensor.name.removesuffix(".weight")


@lru_cache(maxsize=8)
def adapted_specs(tensors: tuple[TensorSpec, ...], targets: tuple[str, ...]) -> list[TensorSpec]:
    """Return the weights that get an adapter: the named groups, and the modules whose
    name, or its end after a dot, equals another target or matches it as a pattern."""
    linears = [tensor for tensor in tensors if tensor.lora_group]
    targeted = set()
    for target in targets:
        if target in GROUPS:
            matching = {linear for linear in linears if linear.lora_group == target}
        else:
            matching = {linear for linear in linears if _matches(linear, target)}
        routers = (each for each in tensors if each.name.endswith(_ROUTERS))
        if not matching and (router := next((r for r in routers if _matches(r, target)), None)):
            raise ConfigError(
                f"means the router {module_of(router)}, and routers have no adapters here",
                key="lora.targets",
                found=target,
                remedy="leave it out: mlp means the experts themselves",
            )
        if not matching:
            raise ConfigError(
                "matches no linear layer of the model",
                key="lora.targets",
                found=target,
                remedy=f"give {', '.join(GROUPS)}, or names such as {_samples(linears)}",
            )
        targeted |= matching
    return [linear for linear in linears if linear in targeted]


def is_of_experts(tensor: TensorSpec) -> bool:
    """Return whether a tensor is a weight of all experts of a layer, one after the other."""
    return OF_EXPERTS in tensor.name


def _matches(tensor: TensorSpec, target: str) -> bool:
    name = module_of(tensor)
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _samples(linears: Sequence[TensorSpec]) -> str:
    leaves = dict.fromkeys(module_of(each).rpartition(".")[2] for each in linears)
    first = next(module_of(each) for each in linears if each.part is Part.decoder)
    whole = "layers." + first.partition(".layers.")[2]
    return f"{', '.join(list(leaves)[: 2 * _SHOWN])} or *.{whole}"


def check_parts(
    chosen: Sequence[TensorSpec], trained: Sequence[str], frozen: Sequence[str]
) -> None:
    """Refuse adapters in a part that is trained whole or frozen."""
    for tensor in chosen:
        part = tensor.part.switch
        has = f"has {module_of(tensor)} of the part {part}"
        if part in trained:
            raise ConfigError(
                f"{has}, which lora.train trains whole: adapters there would only repeat it",
                key="lora.targets",
                remedy="remove one of them",
            )
        if part in frozen:
            raise ConfigError(
                f"keeps the part {part} as it is, and lora.targets {has}",
                key=f"model.freeze_{part}",
                found=True,
                remedy="set it to false: with lora.rank set, the weights stay as they are anyway",
            )


def seed_from(*decides: object) -> int:
    """Return the seed of an adapter's random numbers."""
    return int.from_bytes(blake2b(repr(decides).encode(), digest_size=7).digest())


def tensors_of(base: TensorSpec, rank: int) -> tuple[TensorSpec, TensorSpec]:
    """Return A and B of a weight's adapter, by their names in PEFT's files. The files have other
    names and shapes for experts: lora/peft_folder.py."""
    *experts, rows, columns = base.shape
    stem = f"{PREFIX}{module_of(base)}.lora_"
    return (
        replace(base, name=f"{stem}A.weight", shape=(*experts, rank, columns)),
        replace(base, name=f"{stem}B.weight", shape=(*experts, rows, rank)),
    )


def adapted_linears(table: Sequence[Entry], weights: Sequence[TensorSpec]) -> list[AdaptedLinear]:
    """Return our linear layers that hold one of these weights, from every stage."""
    chosen, linears = {weight for weight in weights if weight.part is not Part.head}, []
    for entry in table:
        place, layout = (entry.stage, entry.chunk), entry.layout
        if entry.origin is Origin.hub and chosen.intersection(entry.hf_tensors):
            parts = layout.parts or ((),) * len(entry.hf_tensors)
            slots = tuple(
                HFLinear(tensor, tensor in chosen, widths)
                for tensor, widths in zip(entry.hf_tensors, parts, strict=True)
            )
            axis = None if layout.shard_group is None else layout.axis
            name = entry.our_name.removesuffix(".weight")
            linears.append(AdaptedLinear(name, *place, slots, axis, layout.groups))
        if entry.our_name == LAST_NORM:  # here is the head; a tied one has no entry of its own
            heads = [HFLinear(weight, True) for weight in weights if weight.part is Part.head]
            linears += [AdaptedLinear(HEAD, *place, (head,), 0, 1) for head in heads]
    return linears


def adapter_entries(linears: Sequence[AdaptedLinear], rank: int) -> Iterator[Entry]:
    """Yield the entries of A and B for each slot with an adapter, sharded like its weight."""
    for linear in linears:
        for slot in linear.slots:
            if slot.adapted:
                where = "lora" if linear.is_of_experts else f"lora.{slot.leaf}"
                pairs = zip(tensors_of(slot.base, rank), _layouts(linear, slot), strict=True)
                for name, (tensor, layout) in zip("AB", pairs, strict=True):
                    yield Entry(
                        f"{linear.name}.{where}.{name}",
                        (tensor,),
                        layout,
                        linear.stage,
                        slot.base.part,
                        linear.chunk,
                        Origin.added,
                    )


def _layouts(linear: AdaptedLinear, slot: HFLinear) -> tuple[Layout, Layout]:
    """Return the layouts of A and B. B's rows are sharded where the weight's rows are, and A's
    columns where the weight's columns are. Each rank has the adapters of its own experts."""
    *count, height, width = slot.base.shape
    if count:
        return experts(*count), experts(*count)
    if linear.is_head:
        return WHOLE, vocab_rows(height)
    first = columns(width) if linear.shard_axis == 1 else WHOLE
    return first, rows(slot.parts or (height,)) if linear.shard_axis == 0 else WHOLE


# Frozen weights beside adapters in 4 or 8 bits, `lora.base`.


def entries_in_blocks(
    lora: LoraConfig, table: Sequence[Entry], source: HFCheckpoint
) -> list[Entry]:
    """Return the parameters that are stored as codes. In a checkpoint of codes these are the ones
    whose every tensor is stored so there: the others stay as they are."""
    chosen = [entry for entry in table if entry.is_in_blocks(lora)]
    if not source.in_blocks:
        return chosen
    return [entry for entry in chosen if all(map(source.is_in_blocks, entry.names))]


def check_base_type(cfg: Config, source: HFCheckpoint) -> None:
    """Refuse a checkpoint that is stored in 4 bits where the weights are to have another form."""
    if source.in_blocks and cfg.lora.base != "nf4":
        raise ConfigError(
            f"does not fit the checkpoint, which has {len(source.in_blocks)} weights in 4 bits "
            "(NF4): they can only be frozen, beside adapters",
            key="lora.base",
            found=cfg.lora.base,
            allowed=("nf4",),
            remedy="set lora=default lora.base=nf4, or give the checkpoint in bf16 from which this "
            "one was made",
        )


def check_blocks(lora: LoraConfig, table: Sequence[Entry], tp: int) -> None:
    """Refuse weights that cannot be stored in blocks: where blocks do not fill the rows of a part,
    the codes would depend on the layout."""
    if (misfit := find_misfit(lora, table, tp)) is not None:
        raise misfit


def find_misfit(lora: LoraConfig, table: Sequence[Entry], tp: int) -> ConfigError | None:
    """Return the error for the first weight that cannot be stored in blocks."""
    block = WEIGHTS_PER_BLOCK
    for entry in table:
        if not entry.is_in_blocks(lora):
            continue
        tensor = entry.hf_tensors[0]
        row = tensor.shape[-1]
        is_alone = entry.layout.shard_group is None and len(entry.hf_tensors) == 1
        if tensor.num_values % block or (row % block and not is_alone):
            return ConfigError(
                f"stores weights in blocks of {block} that share a scale, and the rows of "
                f"{tensor.name} {list(tensor.shape)} are not a whole number of blocks",
                key="lora.base",
                found=lora.base,
                remedy="set lora.base=null: this model is too small for blocks; one of "
                "megatron-vlm demo tiny --head-dim 32 --intermediate 192 is not",
            )
        has_columns = entry.layout.shard_group == "tp" and entry.layout.axis == 1
        if has_columns and row % (tp * block):
            return ConfigError(
                f"cuts each row of {tensor.name}, which has {row} weights, into parts of "
                f"{row / tp:g}, inside a block of {block} that share a scale",
                key="parallel.tp",
                found=tp,
                allowed=[d for d in range(1, tp) if tp % d == 0 and row % (d * block) == 0],
                remedy="set parallel.tp to one of these and raise parallel.pp, or set "
                "lora.base=null",
            )
    return None


def adapted_weights(cfg: Config, sizes: ModelSizes) -> list[TensorSpec]:
    """Return the weights that get an adapter, or raise ConfigError."""
    if not cfg.lora.rank:
        return []
    chosen = adapted_specs(sizes.with_head, cfg.lora.targets)
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
    """Return a remark for the user who will serve the adapter; empty where there is none."""
    if "adapter" not in exports(cfg):
        return ""
    notes, parts = [], {weight.part.switch for weight in weights} - {"language"}
    if parts:
        notes.append(
            f"silently ignores the adapters of {' and '.join(sorted(parts))} unless it is started "
            "with --enable-tower-connector-lora"
        )
    if cfg.lora.train:
        notes.append(f"refuses an adapter with the whole {' and '.join(cfg.lora.train)} beside it")
    layers = Counter(weight.name.rpartition(".")[0] for weight in weights if is_of_experts(weight))
    if 1 in layers.values():
        notes.append("takes adapters of experts only where both of a layer's weights have one")
    mixers = _linear_attention(weights)
    if any("in_proj_z" in found and "in_proj_qkv" not in found for found in mixers.values()):
        notes.append("refuses an adapter of in_proj_z where in_proj_qkv has none")
    engines = [f"vLLM {', and '.join(notes)}"] if notes else []
    served = "which it serves"
    if any(mixers.values()):
        engines.append(f"SGLang {_sglang(set().union(*mixers.values()))}")
        served = "which has no adapters"
    if not engines:
        return ""
    return (
        f"lora: {'; '.join(engines)}; checkpoint.export=both also writes the merged model, {served}"
    )


def _linear_attention(weights: Sequence[TensorSpec]) -> dict[str, set[str]]:
    """Return the first projections with an adapter of each gated delta net."""
    found: dict[str, set[str]] = defaultdict(set)
    for weight in weights:
        mixer, _, leaf = module_of(weight).rpartition(".")
        if leaf.startswith("in_proj_"):
            found[mixer].add(leaf)
    return found


def _sglang(leaves: set[str]) -> str:
    """Return what SGLang is known to do with adapters of these projections of gated delta nets,
    which it joins in two layers."""
    known = {
        "does not start with an adapter of {} (its issue 30168)": ("in_proj_qkv", "in_proj_z"),
        "drops the adapter of {} (its pull request 30499)": ("in_proj_b", "in_proj_a"),
    }
    chosen = {text: [leaf for leaf in joined if leaf in leaves] for text, joined in known.items()}
    return ", and ".join(text.format(" and ".join(of)) for text, of in chosen.items() if of)
