"""Format of adapters in PEFT's files. The rest of the package knows one form: A [rank, in] and B
[out, rank], and for experts A [experts, rank, in] and B [experts, out, rank].

PEFT adapts the weights of experts as parameters of their module: A is [experts * rank, in], expert
by expert, and B is [out, rank * experts], where the experts alternate. Both weights of a module may
be adapted. PEFT then wraps the module twice, with the first weight inside, as `base_layer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_vlm.family.spec import TensorSpec
from megatron_vlm.lora.targets import OF_EXPERTS, PREFIX, is_of_experts, module_of, tensors_of


@dataclass(frozen=True)
class PeftTensor:
    """A or B, and its name and shape in a file."""

    spec: TensorSpec
    name: str
    shape: tuple[int, ...]

    def stored(self, value: Tensor) -> Tensor:
        """Return our value in the file's form."""
        if value.dim() == 3:
            is_b = self.name.endswith("lora_B.weight")
            value = value.permute(1, 2, 0).flatten(1) if is_b else value.flatten(0, 1)
        return value.contiguous()

    def loaded(self, stored: Tensor) -> Tensor:
        """Return the file's value in our form."""
        if len(self.spec.shape) == 2:
            return stored
        count = self.spec.shape[0]
        if self.name.endswith("lora_B.weight"):
            return stored.unflatten(1, (-1, count)).permute(2, 0, 1)
        return stored.unflatten(0, (count, -1))


def file_tensors(weights: Sequence[TensorSpec], rank: int) -> list[PeftTensor]:
    """Return A and B of each of these weights, which must be all weights with an adapter."""
    chosen = {weight.name for weight in weights}
    tensors = []
    for weight in weights:
        pair = tensors_of(weight, rank)
        if not is_of_experts(weight):
            tensors += [PeftTensor(tensor, tensor.name, tensor.shape) for tensor in pair]
            continue
        module, _, leaf = f"{PREFIX}{module_of(weight)}".rpartition(".")
        if leaf == "gate_up_proj" and weight.name.replace(leaf, "down_proj") in chosen:
            module += ".base_layer"
        count, height, width = weight.shape
        shapes = (count * rank, width), (height, rank * count)
        for tensor, kind, shape in zip(pair, "AB", shapes, strict=True):
            tensors.append(PeftTensor(tensor, f"{module}.lora_{kind}.weight", shape))
    return tensors


def is_of_linear(name: str) -> bool:
    """Return whether a tensor of a file belongs to a linear layer, not to experts."""
    return OF_EXPERTS not in name


def of_parameters(named: Sequence[str], tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the weights of experts that PEFT's target_parameters name, by their full names or by
    an ending after a dot."""
    return [
        tensor
        for tensor in tensors
        if is_of_experts(tensor)
        and any(tensor.name == name or tensor.name.endswith(f".{name}") for name in named)
    ]


def parameters(weights: Sequence[TensorSpec], tensors: Sequence[TensorSpec]) -> list[str]:
    """Return the target_parameters that name exactly these weights of experts: the ends of the
    names where those are unambiguous."""
    chosen = [weight for weight in weights if is_of_experts(weight)]
    ends = sorted({"mlp.experts." + weight.name.rpartition(".")[2] for weight in chosen})
    return ends if of_parameters(ends, tensors) == chosen else [weight.name for weight in chosen]
