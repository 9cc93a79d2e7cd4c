"""Files of an adapter: the form of PEFT's tensors, its base model and options, and the
configuration that continues its training.

The rest of the package knows A [rank, in] and B [out, rank], and for experts A [experts, rank, in]
and B [experts, out, rank]. PEFT adapts experts as parameters of their module: A is [experts * rank,
in], expert by expert, and B is [out, rank * experts], where the experts alternate. Where both
weights of a module are adapted, PEFT wraps it twice, with the first weight inside, `base_layer`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from megatron_vlm.config.base_types import BaseType
from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.config.trainable import Exported
from megatron_vlm.errors import CheckpointError, show_value
from megatron_vlm.family.config_json import read_fields
from megatron_vlm.family.spec import TensorSpec
from megatron_vlm.hf.hf_checkpoint import read_header
from megatron_vlm.io.atomic import MARK, read_mark
from megatron_vlm.io.hub import HubName, beside_run, folder_of, hub_name
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.lora.targets import OF_EXPERTS, PREFIX, is_of_experts, module_of, tensors_of

CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
BASE_COPY = ".base_layer.weight"  # ending of a weight that PEFT copies next to its adapter
_MERGE = "merge it into its base model with PEFT, and give that as model.path"
# PEFT supports these options and we do not. The values listed for each change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (None, False)),
    "bias": (None, "none"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    "layer_replication": (None,),
    "trainable_token_indices": (None, {}),
    **dict.fromkeys(("alora_invocation_tokens", "use_bdlora", "arrow_config"), (None,)),
    **dict.fromkeys(("kasa_config", "velora_config", "monteclora_config"), (None,)),
}


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


def of_parameters(named: Sequence[str], tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the weights of experts that target_parameters name in full, or by their end."""
    return [
        tensor
        for tensor in tensors
        if is_of_experts(tensor)
        and any(tensor.name == name or tensor.name.endswith(f".{name}") for name in named)
    ]


def parameters(weights: Sequence[TensorSpec], tensors: Sequence[TensorSpec]) -> list[str]:
    """Return target_parameters for exactly these weights: ends of names where unambiguous."""
    chosen = [weight for weight in weights if is_of_experts(weight)]
    in_layer = (weight.name.partition(".layers.")[2].partition(".")[2] for weight in chosen)
    ends = sorted(set(in_layer))
    return ends if of_parameters(ends, tensors) == chosen else [weight.name for weight in chosen]


def is_kind(kind: Exported, folder: Path) -> bool:
    """Return whether an export is of this kind: an adapter or not."""
    return (folder / CONFIG).is_file() == (kind == "adapter")


def read_adapter_config(folder: Path) -> JsonField:
    """Read the adapter_config.json of a LoRA adapter."""
    file = UntrustedFile(
        str(folder / CONFIG), CheckpointError, "give a folder that PEFT or we wrote"
    )
    config = file.json()
    if (kind := config["peft_type"].value) != "LORA":
        raise CheckpointError(
            "is not supported: only LORA is trained here",
            place=str(folder / CONFIG),
            key="peft_type",
            found=kind,
            allowed=("LORA",),
            remedy=_MERGE,
        )
    return config


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Return the model that an adapter was trained on, as its files name it."""
    config = read_adapter_config(folder)
    base = config.get("base_model_name_or_path")
    if base is None:
        raise CheckpointError(
            "is missing, so the base model is unknown",
            place=str(folder / CONFIG),
            key="base_model_name_or_path",
            remedy="give the base model as model.path, and the adapter as lora.path",
        )
    revision = config.get("revision")
    if revision is not None and hub_name(base.string()) == HubName(base.string()):
        return str(HubName(base.string(), revision.string()))
    return beside_run(base.string(), folder)


def lora_of(folder: Path, model: str) -> LoraConfig:
    """Return the configuration that continues the training of an adapter of this model."""
    config = read_adapter_config(folder)
    names = sorted(read_header(folder / ADAPTER_FILE))
    ending = ".lora_A.weight"
    linears = [name for name in names if name.endswith(ending) and OF_EXPERTS not in name]
    targets = [name.removeprefix(PREFIX).removesuffix(ending) for name in linears]
    if len(linears) < sum(name.endswith(ending) for name in names):
        targets += target_parameters(config)
    # PEFT only copies the weights of the base, beside their adapters.
    whole = [n for n in names if ".lora_" not in n and not n.endswith(BASE_COPY)]
    rslora = config.get("use_rslora")
    return LoraConfig(
        rank=config["r"].whole(1),
        alpha=float(config["lora_alpha"].number(0)),
        rslora=bool(rslora and rslora.value),
        targets=tuple(targets),
        train=("merger",) if whole else (),
        path=str(folder),
        base=_base_type(folder, model),
    )


def _base_type(folder: Path, model: str) -> BaseType | None:
    """Return the type of the frozen weights that an adapter was trained beside. If no run wrote the
    adapter, this is the type in which its base model is stored."""
    mark = read_mark(folder)
    if mark is None:
        fields = read_fields(folder_of(model))
        return None if fields.get("quantization_config") is None else "nf4"
    found: BaseType | None = mark.get("base_type")
    if found not in (None, *get_args(BaseType)):
        raise CheckpointError(
            place=str(folder / MARK), key="base_type", found=found, allowed=get_args(BaseType)
        )
    return found


def target_parameters(config: JsonField) -> list[str]:
    """Return the names of the parameters that have adapters without being a linear layer's."""
    names = config.get("target_parameters")
    return [name.string() for name in names.items()] if names else []


def unsupported_options(config: JsonField) -> Iterator[CheckpointError]:
    """Yield an error for each option that would change the adapter's maths and is not supported."""
    for key, plain in _PLAIN.items():
        value = config.object().get(key)
        if value is not None and value.value not in plain:
            yield CheckpointError("is not supported", key=key, found=value.value, remedy=_MERGE)


def different_settings(config: JsonField, lora: LoraConfig) -> Iterator[CheckpointError]:
    """Yield an error for each setting of the configuration that differs from the adapter's."""
    rslora = config.get("use_rslora")
    pairs = {
        "r": (config["r"].whole(1), "rank", lora.rank),
        "lora_alpha": (config["lora_alpha"].number(0), "alpha", lora.alpha),
        "use_rslora": (bool(rslora and rslora.value), "rslora", lora.rslora),
    }
    for peft_key, (value, our_key, own_value) in pairs.items():
        if value != own_value:
            yield CheckpointError(
                f"differs from the adapter's {peft_key}, {show_value(value)}",
                key=f"lora.{our_key}",
                found=own_value,
                remedy=f"set lora.{our_key}={show_value(value)}",
            )
