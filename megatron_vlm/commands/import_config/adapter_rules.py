"""Adapters: whether there are any, in which layers, and what is beside them in 4 or 8 bits."""

import re

from megatron_vlm.commands.import_config.model_rules import (
    compiled_pattern,
    is_of_experts_by_name,
)
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off

_DECODER = ["attention", "mlp"]
_VISION = ["vision_attention", "vision_mlp"]
_TARGETS = ("lora_target", "target_modules", "lora_target_modules", "model.target_modules")
_REGEX = ("target_regex",)
_BITS = {"4": "nf4", "8": "int8"}
# Names of layers of Qwen3-VL and Qwen3.5, on which patterns are tried. The second is our name.
_LAYERS = {
    **{f"self_attn.{each}_proj": f"{each}_proj" for each in "qkvo"},
    **{f"mlp.{each}_proj": f"{each}_proj" for each in ("gate", "up", "down")},
    **{
        f"linear_attn.{each}": f"linear_attn.{each}"
        for each in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    },
}
_BLOCKS = {
    **{f"attn.{each}": "vision_attention" for each in ("qkv", "proj")},
    **{f"mlp.{each}": "vision_mlp" for each in ("linear_fc1", "linear_fc2")},
}
_MODULES = {
    **{f"model.language_model.layers.0.{each}": name for each, name in _LAYERS.items()},
    **{f"model.visual.blocks.0.{each}": name for each, name in _BLOCKS.items()},
    **{f"model.visual.merger.{each}": "merger" for each in ("linear_fc1", "linear_fc2")},
}


def translate_adapters(t: Translation) -> None:
    """Set lora.*, unless all weights are trained."""
    setting = _kind_of_adapter(t)
    if setting is None:
        return
    t.has_lora = True
    rank = t.take("lora_rank", "lora_r", "model.lora_rank")
    t.put("lora.rank", 16 if rank is None else t.whole(rank), *([rank] if rank else [setting]))
    alpha = t.take("lora_alpha", "model.lora_alpha")
    if alpha is None:  # LLaMA-Factory
        note = "lora_alpha is twice that by default"
        t.put("lora.alpha", 2 * t.lines["lora.rank"].value, *([rank] if rank else []), note=note)
    else:
        t.put("lora.alpha", t.number(alpha), alpha)
    t.copy_number("lora.dropout", "lora_dropout")
    _translate_targets(t)
    _translate_bits(t)
    path = t.given("adapter_name_or_path", "adapters", "lora_model_dir", "adapter_load")
    if path is not None:
        paths = t.words(path)
        if len(paths) > 1:
            raise t.source.error(path, "has several adapters", allowed="one, of which to continue")
        t.put("lora.path", paths[0], path)


def _kind_of_adapter(t: Translation) -> Setting | None:
    """Return the setting that asks for adapters, or None. Other kinds of adapters are refused."""
    kinds = {"lora": True, "qlora": True, "full": False}
    remedy = "few weights are trained by LoRA, or by freezing parts"
    if t.trainer == "verl":
        rank = t.given("model.lora_rank")
        return rank if rank is not None and t.whole(rank) > 0 else None
    if t.trainer == "trl":
        setting = t.given("use_peft")
        return setting if t.flag(setting) else None
    setting = t.take("finetuning_type", "tuner_type", "train_type", "sft_type", "adapter")
    if t.trainer == "ms-swift":
        setting = t.given("tuner_type", "train_type", "sft_type") or setting
    if setting is None:
        return None
    return setting if t.choose(setting, kinds, remedy) else None


def _translate_targets(t: Translation) -> None:
    parts, origins = [], []
    pattern, setting = t.given(*_REGEX), t.take(*_TARGETS)
    linear = t.given("lora_target_linear")
    if pattern is not None:
        parts, origins = _matched(t, pattern, str(pattern.value)), [pattern]
    elif linear is not None and t.flag(linear):
        parts, origins = [*_DECODER, "merger", *_VISION], [linear]
    elif setting is not None:
        parts, origins = _named(t, setting)
    if not parts:
        t.differ("PEFT's own choice of layers for a model is not taken: see lora.targets")
        return
    t.put("lora.targets", parts, *origins)
    if "mlp" in parts and is_of_experts_by_name(t) and not t.is_megatron:
        t.differ(
            "mlp adapts the experts, too, which PEFT leaves out where they are parameters and no "
            "linear layers; lora.targets=[attention] leaves them out here",
            *origins,
        )


