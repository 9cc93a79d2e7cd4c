"""A random model that draws given tokens often."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration


def drawing_often(path: str, folder: Path, *tokens: str, strength: float = 5.0) -> str:
    """Copy a random model, and let it draw these tokens often: their rows of the head point in the
    direction of most hidden states."""
    shutil.copytree(path, folder)
    hf = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = hf.model(torch.arange(20, 300).view(7, 40)).last_hidden_state.mean((0, 1))
        for token in AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(tokens)):
            hf.lm_head.weight[token] = strength * hidden / hidden.square().sum()
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape == hf.lm_head.weight.shape
    weights["lm_head.weight"] = hf.lm_head.weight.detach().clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
