"""Advice for checkpoints that this version does not train: the programs that train them, or the
repository with the weights from which a quantized release was made."""

import re

_MOST = "LLaMA-Factory, ms-swift and TRL"
_WITH_BRIDGE = "LLaMA-Factory, ms-swift, TRL and NVIDIA Megatron-Bridge"
_TWO = "LLaMA-Factory and ms-swift"
_BRIDGE = "ms-swift and NVIDIA Megatron-Bridge"
# Name and programs by the model_type of config.json, or by its beginning with a * at the end. The
# first row that fits counts. A program is named where its own list of models has the family.
_TRAINED_BY = {
    "qwen2_5_vl": ("Qwen2.5-VL", _WITH_BRIDGE),
    "qwen2_vl": ("Qwen2-VL", _MOST),
    "qwen3_omni_moe": ("Qwen3-Omni", f"LLaMA-Factory, {_BRIDGE}"),
    "qwen2_5_omni": ("Qwen2.5-Omni", f"LLaMA-Factory, {_BRIDGE}"),
    "qwen2_audio": ("Qwen2-Audio", _TWO),
    "qwen3_next": ("Qwen3-Next (text alone)", _BRIDGE),
    "qwen3_5_text": ("Qwen3.5 without its vision tower", _BRIDGE),
    "qwen3_vl_text": ("Qwen3-VL without its vision tower", "ms-swift and TRL"),
    "qwen3": ("Qwen3 (text alone)", _WITH_BRIDGE),
    "qwen3_moe": ("Qwen3 (text alone)", _WITH_BRIDGE),
    "qwen2": ("Qwen2 and Qwen2.5 (text alone)", _WITH_BRIDGE),
    "internvl*": ("InternVL", _TWO),
    "llava*": ("LLaVA", _MOST),
    "gemma3n*": ("Gemma 3n", _TWO),
    "gemma3*": ("Gemma 3", _WITH_BRIDGE),
    "gemma4*": ("Gemma 4", "LLaMA-Factory, axolotl and NVIDIA Megatron-Bridge"),
    "paligemma": ("PaliGemma", _TWO),
    "pixtral": ("Pixtral", _TWO),
    "mistral3": ("Mistral 3", f"LLaMA-Factory, {_BRIDGE}"),
    "minicpm*": ("MiniCPM", _TWO),
    "glm4v_moe": ("GLM-4.5V", f"LLaMA-Factory, {_BRIDGE}"),
    "glm4v*": ("GLM-4.1V", _TWO),
    "llama4": ("Llama 4", "LLaMA-Factory, ms-swift and axolotl"),
    "mllama": ("Llama 3.2 Vision", _MOST),
    "llama": ("Llama (text alone)", _WITH_BRIDGE),
    "multi_modality": ("DeepSeek-VL or Janus", "ms-swift"),
    "deepseek_vl*": ("DeepSeek-VL", "ms-swift"),
    "kimi_vl": ("Kimi-VL", _TWO),
    "idefics*": ("Idefics", "ms-swift and TRL"),
    "smolvlm": ("SmolVLM", "TRL and axolotl"),
    "lfm2_vl": ("LFM2-VL", "axolotl"),
    "paddleocr_vl": ("PaddleOCR-VL", "ms-swift and axolotl"),
    "dots_ocr": ("dots.ocr", _TWO),
    "phi3_v": ("Phi-3 Vision", "ms-swift"),
    "phi4mm": ("Phi-4 Multimodal", "ms-swift"),
    "molmo*": ("Molmo", "ms-swift"),
    "ovis*": ("Ovis", "ms-swift"),
}
# The name of a release, before the end that says how its weights are quantized, such as -FP8.
_RELEASE = re.compile(
    r"(Qwen3-VL-\d+B(?:-A\d+B)?-(?:Instruct|Thinking)|Qwen3\.\d-\d+(?:\.\d+)?B(?:-A\d+B)?(?:-Base)?)"
    r"(?=-)",
    re.IGNORECASE,
)


def advise_other_family(model_type: str) -> str:
    """Return a clause that names the model and the programs that train it, or nothing if the
    model_type is in no row."""
    for pattern, (name, programs) in _TRAINED_BY.items():
        begin = pattern.removesuffix("*")
        if model_type == pattern or (begin != pattern and model_type.startswith(begin)):
            return f"; {programs} can train {name}"
    return ""


def advise_unquantized(folder: str) -> str:
    """Return the remedy for a folder or name of quantized weights, such as an FP8 release."""
    found = _RELEASE.search(folder)
    which = f", Qwen/{found[1]}" if found else " from which these were made"
    return (
        f"give the bf16 weights{which}: of quantized ones, only those of bitsandbytes in NF4 can "
        "stand beside adapters (lora.base=nf4)"
    )
