"""Checkpoints of Hugging Face, opened, and with experts in the other forms of storage."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.load_weights import check_tensors, check_tied


def stored_as(folder: str, out: Path, form: ExpertStorage) -> str:
    """Write a copy of a checkpoint from transformers 5 in another form, and return its folder. The
    conversion is written out here and shares no code with the tested one."""
    shutil.copytree(folder, out)
    weights = {}
    for name, value in _joined(load_file(out / "model.safetensors")).items():
        if ".mlp.experts." not in name or form is ExpertStorage.out_in:
            weights[name] = value
        elif form is ExpertStorage.in_out:
            weights[name] = torch.stack([expert.T for expert in value])
        else:
            prefix, _, kind = name.rpartition(".")
            for number, expert in enumerate(value):
                if kind == "down_proj":
                    weights[f"{prefix}.{number}.down_proj.weight"] = expert.clone()
                    continue
                half = len(expert) // 2
                weights[f"{prefix}.{number}.gate_proj.weight"] = expert[:half].clone()
                weights[f"{prefix}.{number}.up_proj.weight"] = expert[half:].clone()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def _joined(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the experts of Qwen3.5, which transformers writes one by one, as it has them in
    memory."""
    joined = {}
    for name, value in weights.items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if found is None:
            joined[name] = value
            continue
        layer = found[1]
        count = sum(each.startswith(f"{layer}.") for each in weights) // 3
        experts = [
            {p: weights[f"{layer}.{n}.{p}_proj.weight"] for p in ("gate", "up", "down")}
            for n in range(count)
        ]
        pairs = [torch.cat([each["gate"], each["up"]]) for each in experts]
        joined[f"{layer}.gate_up_proj"] = torch.stack(pairs)
        joined[f"{layer}.down_proj"] = torch.stack([each["down"] for each in experts])
    return joined


def opened(folder: str | Path) -> HFCheckpoint:
    """Return a checkpoint that has passed the checks before loading."""
    source = HFCheckpoint(folder)
    source.read_headers()
    check_tensors(source)
    check_tied(source)
    return source


def edited(path: str, out: Path, tensors: Mapping[str, Tensor | None]) -> Path:
    """Write a copy of a checkpoint with other tensors, or without those that are None."""
    shutil.copytree(path, out)
    changed = load_file(out / "model.safetensors") | dict(tensors)
    kept = {name: value for name, value in changed.items() if value is not None}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out
