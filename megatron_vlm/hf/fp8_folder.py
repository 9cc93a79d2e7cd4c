"""Change of an exported folder to FP8 in the format of compressed-tensors, which vLLM loads.

A matrix is stored as float8_e4m3 with a scale for each block of 128 x 128 weights, in the dtype
that the weights had. These are the matrices of attention, MLPs and experts in the decoder. All
other layers keep their dtype, and config.json has their names: the tower, the head, routers, the
small projections of delta nets, the MTP head, and layers whose sides are no multiples of
128, together with their neighbours, because engines compute these as one matrix.

Shapes: R rows and C columns of a matrix, r and c blocks of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.added_tokens import changed_json
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.expert_layouts import OF_EXPERTS, ExpertStorage
from megatron_vlm.hf.hf_checkpoint import INDEX, HFCheckpoint, weight_files
from megatron_vlm.hf.write_export import write_index, write_tensors

FP8_BLOCK = 128
_LARGEST = 448.0  # float8_e4m3 ends here
_GROUPS = ("attention", "mlp")
_SMALL = (".in_proj_a.weight", ".in_proj_b.weight")
_WEIGHT = ".weight"


def quantize(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [R, C] and the scales [r, c], a weight being the product of both."""
    rows, columns = weight_RC.shape
    blocks = weight_RC.float().view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    largest_rc = blocks.abs().amax(dim=(1, 3))
    scales_rc = torch.where(largest_rc > 0, largest_rc / _LARGEST, 1.0).to(weight_RC.dtype)
    shares = blocks / scales_rc.float()[:, None, :, None]  # by the scale that is stored
    codes = shares.clamp(-_LARGEST, _LARGEST).view(rows, columns).to(torch.float8_e4m3fn)
    return codes, scales_rc


def to_fp8(source: HFCheckpoint, folder: Path) -> None:
    """Change the weights and config.json of a folder that was exported with this source."""
    chosen = _quantized(source)
    if not chosen:
        raise CheckpointError(
            f"has no layer whose sides are multiples of {FP8_BLOCK}",
            place=str(source.path),
            key="--as",
            found="fp8",
            remedy="leave out --as fp8",
        )
    file_of: dict[str, str] = {}
    total, kept = 0, {"lm_head"}
    for file in weight_files(folder):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor, spec = opened.get_tensor(name), chosen.get(name)
                if spec is None:
                    tensors[name] = tensor
                    kept.update(_layers_in(name, tensor.shape))
                    continue
                for module, matrix_RC in _matrices(name, tensor, spec, source.experts):
                    codes, scales = quantize(matrix_RC)
                    tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scales}
        total += sum(tensor.nbytes for tensor in tensors.values())
        file_of |= dict.fromkeys(tensors, file.name)
        write_tensors(file, dict(sorted(tensors.items())))
    if (folder / INDEX).exists():
        write_index(folder, total, file_of)
    with changed_json(folder / "config.json") as config:
        config["quantization_config"] = _description(sorted(kept))


def _quantized(source: HFCheckpoint) -> dict[str, TensorSpec]:
    """Return the stored tensors whose matrices are quantized, and the tensor of the package that
    each is a part of."""
    neighbours = defaultdict(list)
    for tensor in source.sizes.tensors:
        is_linear = tensor.part is Part.decoder and tensor.lora_group in _GROUPS
        if is_linear and not tensor.name.endswith(_SMALL):
            neighbours[tensor.name.removesuffix(_WEIGHT).rpartition(".")[0]].append(tensor)
    return {
        name: tensor
        for tensors in neighbours.values()
        if all(_fits(tensor) for tensor in tensors)
        for tensor in tensors
        for name in source.experts.stored(tensor.name, tensor.shape)
    }


def _fits(tensor: TensorSpec) -> bool:
    shapes = ExpertStorage.single.stored(tensor.name, tensor.shape).values()
    return not any(side % FP8_BLOCK for shape in shapes for side in shape)


def _matrices(
    name: str, tensor: Tensor, spec: TensorSpec, form: ExpertStorage
) -> Iterator[tuple[str, Tensor]]:
    """Yield the modules of a stored tensor with their matrices: engines read experts one by one."""
    if OF_EXPERTS not in name or form is ExpertStorage.single:
        yield name.removesuffix(_WEIGHT), tensor
        return
    rows_first = tensor.transpose(1, 2) if form is ExpertStorage.in_out else tensor
    names = ExpertStorage.single.stored(spec.name, spec.shape)
    for each, matrix in zip(names, ExpertStorage.single.split(spec.name, rows_first), strict=True):
        yield each.removesuffix(_WEIGHT), matrix.contiguous()


def _layers_in(name: str, shape: torch.Size) -> Iterator[str]:
    """Yield the linear layers of a tensor that keeps its dtype, as engines name them."""
    if OF_EXPERTS in name and len(shape) == 3:
        for each in ExpertStorage.single.stored(name, tuple(shape)):
            yield each.removesuffix(_WEIGHT)
    elif name.endswith(_WEIGHT) and len(shape) == 2:
        yield name.removesuffix(_WEIGHT)


def _description(ignored: list[str]) -> Mapping[str, Any]:
    """Return quantization_config: weights by blocks, and inputs as they come, by groups."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {
        **numbers,
        "strategy": "block",
        "block_structure": [FP8_BLOCK, FP8_BLOCK],
        "dynamic": False,
    }
    inputs = {**numbers, "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
