"""Initial values of adapters, and what is refused or remarked about the chosen ones."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, exports
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import ModelSizes, TensorSpec
from megatron_vlm.hf.expert_layouts import Span, slices_of
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import Entry, Origin
from megatron_vlm.lora.peft_folder import AdapterFolder
from megatron_vlm.lora.targets import (
    PREFIX,
    adapted_specs,
    check_parts,
    is_of_experts,
    module_of,
    seed_from,
)


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


def fill(
    held: Mapping[Entry, nn.Parameter],
    grid: RankGroups,
    value_of: Callable[[TensorSpec, str], Tensor | None],
) -> None:
    """Fill each rank's parameters from whole values. `value_of` returns the value of a tensor by
    its name in PEFT's files, or None. Values for Hugging Face's own tensors belong to parameters
    that hold a single tensor."""
    for entry, param in held.items():
        if len(entry.hf_tensors) > 1:
            continue
        name = entry.names[0] if entry.origin is Origin.added else PREFIX + entry.names[0]
        whole = value_of(entry.hf_tensors[0], name)
        if whole is not None:
            read = partial(_slice_of, whole)
            part = entry.layout.load(read, [name], *grid.along(entry.layout.cut))
            with torch.no_grad():
                param.copy_(part)


def _slice_of(whole: Tensor, _: str, spans: Sequence[Span]) -> Tensor:
    return whole[slices_of(spans)]


def values(
    cfg: Config, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> Callable[[TensorSpec, str], Tensor | None]:
    """Return the initial values: those of lora.path, or PEFT's own initialisation. A is random and
    B is zero; the numbers are the same in every layout."""
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
            rows_I = whole.flatten(0, -2)  # all experts at once, as in PEFT
            nn.init.kaiming_uniform_(rows_I, a=math.sqrt(5), generator=generator)
        return whole

    return begin
