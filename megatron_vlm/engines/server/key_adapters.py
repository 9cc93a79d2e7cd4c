"""Adapters of keys that are values as well (vLLM 0.32)."""

import re
from typing import Any

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def adapt_values_as_keys() -> None:
    """Give values the adapter of the keys that they are, in layers of full attention of Gemma 4.
    vLLM has a product for each, loads the weight of the keys into both, and would adapt the keys
    alone, without an error."""
    from vllm.lora.model_manager import LoRAModelManager

    look_up = LoRAModelManager._get_lora_layer_weights

    def look_up_keys(self: Any, adapter: Any, name: str) -> Any:
        if name.endswith(".v_proj") and _are_keys(self.model.config, name):
            name = f"{name.removesuffix('v_proj')}k_proj"
        return look_up(self, adapter, name)

    LoRAModelManager._get_lora_layer_weights = look_up_keys


def _are_keys(config: Any, name: str) -> bool:
    """Return whether the values of this module are the keys of its layer."""
    text, layer = getattr(config, "text_config", config), _LAYER.search(name)
    if layer is None or not getattr(text, "attention_k_eq_v", False):
        return False
    return bool(text.layer_types[int(layer[1])] == "full_attention")
