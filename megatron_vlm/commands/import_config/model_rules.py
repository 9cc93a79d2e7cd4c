"""The model, the objective, the parts of the model that learn, and adapters."""

import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off

_SUPPORTED = re.compile(
    r"qwen3[-_. ]?(vl|5|6|8)|gemma[-_. ]?4[-_. ](31b|26b[-_. ]a4b)", re.IGNORECASE
)
_QWEN25 = re.compile(r"qwen2[-_. ]?5?[-_. ]?vl", re.IGNORECASE)
_EXPERTS = re.compile(r"-?a\d+b", re.IGNORECASE)  # in the name of a model with some: 30B-A3B
_OTHER_GEMMA4 = re.compile(r"gemma[-_. ]?4[-_. ](e2b|e4b|12b)", re.IGNORECASE)
_TRAINED = "this version trains Qwen3-VL, Qwen3.5, 3.6 and 3.8, and Gemma 4 31B and 26B-A4B"
_RL_ONLY = (
    "learn from preferences by dpo, kto, orpo, simpo, cpo or reward, or from rewards that a "
    "function or a reward model gives (grpo)"
)
_METHODS = {
    **{"sft": "sft", "grpo": "grpo", "rloo": "rloo", "dpo": "dpo", "ipo": "ipo", "kto": "kto"},
    **{"orpo": "orpo", "simpo": "simpo", "cpo": "cpo", "reward": "reward", "rm": "reward"},
}
# Values of LLaMA-Factory's pref_loss that are objectives of their own here.
_LOSSES_THAT_ARE_OBJECTIVES = ("orpo", "simpo")
_MAX_PATTERN = 400  # characters of a regular expression
_MAX_REPEATS = 8  # quantifiers of one, which together must not take long on a name
# For each part of a model, by our key that freezes it: the setting of others, and its layers that
# get adapters; then the names of weights, on which patterns are tried: Qwen's and Gemma's.
_PARTS = {
    "model.freeze_language": ("freeze_language_model", ["attention", "mlp"]),
    "model.freeze_merger": ("freeze_multi_modal_projector", ["merger"]),
    "model.freeze_vision": ("freeze_vision_tower", ["vision_attention", "vision_mlp"]),
}
_WEIGHTS = {
    "model.freeze_language": ("model.language_model.layers.0.self_attn.q_proj.weight",),
    "model.freeze_merger": (
        "model.visual.merger.linear_fc1.weight",
        "model.embed_vision.embedding_projection.weight",
    ),
    "model.freeze_vision": (
        "model.visual.blocks.0.attn.qkv.weight",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
    ),
}
# Names of Megatron-Core, where projections are fused.
_FUSED = {
    **{"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]},
    **{"linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]},
}
_FEW = "few weights are trained by LoRA, or by freezing parts"
_ALL = (["all"], ["all-linear"], ["all_linear"])
# Modules of Qwen and Gemma that can be trained whole beside adapters, and their parts.
_WHOLE = {"merger": "merger", "visual.merger": "merger", "embed_vision": "merger"}
_WHOLE |= {"visual": "vision", "vision_tower": "vision", "language_model": "language"}
_BITS = {"4": "nf4", "8": "int8"}
# Names of layers, on which patterns are tried. The second is our name.
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
_GEMMA4_BLOCKS = {
    **{f"self_attn.{each}_proj": "attention" for each in "qkvo"},
    **{f"mlp.{each}_proj": "mlp" for each in ("gate", "up", "down")},
}
_MODULES = {
    **{f"model.language_model.layers.0.{each}": name for each, name in LAYERS.items()},
    **{f"model.visual.blocks.0.{each}": name for each, name in _BLOCKS.items()},
    **{f"model.visual.merger.{each}": "merger" for each in ("linear_fc1", "linear_fc2")},
    **{
        f"model.vision_tower.encoder.layers.0.{name}.linear": f"vision_{kind}"
        for name, kind in _GEMMA4_BLOCKS.items()
    },
    "model.embed_vision.embedding_projection": "merger",
}


def translate_model(t: Translation) -> None:
    """Set model.path, and report a model that this version does not train."""
    setting = t.given("model_name_or_path")
    if setting is None:
        names = t.trainer.names.get("model_name_or_path", "model_name_or_path")
        raise t.error(
            ": the model is not set", key=names.split()[0], remedy="add it to the configuration"
        )
    path, revision = str(setting.value), t.given("model_revision")
    if revision is not None and str(revision.value) in ("main", "master"):
        revision = None
    path += "" if revision is None else f"@{revision.value}"
    t.put("model.path", path, setting, revision)
    if setting.name in ("load", "mcore_model"):
        t.differ(
            "a folder in Megatron-Core's own format is not read: give the Hugging Face folder that "
            "it was made of as model.path",
            setting,
        )
    if _QWEN25.search(path):
        t.differ(f"Qwen2.5-VL and Qwen2-VL are not trained: {_TRAINED}. Change model.path", setting)
    elif _OTHER_GEMMA4.search(path):
        t.differ(f"of Gemma 4, E2B, E4B and 12B are not: {_TRAINED}. Change model.path", setting)
    elif not _SUPPORTED.search(path):
        t.differ(f"the name is not that of a known model: {_TRAINED}. Check model.path", setting)


def compiled_pattern(t: Translation, setting: Setting, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of a file. One that could take long on a name is refused."""
    repeats = len(re.findall(r"[*+{?]", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise t.source.error(
            setting, "is not tried", allowed="a short expression without repeated groups"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise t.source.error(setting, f"is no regular expression: {error}") from error


def translate_method(t: Translation) -> None:
    """Find what is trained: chats, preferences, or answers with rewards."""
    stage = t.given("rlhf_type")
    if stage is not None:
        t.method = t.choose(stage, _METHODS, f"for raw text write chats; {_RL_ONLY}")
    elif t.task in _METHODS:
        t.method = t.task
    elif t.task == "pt":
        raise t.error("starts pt, which has no counterpart", remedy=_RL_ONLY)
    if t.method in ("sft", "grpo", "rloo"):
        return
    loss = t.take("loss_type") if t.method == "dpo" else None
    if loss is not None and loss.value in _LOSSES_THAT_ARE_OBJECTIVES:
        t.method = loss.value
    elif loss is not None and t.words(loss) != ["sigmoid"]:
        t.put("preference.losses", t.words(loss), loss)
    note = "" if stage else f"the command is {t.source.command or t.method}"
    t.put("train.objective", t.method, stage, loss, note=note)
    if t.method == "reward":
        t.copy("reward.center_coef", "center_rewards_coefficient")
        return
    for key, name in {
        "preference.beta": "beta",
        "preference.simpo_gamma": "simpo_gamma",
        "preference.label_smoothing": "label_smoothing",
        "preference.discopop_tau": "discopop_tau",
        "preference.desirable_weight": "desirable_weight",
        "preference.undesirable_weight": "undesirable_weight",
    }.items():
        t.copy(key, name)
    _translate_supervised_part(t)


def _translate_supervised_part(t: Translation) -> None:
    weight, weights = t.given("rpo_alpha"), t.given("loss_weights")
    if weights is not None:
        numbers = [t.number(replace(weights, value=each)) for each in t.words(weights)]
        t.put("preference.loss_weights", numbers, weights)
    if weight is None or not t.number(weight):
        return
    if t.method == "dpo":
        line = t.lines.get("preference.losses")
        losses = ["sigmoid"] if line is None else line.value
        t.put("preference.losses", [*losses, "sft"], weight)
        t.put("preference.loss_weights", [*[1.0] * len(losses), t.number(weight)], weight)
    else:
        t.copy_setting("preference.sft_coef", weight)


def translate_frozen_parts(t: Translation) -> None:
    """Set model.freeze_*. With adapters, these settings have chosen the layers that get one."""
    trained = t.given("unfrozen_parameters")
    patterns = None
    if trained is not None and not t.has_lora:
        patterns = [compiled_pattern(t, trained, text) for text in t.words(trained)]
    for key, (name, _) in _PARTS.items():
        if patterns is not None and not any(
            each.match(name) for each in patterns for name in _WEIGHTS[key]
        ):
            t.put(key, True, trained)
        setting = t.take(name)
        if not t.has_lora and t.flag(setting):
            t.put(key, True, setting)


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
    t: Translation, setting: Setting, without: Sequence[str] = (), why: Setting | None = None
) -> None:
    """Set lora.*, which a setting asks for. `without`: parts that `all-linear` leaves out, because
    of the setting `why`."""
    t.has_lora = True
    rank = t.take("lora_rank")
    t.put("lora.rank", 16 if rank is None else t.whole(rank), rank or setting)
    if t.copy("lora.alpha", "lora_alpha") is None:
        note = "lora_alpha is twice that by default"
        t.put("lora.alpha", 2 * t.lines["lora.rank"].value, rank, note=note)
    t.copy("lora.dropout", "lora_dropout")
    _translate_targets(t, without, why)
    whole = t.given("modules_to_save")
    if whole is not None:
        parts = [t.choose(replace(whole, value=each), _WHOLE) for each in t.words(whole)]
        t.put("lora.train", parts, whole)
    _translate_bits(t)
    path = t.given("adapter_name_or_path")
    if path is not None:
        paths = t.words(path)
        if len(paths) > 1:
            raise t.source.error(path, "has several adapters", allowed="one, of which to continue")
        t.put("lora.path", paths[0], path)


def _translate_targets(t: Translation, without: Sequence[str], why: Setting | None) -> None:
    parts, origins = list[str](), list[Setting | None]()
    is_megatron = t.take("micro_batch_size") is not None  # adapts the experts, too
    pattern, setting = t.given("target_regex"), t.take("target_modules")
    linear = t.given("lora_target_linear")
    if pattern is not None:
        parts, origins = matched_layers(t, pattern), [pattern]
    elif linear is not None and t.flag(linear):
        parts, origins = _everything(t, linear, without, why)
    elif setting is not None and t.words(setting) in _ALL:
        parts, origins = _everything(t, setting, without, why)
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
    model = t.lines["model.path"].value if "model.path" in t.lines else ""
    if "mlp" in parts and _EXPERTS.search(model) and not is_megatron:
        t.differ(
            "mlp adapts the experts, too, which PEFT leaves out where they are parameters and no "
            "linear layers; lora.targets=[attention] leaves them out here",
            *origins,
        )


def _everything(
    t: Translation, setting: Setting, without: Sequence[str], why: Setting | None
) -> tuple[list[str], list[Setting | None]]:
    """Return the parts that `all-linear` means: every layer but the head and what is frozen."""
    frozen = {name: t.take(name) for name, _ in _PARTS.values()}
    learning = [layers for name, layers in _PARTS.values() if not t.flag(frozen[name])]
    parts = [layer for layers in learning for layer in layers if layer not in without]
    if not parts:
        raise t.source.error(setting, ": every part of the model is frozen", remedy="train one")
    return parts, [setting, *frozen.values(), why]


def matched_layers(t: Translation, setting: Setting) -> list[str]:
    """Return our names of the layers that a regular expression matches. Only expressions that
    cannot take long are tried."""
    expression = compiled_pattern(t, setting, str(setting.value))
    names = {our_name: 0 for module, our_name in _MODULES.items() if expression.fullmatch(module)}
    if not names:
        raise t.source.error(
            setting, "matches no layer of a model", remedy="name the layers: [q_proj]"
        )
    return list(names)


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
