"""Adapter folder as PEFT writes and reads it, adapter_config.json and adapter_model.safetensors:
the form of its tensors, its base model and options, and the configuration that continues it.

The rest of the package knows A [rank, in] and B [out, rank], and for experts A [experts, rank, in]
and B [experts, out, rank]. PEFT adapts experts as parameters of their module: A is [experts * rank,
in], expert by expert, and B is [out, rank * experts], where the experts alternate. Where both
weights of a module are adapted, PEFT wraps it twice, with the first weight inside, `base_layer`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.config.lora_base_types import BaseType
from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.config.trainable import Exported
from megatron_vlm.errors import CheckpointError, show_value
from megatron_vlm.family.config_json import read_fields
from megatron_vlm.family.spec import SCORE, Part, TensorSpec
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint, read_header
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
    # PEFT only copies the weights of the base, beside their adapters. A scalar head is always
    # trained.
    copied = (BASE_COPY, SCORE)
    whole = [n for n in names if ".lora_" not in n and not n.endswith(copied)]
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


_ROWS = 2**14  # number of rows to compare at a time
_SHOWN = 5  # maximum number of names in an error
_OLDER = (
    ". Or PEFT before 0.19.1 wrote it, where A and B of experts are the other way round; merge it "
    "into its base model with that PEFT, and give the result as model.path"
)


def tensors_saved_whole(sizes: Sequence[TensorSpec], lora: LoraConfig) -> list[TensorSpec]:
    """Return the tensors that are trained whole and fit into PEFT's files: the mergers, and the
    scalar head of a reward model."""
    parts = {Part.score, *([Part.merger] if "merger" in lora.train else ())}
    return [each for each in sizes if each.part in parts]


class AdapterFolder:
    """Adapter folder from us or from PEFT, checked against the configuration and the base model."""

    def __init__(
        self, folder: str, lora: LoraConfig, weights: Sequence[TensorSpec], source: HFCheckpoint
    ):
        """Read and check the folder. `weights` are the weights that get an adapter."""
        self.folder = Path(folder)
        self.file = self.folder / ADAPTER_FILE
        self.place = f"lora.path={folder}"
        config = read_adapter_config(self.folder)
        differences = different_settings(config, lora), _other_experts(config, weights, source)
        for error in (*unsupported_options(config), *chain(*differences)):
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
        whole_tensors = tensors_saved_whole(source.sizes.tensors, lora)
        self.tensors = {tensor.spec.name: tensor for tensor in file_tensors(weights, lora.rank)}
        expected = {tensor.name: tensor.shape for tensor in self.tensors.values()}
        expected |= {PREFIX + tensor.name: tensor.shape for tensor in whole_tensors}
        head = next((weight for weight in weights if weight.part is Part.head), None)
        if head and (copied := f"{PREFIX}{module_of(head)}{BASE_COPY}") in self.shapes:
            self._check_copied(copied, source)
            del self.shapes[copied]
        for error in self._errors(expected, lora):
            raise error.within(self.place)

    def _check_base(self, config: JsonField, source: HFCheckpoint) -> None:
        base = config.get("base_model_name_or_path")
        names = [hub_name(name) for name in (base.string() if base else "", source.name)]
        repos = [name.repo for name in names if name is not None]
        if len(set(repos)) == 2:
            raise CheckpointError(
                f": the adapter was trained on {repos[0]}",
                place=self.place,
                key="model.path",
                found=repos[1],
                remedy="give the same model",
            )
        digest = (read_mark(self.folder) or {}).get("base")  # only exports of a run have it
        if digest not in (None, weights_digest(source.path)):
            raise CheckpointError(
                ": the adapter was trained beside other weights, which may have been replaced",
                place=self.place,
                key="model.path",
                found=str(source.path),
                remedy="give the model that it was trained with",
            )

    def _check_copied(self, name: str, source: HFCheckpoint) -> None:
        """Check the copy of the head's own weight that PEFT writes next to the head's adapter."""
        head, shape = source.sizes.head, self.shapes[name]
        same = shape == head.shape
        with self._untrusted_errors(), safe_open(self.file, framework="pt") as opened:
            copied = opened.get_slice(name)
            for start in range(0, head.shape[0] if same else 0, _ROWS):
                rows = start, min(start + _ROWS, head.shape[0])
                copied_rows = copied[slice(*rows)]
                own_rows = source.read(source.stored_name(head.name), [rows])
                same = same and torch.equal(own_rows.to(copied_rows.dtype), copied_rows)
        if not same:
            raise CheckpointError(
                f"has another head {list(head.shape)} than the adapter's {name} {list(shape)}",
                place=self.place,
                key="model.path",
                found=source.name,
                remedy="give the model that the adapter was trained on",
            )

    def _untrusted_errors(self) -> AbstractContextManager[None]:
        outside = UntrustedFile(str(self.file), CheckpointError, "use another adapter")
        return outside.wrap_errors("unreadable")

    def _errors(
        self, expected: dict[str, tuple[int, ...]], lora: LoraConfig
    ) -> Iterator[CheckpointError]:
        shapes = self.shapes
        lists = {
            "need tensors that the adapter lacks": expected.keys() - shapes,
            "do not need tensors that the adapter has": shapes.keys() - expected,
        }
        for problem, names in lists.items():
            if names:
                yield CheckpointError(
                    f"and lora.train {problem}, {len(names)} of them, such as "
                    f"{', '.join(sorted(names)[:_SHOWN])}",
                    key="lora.targets",
                    found=lora.targets,
                    remedy="give the values that it was trained with",
                )
        for name, shape in expected.items():
            if shapes[name] != shape:
                yield CheckpointError(
                    f"is {list(shape)} in this model: the adapter was trained on another one",
                    key=f"{name}.shape",
                    found=shapes[name],
                    remedy="give that one as model.path" + _OLDER * (OF_EXPERTS in name),
                )

    def read(self, name: str) -> Tensor | None:
        """Return a whole tensor by our name, or None if the file does not have it."""
        form = self.tensors.get(name)
        stored = name if form is None else form.name
        if stored not in self.shapes:
            return None
        with self._untrusted_errors(), safe_open(self.file, framework="pt") as opened:
            value: Tensor = opened.get_tensor(stored)
        if not torch.isfinite(value.float()).all():
            raise CheckpointError(
                "has values that are NaN or infinite in fp32: every loss would be, too",
                place=self.place,
                key=stored,
                remedy="use another adapter",
            )
        return value if form is None else form.loaded(value)


def _other_experts(
    config: JsonField, weights: Sequence[TensorSpec], source: HFCheckpoint
) -> Iterator[CheckpointError]:
    """Yield an error where the adapter has other weights of experts. The tensors' names do not show
    it: they are the same for every weight of a layer's experts."""
    names = target_parameters(config)
    in_file = {tensor.name for tensor in of_parameters(names, source.sizes.tensors)}
    targeted = {weight.name for weight in weights if is_of_experts(weight)}
    if in_file != targeted:
        yield CheckpointError(
            f"are {len(in_file)} weights of experts, but lora.targets names {len(targeted)} others",
            key="target_parameters",
            found=names,
            remedy="give the lora.targets that the adapter was trained with",
        )
