"""LoRA targets in Hugging Face's terms: the linear layers with an adapter, and the adapter's two
tensors.

A layer y = W x becomes y = W x + scale * B A x, with A [rank, in] and B [out, rank]. Each expert
has an adapter of its own: A [experts, rank, in] and B [experts, out, rank].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS

PREFIX = "base_model.model."  # prefix of every name in PEFT's files
GROUPS = ("attention", "mlp", "head", "merger", "vision_attention", "vision_mlp")
_ROUTER = ".mlp.gate.weight"
_SHOWN = 8  # maximum number of names in an error


@dataclass(frozen=True)
class HFLinear:
    """Linear layer of Hugging Face that is a part of one of our linear layers; the experts' layers
    count as one."""

    base: TensorSpec  # its weight
    adapted: bool

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
    cut: int | None  # axis of the weight that is sharded over TP
    groups: int  # number of groups in which the rows of the slots alternate, over all TP ranks

    @property
    def is_of_experts(self) -> bool:
        return is_of_experts(self.slots[0].base)

    @property
    def is_head(self) -> bool:
        return self.slots[0].base.part is Part.head


def group_of(tensor: TensorSpec) -> str | None:
    """Return a weight's group, one of GROUPS. Return None for tensors that cannot be adapted:
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
    """Return the name of a weight's module."""
    return tensor.name.removesuffix(".weight")


@lru_cache(maxsize=8)
def adapted_specs(tensors: tuple[TensorSpec, ...], targets: tuple[str, ...]) -> list[TensorSpec]:
    """Return the weights that get an adapter: those of the named groups, and those of modules whose
    name, or its end after a dot, equals another target or matches it as a pattern."""
    linears = [tensor for tensor in tensors if group_of(tensor)]
    targeted = set()
    for target in targets:
        matching = {linear for linear in linears if _is_meant(linear, target)}
        if not matching:
            _check_no_router(tensors, target)
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
    names and shapes for experts: lora/peft_tensors.py."""
    *experts, rows, columns = base.shape
    stem = f"{PREFIX}{module_of(base)}.lora_"
    return (
        replace(base, name=f"{stem}A.weight", shape=(*experts, rank, columns)),
        replace(base, name=f"{stem}B.weight", shape=(*experts, rows, rank)),
    )