def _named(t: Translation, setting: Setting) -> tuple[list[str], list[Setting]]:
    """Return our targets for a list of names, for `all`, or for a pattern."""
    names = t.words(setting)
    if names in (["all"], ["all-linear"], ["all_linear"]):
        return _all_linear(t, setting)
    if isinstance(setting.value, str) and re.search(r"[(\[\\*]", setting.value):
        return _matched(t, setting, setting.value), [setting]
    parts = [*dict.fromkeys(names)]
    if t.is_megatron:
        megatron = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]}
        megatron |= {"linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}
        parts = [each for name in parts for each in megatron.get(name, [name])]
    return parts, [setting]


def _all_linear(t: Translation, setting: Setting) -> tuple[list[str], list[Setting]]:
    """Return the parts that `all-linear` means: PEFT has every layer but the head in mind,
    LLaMA-Factory and ms-swift only those that are not frozen."""
    everything = [*_DECODER, "merger", *_VISION]
    if t.trainer == "verl":
        excluded = t.given("model.exclude_modules")
        if excluded is None:
            return everything, [setting]
        hidden = _matched(t, excluded, str(excluded.value))
        if set(hidden) & set(_LAYERS.values()):
            raise t.source.error(
                excluded, "leaves out layers of the decoder", remedy="name those to adapt instead"
            )
        kept = [part for part in ("merger", *_VISION) if part not in hidden]
        return [*_DECODER, *kept], [setting, excluded]
    if t.trainer not in ("llamafactory", "ms-swift"):
        return everything, [setting]
    vision = t.take("freeze_vision_tower", "freeze_vit")
    merger = t.take("freeze_multi_modal_projector", "freeze_aligner")
    language = t.take("freeze_language_model", "freeze_llm")
    is_swift = t.trainer == "ms-swift"
    parts = [
        *([] if t.flag(language) else _DECODER),
        *(["merger"] if is_swift and not t.flag(merger) else []),
        *([] if t.flag(vision) else _VISION),
    ]
    if not parts:
        raise t.source.error(setting, ": every part of the model is frozen", remedy="train one")
    frozen = [vision, language, *([merger] if is_swift else [])]
    return parts, [setting, *(each for each in frozen if each is not None)]


def _matched(t: Translation, setting: Setting, pattern: str) -> list[str]:
    """Return our names of the layers that a regular expression matches. Only expressions that
    cannot take long are tried."""
    expression = compiled_pattern(t, setting, pattern)
    names = [ours for module, ours in _MODULES.items() if expression.fullmatch(module)]
    if not names:
        raise t.source.error(
            setting, "matches no layer of Qwen3-VL or Qwen3.5", remedy="name the layers: [q_proj]"
        )
    return [*dict.fromkeys(names)]


def _translate_bits(t: Translation) -> None:
    bits = t.given("quantization_bit", "quant_bits")
    four, eight = t.given("load_in_4bit"), t.given("load_in_8bit")
    if bits is not None and not is_off(bits.value):
        t.put("lora.base", t.choose(bits, _BITS), bits)
    elif four is not None and t.flag(four):
        t.put("lora.base", "nf4", four)
    elif eight is not None and t.flag(eight):
        t.put("lora.base", "int8", eight)
    elif (adapter := t.given("adapter")) is not None and adapter.value == "qlora":
        t.put("lora.base", "nf4", adapter)
    method = t.given("quantization_method", "quant_method", "bnb_4bit_quant_type")
    if method is not None and str(method.value).lower() not in ("bnb", "nf4"):
        t.differ("weights are stored as NF4 or int8, by blocks of 64", method)
