"""Checkpoints of Qwen3-VL-MoE in the other forms in which experts are stored."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_vlm.hf.expert_layouts import ExpertStorage


def stored_as(folder: str, out: Path, form: ExpertStorage) -> str:
    """Write a copy of a checkpoint from transformers 5 in another form, and return its folder. The
    conversion is written out here and shares no code with the tested one."""
    shutil.copytree(folder, out)
    weights = {}
    for name, value in load_file(out / "model.safetensors").items():
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
