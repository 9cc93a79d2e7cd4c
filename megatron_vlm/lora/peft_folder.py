"""Adapter folder as PEFT writes and reads it: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.config.schema import LoraConfig
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint, read_header
from megatron_vlm.io.atomic import read_mark
from megatron_vlm.io.hub import hub_name
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.lora.peft_config import (
    ADAPTER_FILE,
    BASE_COPY,
    different_settings,
    file_tensors,
    of_parameters,
    read_adapter_config,
    target_parameters,
    unsupported_options,
)
from megatron_vlm.lora.targets import OF_EXPERTS, PREFIX, is_of_experts, module_of

_ROWS = 2**14  # number of rows to compare at a time
_SHOWN = 5  # maximum number of names in an error
_OLDER = (
    ". Or PEFT before 0.19.1 wrote it, where A and B of experts are the other way round; merge it "
    "into its base model with that PEFT, and give the result as model.path"
)


def tensors_saved_whole(sizes: Sequence[TensorSpec], lora: LoraConfig) -> list[TensorSpec]:
    """Return the tensors that are trained whole and fit into PEFT's files: the mergers."""
    return [each for each in sizes if each.part is Part.merger and "merger" in lora.train]


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
