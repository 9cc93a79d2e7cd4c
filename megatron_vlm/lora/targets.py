"""Adapters (LoRA) in Hugging Face's terms: which linear layers have one, and its two tensors.

A layer y = W x becomes y = W x + scale * B A x, with A [rank, in] and B [out, rank]. Each expert
has its own: A [experts, rank, in] and B [experts, out, rank].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS

PREFIX = "base_model.model."  # of every name in PEFT's files
GROUPS = ("attention", "mlp", "head", "merger", "vision_attention", "vision_mlp")
_ROUTER = ".mlp.gate.weight"
_SHOWN = 8  # names in an error


@dataclass(frozen=True)
class HFLinear:
    """One of Hugging Face's linear layers among those that make up one of ours; the experts' are
    one."""

    base: TensorSpec  # its weight
    adapted: bool

    @property
    def leaf(self) -> str:
        """The last part of its name, such as q_proj."""
        return module_of(self.base).rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLinear:
    """One of our linear layers with adapters. PEFT has q, k and v apart, and gate and up: so are
    their adapters here, though the weights themselves are one."""

    name: str  # of the module
    stage: int
    chunk: int
    slots: tuple[HFLinear, ...]
    cut: int | None  # the axis of the weight that is cut over TP
    groups: int  # in which the rows of the slots alternate, over all TP ranks

    @property
    def is_of_experts(self) -> bool:
        return is_of_experts(self.slots[0].base)

    @property
    def is_head(self) -> bool:
        return self.slots[0].base.part is Part.head


def group_of(tensor: TensorSpec) -> str | None:
    """Which of GROUPS a weight belongs to; None for what is no linear layer that can be adapted:
    norms, biases, embeddings, routers."""
    if len(tensor.shape) != 2 and not is_of_experts(tensor):
        return None
    if tensor.name.endswith(_ROUTER):
        return None
    if tensor.part in (Part.merger, Part.head):
        return tensor.part.value
    prefix = {Part.decoder: "", Part.vision: "vision_"}.get(tensor.part)
    kinds = {"attn.": "attention", ".mlp.": "mlp"}
    kind = next((kinds[mark] for mark in kinds if mark in tensor.name), None)
    return None if prefix is None or kind is None else prefix + kind


def module_of(tensor: TensorSpec) -> str:
    """The name of a weight's module."""
    return tensor.name.removesuffix(".weight")


@lru_cache(maxsize=8)
def adapted(tensors: tuple[TensorSpec, ...], targets: tuple[str, ...]) -> list[TensorSpec]:
    """The weights that get an adapter: those of the groups that are named, and of modules whose
    name, or its end after a dot, is one of the others or matches it as a pattern."""
    linears = [tensor for tensor in tensors if group_of(tensor)]
    found = set()
    for target in targets:
        matching = {each for each in linears if _is_meant(each, target)}
        if not matching:
            _check_no_router(tensors, target)
            raise ConfigError(
                "matches no linear layer of the model",
                key="lora.targets",
                found=target,
                remedy=f"give {', '.join(GROUPS)}, or names such as {_samples(linears)}",
            )
        found |= matching
    return [each for each in linears if each in found]


def is_of_experts(tensor: TensorSpec) -> bool:
    """Whether a tensor is a weight of all experts of a layer, one after the other."""
    return OF_EXPERTS in tensor.name


def _check_no_router(tensors: Sequence[TensorSpec], target: str) -> None:
    for tensor in tensors:
        if tensor.name.endswith(_ROUTER) and _matches(tensor, target):
            raise ConfigError(
                f"means the router {module_of(tensor)}, and routers have no adapters here: in "
                "transformers they are no linear layers, and PEFT leaves them as they are unless "
                "target_parameters names them",
                key="lora.targets",
                found=target,
                remedy="leave it out: mlp means the experts themselves",
            )


def _is_meant(tensor: TensorSpec, target: str) -> bool:
    return group_of(tensor) == target if target in GROUPS else _matches(tensor, target)


def _matches(tensor: TensorSpec, target: str) -> bool:
    name = module_of(tensor)
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _samples(linears: Sequence[TensorSpec]) -> str:
    leaves = dict.fromkeys(module_of(each).rpartition(".")[2] for each in linears)
    return f"{', '.join(list(leaves)[: 2 * _SHOWN])} or *.layers.0.self_attn.q_proj"


def check_parts(
    chosen: Sequence[TensorSpec], trained: Sequence[str], frozen: Sequence[str]
) -> None:
    """Refuse adapters in a part that is trained whole, or that is to stay as it is."""
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
    """What the random numbers of an adapter begin with."""
    return int.from_bytes(blake2b(repr(decides).encode(), digest_size=7).digest())


def tensors_of(base: TensorSpec, rank: int) -> tuple[TensorSpec, TensorSpec]:
    """A and B of the adapter of a weight, by their names in PEFT's files. Those of experts have
    other names and shapes there: lora/peft_tensors.py."""
    *experts, rows, columns = base.shape
    stem = f"{PREFIX}{module_of(base)}.lora_"
    return (
        replace(base, name=f"{stem}A.weight", shape=(*experts, rank, columns)),
        replace(base, name=f"{stem}B.weight", shape=(*experts, rows, rank)),
    )
