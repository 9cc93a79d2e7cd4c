"""The model, the objective, and the parts of the model that learn."""

import re

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation
from megatron_vlm.config.preference_config import ObjectiveName

_SUPPORTED = re.compile(r"qwen3[-_. ]?(vl|5|6|8)", re.IGNORECASE)
_QWEN25 = re.compile(r"qwen2[-_. ]?5?[-_. ]?vl", re.IGNORECASE)
_EXPERTS = re.compile(r"-?a\d+b", re.IGNORECASE)
_TRAINED = "this version trains Qwen3-VL, Qwen3.5, 3.6 and 3.8"
_RL_ONLY = (
    "learn from preferences by dpo, kto, orpo, simpo or cpo, or from rewards that a function gives "
    "(grpo)"
)
_METHODS = {
    **{"sft": "sft", "grpo": "grpo", "rloo": "rloo", "dpo": "dpo", "ipo": "ipo", "kto": "kto"},
    **{"orpo": "orpo", "simpo": "simpo", "cpo": "cpo"},
}
_MAX_PATTERN = 400  # characters of a regular expression
_MAX_REPEATS = 8  # quantifiers of one, which together must not take long on a name
_FREEZE = {
    "model.freeze_vision": "freeze_vision_tower",
    "model.freeze_merger": "freeze_multi_modal_projector",
    "model.freeze_language": "freeze_language_model",
}


def translate_model(t: Translation) -> None:
    """Set model.path, and say where the model is none that this version trains."""
    setting = t.given("model_name_or_path")
    if setting is None:
        names = t.trainer.names.get("model_name_or_path", "model_name_or_path")
        raise t.error(
            ": the model is not set", key=names.split()[0], remedy="add it to the configuration"
        )
    path = str(setting.value)
    origins = [setting]
    revision = t.given("model_revision")
    if revision is not None and str(revision.value) not in ("main", "master"):
        path, origins = f"{path}@{revision.value}", [setting, revision]
    t.put("model.path", path, *origins)
    if setting.name in ("load", "mcore_model"):
        t.differ(
            "a folder in Megatron-Core's own format is not read: give the Hugging Face folder that "
            "it was made of as model.path",
            setting,
        )
    if _QWEN25.search(path):
        t.differ(f"Qwen2.5-VL and Qwen2-VL are not trained: {_TRAINED}. Change model.path", setting)
    elif not _SUPPORTED.search(path):
        t.differ(f"the name is none of a known model: {_TRAINED}. Check model.path", setting)


def is_of_experts_by_name(t: Translation) -> bool:
    """Return whether the name of the model is one of a model with experts: 30B-A3B."""
    return "model.path" in t.lines and _EXPERTS.search(t.lines["model.path"].value) is not None


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
    elif t.task in ("pt", "reward"):
        raise t.error(f"starts {t.task}, which has no counterpart", remedy=_RL_ONLY)
    if t.method in ("sft", "grpo", "rloo"):
        return
    objective, losses = _objective(t)
    t.method = objective
    note = "" if stage else f"the command is {t.source.command or objective}"
    t.put("train.objective", objective, *([stage] if stage else []), *losses, note=note)
    for key, name in {
        "preference.beta": "beta",
        "preference.simpo_gamma": "simpo_gamma",
        "preference.desirable_weight": "desirable_weight",
        "preference.undesirable_weight": "undesirable_weight",
    }.items():
        t.copy(key, name)
    _translate_supervised_part(t)


# Values of LLaMA-Factory's pref_loss that are objectives of their own here.
_OBJECTIVES: tuple[ObjectiveName, ...] = ("orpo", "simpo")


def _objective(t: Translation) -> tuple[ObjectiveName, list[Setting]]:
    """Return our objective, and the settings beside the stage that chose it."""
    loss = t.take("loss_type") if t.method == "dpo" else None
    if loss is None:
        return t.method, []  # type: ignore[return-value]
    if loss.value in _OBJECTIVES:
        return loss.value, [loss]
    if t.words(loss) != ["sigmoid"]:
        t.put("preference.losses", t.words(loss), loss)
    return "dpo", [loss]


def _translate_supervised_part(t: Translation) -> None:
    weight = t.given("rpo_alpha")
    if weight is None or not t.number(weight):
        return
    if t.method == "dpo":
        losses = (
            t.lines["preference.losses"].value if "preference.losses" in t.lines else ["sigmoid"]
        )
        t.put("preference.losses", [*losses, "sft"], weight)
        t.put("preference.loss_weights", [*[1.0] * len(losses), t.number(weight)], weight)
    else:
        t.put("preference.sft_coef", t.number(weight), weight)


_PARTS = {
    "model.freeze_vision": "model.visual.blocks.0.attn.qkv.weight",
    "model.freeze_merger": "model.visual.merger.linear_fc1.weight",
    "model.freeze_language": "model.language_model.layers.0.self_attn.q_proj.weight",
}


def translate_frozen_parts(t: Translation) -> None:
    """Set model.freeze_*. With adapters, these settings have chosen the layers that get one."""
    trained = t.given("unfrozen_parameters")
    if trained is not None and not t.has_lora:
        patterns = [compiled_pattern(t, trained, text) for text in t.words(trained)]
        for key, name in _PARTS.items():
            if not any(pattern.match(name) for pattern in patterns):
                t.put(key, True, trained)
    for key, name in _FREEZE.items():
        setting = t.take(name)
        if setting is not None and not t.has_lora and t.flag(setting):
            t.put(key, True, setting)
