"""Facts in the files of an adapter: its base model, its options, and the configuration that
continues its training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from megatron_vlm.config.base_types import BaseType
from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.config.trainable import Exported
from megatron_vlm.errors import CheckpointError, show_value
from megatron_vlm.family.config_json import read_fields
from megatron_vlm.hf.hf_checkpoint import read_header
from megatron_vlm.io.atomic import MARK, read_mark
from megatron_vlm.io.hub import HubName, beside_run, folder_of, hub_name
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.lora.peft_tensors import is_of_linear
from megatron_vlm.lora.targets import PREFIX

CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
BASE_COPY = ".base_layer.weight"  # ending of a weight that PEFT copies next to its adapter
_MERGE = "merge it into its base model with PEFT, and give that as model.path"
# PEFT supports these options and we do not. The values listed for each change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "trainable_token_indices": (None, {}),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


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
    """Return the configuration that continues the training of an adapter, from the adapter's files
    and those of its base model."""
    config = read_adapter_config(folder)
    names = sorted(read_header(folder / ADAPTER_FILE))
    ending = ".lora_A.weight"
    linears = [name for name in names if name.endswith(ending) and is_of_linear(name)]
    targets = [name.removeprefix(PREFIX).removesuffix(ending) for name in linears]
    if len(linears) < sum(name.endswith(ending) for name in names):
        targets += target_parameters(config)
    rslora = config.get("use_rslora")
    return LoraConfig(
        rank=config["r"].whole(1),
        alpha=float(config["lora_alpha"].number(0)),
        rslora=bool(rslora and rslora.value),
        targets=tuple(targets),
        train=("merger",) if any(map(_is_whole, names)) else (),
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


def _is_whole(name: str) -> bool:
    """Return whether a tensor of a file was trained itself, and not only copied by PEFT."""
    return ".lora_" not in name and not name.endswith(BASE_COPY)


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
