"""A folder with an adapter, as PEFT writes and reads it: adapter_config.json and
adapter_model.safetensors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.config.trainable import Exported, scale_of
from megatron_vlm.errors import CheckpointError, show_value
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.digest import weights_digest
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint, read_header
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.io.hub import HubName, hub_name
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.lora.peft_tensors import file_tensors, is_of_linear, of_parameters
from megatron_vlm.lora.targets import PREFIX, is_of_experts, module_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE = ".base_layer.weight"
_ROWS = 2**14  # compared at a time
_SHOWN = 5  # names in an error
_OLDER = (
    ". Or PEFT before 0.19.1 wrote it, where A and B of experts are the other way round; merge it "
    "into its base model with that PEFT, and give the result as model.path"
)
_MERGE = "merge it into its base model with PEFT, and give that as model.path"
# What PEFT can do and we cannot: the value of each that changes nothing.
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


def saved_whole(sizes: Sequence[TensorSpec], lora: LoraConfig) -> list[TensorSpec]:
    """What lora.train trains whole and PEFT's files have a place for: the mergers."""
    return [each for each in sizes if each.part is Part.merger and "merger" in lora.train]


class AdapterFolder:
    """One of ours or of PEFT's own, checked against the configuration and the base model."""

    def __init__(
        self, folder: str, lora: LoraConfig, weights: Sequence[TensorSpec], source: HFCheckpoint
    ):
        """`weights` are those that get an adapter."""
        self.folder = Path(folder)
        self.file = self.folder / WEIGHTS
        self.place = f"lora.path={folder}"
        config = read_adapter_config(self.folder)
        differences = _differences(config, lora), _other_experts(config, weights, source)
        for error in (*_unknown(config), *chain(*differences)):
            raise error.within(self.place)
        self._check_base(config, source)
        header = read_header(self.file)
        for name, tensor in header.items():
            if tensor["dtype"] not in FLOATS:
                raise CheckpointError(
                    "cannot be trained",
                    place=self.place,
                    key=f"{name}.dtype",
                    found=tensor["dtype"],
                    allowed=tuple(FLOATS),
                )
        self.shapes = {name: tuple(tensor["shape"]) for name, tensor in header.items()}
        whole = saved_whole(source.sizes.tensors, lora)
        self.tensors = {each.ours.name: each for each in file_tensors(weights, lora.rank)}
        expected = {each.name: each.shape for each in self.tensors.values()}
        expected |= {PREFIX + tensor.name: tensor.shape for tensor in whole}
        head = next((each for each in weights if each.part is Part.head), None)
        if head is not None and (copied := _copied(head)) in self.shapes:
            self._check_copied(copied, source)
            del self.shapes[copied]
        for error in self._errors(expected, lora):
            raise error.within(self.place)

    def _check_base(self, config: JsonField, source: HFCheckpoint) -> None:
        said = config.get("base_model_name_or_path")
        names = [hub_name(each) for each in (said.string() if said else "", source.name)]
        repos = [name.repo for name in names if name is not None]
        if len(set(repos)) == 2:
            raise CheckpointError(
                f": the adapter was trained on {repos[0]}",
                place=self.place,
                key="model.path",
                found=repos[1],
                remedy="give the same model",
            )
        digest = (read_mark(self.folder) or {}).get("base")  # where a run exported it
        if digest not in (None, weights_digest(source)):
            raise CheckpointError(
                ": the adapter was trained beside other weights, which may have been replaced",
                place=self.place,
                key="model.path",
                found=str(source.path),
                remedy="give the model that it was trained with",
            )

    def _check_copied(self, name: str, source: HFCheckpoint) -> None:
        """PEFT writes the head's own weight as well, which the adapter was trained beside."""
        head, shape = source.sizes.head, self.shapes[name]
        same = shape == head.shape
        with self._border(), safe_open(self.file, framework="pt") as opened:
            copied = opened.get_slice(name)
            for start in range(0, head.shape[0] if same else 0, _ROWS):
                rows = start, min(start + _ROWS, head.shape[0])
                theirs = copied[slice(*rows)]
                ours = source.read(source.stored_as(head.name), [rows])
                same = same and torch.equal(ours.to(theirs.dtype), theirs)
        if not same:
            raise CheckpointError(
                f"has another head {list(head.shape)} than the adapter's {name} {list(shape)}",
                place=self.place,
                key="model.path",
                found=source.name,
                remedy="give the model that the adapter was trained on",
            )

    def _border(self) -> AbstractContextManager[None]:
        outside = UntrustedFile(str(self.file), CheckpointError, "use another adapter")
        return outside.border("unreadable")

    def _errors(
        self, expected: dict[str, tuple[int, ...]], lora: LoraConfig
    ) -> Iterator[CheckpointError]:
        found = self.shapes
        lists = {
            "need tensors that the adapter lacks": expected.keys() - found,
            "do not need tensors that the adapter has": found.keys() - expected,
        }
        for what, names in lists.items():
            if names:
                yield CheckpointError(
                    f"and lora.train {what}, {len(names)} of them, such as "
                    f"{', '.join(sorted(names)[:_SHOWN])}",
                    key="lora.targets",
                    found=lora.targets,
                    remedy="give the values that it was trained with",
                )
        for name, shape in expected.items():
            if found[name] != shape:
                yield CheckpointError(
                    f"is {list(shape)} in this model: the adapter was trained on another one",
                    key=f"{name}.shape",
                    found=found[name],
                    remedy="give that one as model.path" + ("" if is_of_linear(name) else _OLDER),
                )

    def read(self, name: str) -> Tensor | None:
        """A tensor by our name, whole; None for what is not in it."""
        form = self.tensors.get(name)
        stored = name if form is None else form.name
        if stored not in self.shapes:
            return None
        with self._border(), safe_open(self.file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(stored)
        if not torch.isfinite(found.float()).all():
            raise CheckpointError(
                "has values that are NaN or infinite in fp32: every loss would be, too",
                place=self.place,
                key=stored,
                remedy="use another adapter",
            )
        return found if form is None else form.loaded(found)


def read_adapter_config(folder: Path) -> JsonField:
    """adapter_config.json of a LoRA adapter."""
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
    """Whether a folder has an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The model that an adapter was trained on, as its files name it."""
    config = read_adapter_config(folder)
    said = config.get("base_model_name_or_path")
    if said is None:
        raise CheckpointError(
            "is missing, so the base model is unknown",
            place=str(folder / CONFIG),
            key="base_model_name_or_path",
            remedy="give the base model as model.path, and the adapter as lora.path",
        )
    revision = config.get("revision")
    if revision is not None and hub_name(said.string()) == HubName(said.string()):
        return str(HubName(said.string(), revision.string()))
    return said.string()


def lora_of(folder: Path) -> LoraConfig:
    """The configuration that goes on from an adapter: what its files say."""
    config = read_adapter_config(folder)
    names = sorted(read_header(folder / WEIGHTS))
    ending = ".lora_A.weight"
    linears = [name for name in names if name.endswith(ending) and is_of_linear(name)]
    targets = [name.removeprefix(PREFIX).removesuffix(ending) for name in linears]
    if len(linears) < sum(name.endswith(ending) for name in names):
        targets += _target_parameters(config)
    rslora = config.get("use_rslora")
    return LoraConfig(
        rank=config["r"].whole(1),
        alpha=float(config["lora_alpha"].number(0)),
        rslora=bool(rslora and rslora.value),
        targets=tuple(targets),
        train=("merger",) if any(map(_is_whole, names)) else (),
        path=str(folder),
    )


def _is_whole(name: str) -> bool:
    """Whether a tensor of a file was trained itself: not one that PEFT only copies."""
    return ".lora_" not in name and not name.endswith(_BASE)


def _copied(weight: TensorSpec) -> str:
    """How PEFT names its copy of a weight beside which there is an adapter."""
    return f"{PREFIX}{module_of(weight)}{_BASE}"


def _unknown(config: JsonField) -> Iterator[CheckpointError]:
    for key, plain in _PLAIN.items():
        value = config.object().get(key)
        if value is not None and value.value not in plain:
            yield CheckpointError("is not supported", key=key, found=value.value, remedy=_MERGE)


def _target_parameters(config: JsonField) -> list[str]:
    said = config.get("target_parameters")
    return [each.string() for each in said.items()] if said else []


def _other_experts(
    config: JsonField, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> Iterator[CheckpointError]:
    """Their tensors have the same names whichever weight of a layer's experts they belong to."""
    named = _target_parameters(config)
    theirs = {each.name for each in of_parameters(named, source.sizes.tensors)}
    ours = {each.name for each in weights if is_of_experts(each)}
    if theirs != ours:
        yield CheckpointError(
            f"are {len(theirs)} weights of experts, and lora.targets means {len(ours)} others",
            key="target_parameters",
            found=named,
            remedy="give the lora.targets that the adapter was trained with",
        )


def _differences(config: JsonField, lora: LoraConfig) -> Iterator[CheckpointError]:
    rslora = config.get("use_rslora")
    pairs = {
        "r": (config["r"].whole(1), "rank", lora.rank),
        "lora_alpha": (config["lora_alpha"].number(0), "alpha", lora.alpha),
        "use_rslora": (bool(rslora and rslora.value), "rslora", lora.rslora),
    }
    for theirs, (found, ours, asked) in pairs.items():
        if found != asked:
            yield CheckpointError(
                f"differs from the adapter's {theirs}, {show_value(found)}",
                key=f"lora.{ours}",
                found=asked,
                remedy=f"set lora.{ours}={show_value(found)}",
            )


def is_of(kind: Exported, folder: Path) -> bool:
    """Whether an export is an adapter, or is none, as `kind` says."""
    return (folder / CONFIG).is_file() == (kind == "adapter")


def merged(weight: Tensor, down: Tensor, up: Tensor, lora: LoraConfig) -> Tensor:
    """The weight with its adapter in it, in fp32."""
    return weight.float() + scale_of(lora) * (up.float() @ down.float())
