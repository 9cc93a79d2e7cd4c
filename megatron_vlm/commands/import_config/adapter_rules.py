"""Adapters: whether there are any, in which layers, and what is beside them in 4 or 8 bits."""

import re
from collections.abc import Sequence

from megatron_vlm.commands.import_config.model_rules import (
    compiled_pattern,
    is_of_experts_by_name,
)
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off

_DECODER = ["attention", "mlp"]
_VISION = ["vision_attention", "vision_mlp"]
_PARTS = {
    "freeze_language_model": _DECODER,
    "freeze_multi_modal_projector": ["merger"],
    "freeze_vision_tower": _VISION,
}
# Names of Megatron-Core, where projections are fused.
_FUSED = {
    **{"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]},
    **{"linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]},
}
_FEW = "few weights are trained by LoRA, or by freezing parts"
_ALL = (["all"], ["all-linear"], ["all_linear"])
_BITS = {"4": "nf4", "8": "int8"}
# Names of layers of Qwen3-VL and Qwen3.5, on which patterns are tried. The second is our name.
LAYERS = {
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
    **{f"model.language_model.layers.0.{each}": name for each, name in LAYERS.items()},
    **{f"model.visual.blocks.0.{each}": name for each, name in _BLOCKS.items()},
    **{f"model.visual.merger.{each}": "merger" for each in ("linear_fc1", "linear_fc2")},
}


def translate_adapters(t: Translation) -> None:
    """Set lora.*, where the kind of tuning is one of adapters."""
    if (setting := wanted_adapters(t)) is not None:
        put_adapters(t, setting)


def wanted_adapters(t: Translation) -> Setting | None:
    """Return the setting that asks for adapters by their kind, or None."""
    setting = t.take("tuner_type")
    kinds = {"lora": True, "qlora": True, "full": False}
    return setting if setting is not None and t.choose(setting, kinds, _FEW) else None


def put_adapters(
    t: Translation, setting: Setting, without: Sequence[str] = (), *origins: Setting
) -> None:
    """Set lora.*, which a setting asks for. `without`: parts that `all-linear` leaves out, because
    of the other settings."""
    t.has_lora = True
    rank = t.take("lora_rank")
    t.put("lora.rank", 16 if rank is None else t.whole(rank), rank or setting)
    if t.copy("lora.alpha", "lora_alpha") is None:
        note = "lora_alpha is twice that by default"
        t.put("lora.alpha", 2 * t.lines["lora.rank"].value, *([rank] if rank else []), note=note)
    t.copy("lora.dropout", "lora_dropout")
    _translate_targets(t, without, *origins)
    _translate_bits(t)
    path = t.given("adapter_name_or_path")
    if path is not None:
        paths = t.words(path)
        if len(paths) > 1:
            raise t.source.error(path, "has several adapters", allowed="one, of which to continue")
        t.put("lora.path", paths[0], path)


def _translate_targets(t: Translation, without: Sequence[str], *further: Setting) -> None:
    parts, origins = [], []
    is_megatron = t.take("micro_batch_size") is not None  # adapts the experts, too
    pattern, setting = t.given("target_regex"), t.take("target_modules")
    linear = t.given("lora_target_linear")
    if pattern is not None:
        parts, origins = matched_layers(t, pattern), [pattern]
    elif linear is not None and t.flag(linear):
        parts, origins = _everything(t, linear, without, *further)
    elif setting is not None and t.words(setting) in _ALL:
        parts, origins = _everything(t, setting, without, *further)
    elif setting is not None and re.search(r"[(\[\\*]", str(setting.value).strip("[]")):
        parts, origins = matched_layers(t, setting), [setting]
    elif setting is not None:
        fused = _FUSED if is_megatron else {}
        names = [each for name in t.words(setting) for each in fused.get(name, [name])]
        parts, origins = [*dict.fromkeys(names)], [setting]
    if not parts:
        t.differ("PEFT's own choice of layers for a model is not taken: see lora.targets")
        return
    t.put("lora.targets", parts, *origins)
    if "mlp" in parts and is_of_experts_by_name(t) and not is_megatron:
        t.differ(
            "mlp adapts the experts, too, which PEFT leaves out where they are parameters and no "
            "linear layers; lora.targets=[attention] leaves them out here",
            *origins,
        )


def _everything(
    t: Translation, setting: Setting, without: Sequence[str], *origins: Setting
) -> tuple[list[str], list[Setting]]:
    """Return the parts that `all-linear` means: every layer but the head and what is frozen."""
    frozen = {name: t.take(name) for name in _PARTS}
    parts = [each for name in _PARTS if not t.flag(frozen[name]) for each in _PARTS[name]]
    parts = [part for part in parts if part not in without]
    if not parts:
        raise t.source.error(setting, ": every part of the model is frozen", remedy="train one")
    return parts, [setting, *(each for each in (*frozen.values(), *origins) if each is not None)]


def matched_layers(t: Translation, setting: Setting) -> list[str]:
    """Return our names of the layers that a regular expression matches. Only expressions that
    cannot take long are tried."""
    expression = compiled_pattern(t, setting, str(setting.value))
    names = [ours for module, ours in _MODULES.items() if expression.fullmatch(module)]
    if not names:
        raise t.source.error(
            setting, "matches no layer of Qwen3-VL or Qwen3.5", remedy="name the layers: [q_proj]"
        )
    return [*dict.fromkeys(names)]


def _translate_bits(t: Translation) -> None:
    bits, tuner = t.given("quantization_bit"), t.given("tuner_type")
    four, eight = t.given("load_in_4bit"), t.given("load_in_8bit")
    if bits is not None and not is_off(bits.value):
        t.put("lora.base", t.choose(bits, _BITS), bits)
    elif four is not None and t.flag(four):
        t.put("lora.base", "nf4", four)
    elif eight is not None and t.flag(eight):
        t.put("lora.base", "int8", eight)
    elif tuner is not None and tuner.value == "qlora":
        t.put("lora.base", "nf4", tuner)
    method = t.given("quantization_method", "bnb_4bit_quant_type")
    if method is not None and str(method.value).lower() not in ("bnb", "nf4"):
        t.differ("weights are stored as NF4 or int8, by blocks of 64", method)
