"""Rules for the fields of a config.json. An unknown field may change what the model computes, and
training would go on with another model. Therefore it is refused, with the programs that train such
a model, or the repository from whose weights a quantized release was made."""

import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vlm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    "gemma4*": (
        "Gemma 4 12B, or a part of Gemma 4",
        "LLaMA-Factory, axolotl and NVIDIA Megatron-Bridge",
    ),
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
# The name of a release, before the end that says how its weights are quantized, such as -FP8, by
# who released it.
_RELEASES = {
    "Qwen": r"(Qwen3-VL-\d+B(?:-A\d+B)?-(?:Instruct|Thinking)|"
    r"Qwen3\.\d-\d+(?:\.\d+)?B(?:-A\d+B)?(?:-Base)?)(?=-)",
    "google": r"(gemma-4-\d+B(?:-A\d+B)?(?:-it)?)(?=-)",
}


def advise_other_family(model_type: str) -> str:
    """Return a clause with the model and the programs that train it; empty if unknown."""
    for pattern, (name, programs) in _TRAINED_BY.items():
        begin = pattern.removesuffix("*")
        if model_type == pattern or (begin != pattern and model_type.startswith(begin)):
            return f"; {programs} can train {name}"
    return ""


def advise_unquantized(folder: str) -> str:
    """Return the remedy for a folder or name of quantized weights, such as an FP8 release."""
    found = {who: re.search(name, folder, re.IGNORECASE) for who, name in _RELEASES.items()}
    names = [f", {who}/{match[1]}" for who, match in found.items() if match]
    which = names[0] if names else " from which these were made"
    return (
        f"give the bf16 weights{which}: of quantized ones, only those of bitsandbytes in NF4 can "
        "stand beside adapters (lora.base=nf4)"
    )


@dataclass(frozen=True)
class Rule:
    """A condition on the value of a field."""

    what: str
    fits: Callable[[Any], bool]


def whole_number(minimum: int, maximum: int) -> Rule:
    """Return a rule for whole numbers. The bounds are far beyond any model: they keep nonsense from
    taking hours and memory."""
    return Rule(
        f"a whole number from {minimum} to {maximum}",
        lambda value: type(value) is int and minimum <= value <= maximum,
    )


def or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.what} or null", lambda value: value is None or rule.fits(value))


def list_of(rule: Rule) -> Rule:
    return Rule(
        f"a list, each of it {rule.what}",
        lambda value: isinstance(value, list | tuple) and all(map(rule.fits, value)),
    )


POSITIVE = Rule(
    "a finite number above 0",
    lambda value: type(value) in (int, float) and 0 < value < math.inf and value <= 1e300,
)
POSITIVE_OR_0 = Rule(
    "a finite number from 0 on", lambda value: type(value) in (int, float) and 0 <= value <= 1e300
)
SHARE = Rule(
    "a number above 0 and up to 1", lambda value: type(value) in (int, float) and 0 < value <= 1
)
SWITCH = Rule("true or false", lambda value: type(value) is bool)
OBJECT = Rule("an object", lambda value: isinstance(value, Mapping))
TEXT_RULE = Rule("text", lambda value: isinstance(value, str))
LIST = Rule("a list", lambda value: isinstance(value, list | tuple))


def _is_nf4(value: Any) -> bool:
    """Return whether a quantization_config is that of weights in 4 bits by bitsandbytes."""
    return (
        isinstance(value, Mapping)
        and value.get("quant_method") == "bitsandbytes"
        and value.get("load_in_4bit") is True
        and value.get("bnb_4bit_quant_type") == "nf4"
    )


QUANTIZATION = Rule(
    "null, or that of bitsandbytes in 4 bits of the type nf4",
    lambda value: value is None or _is_nf4(value),
)


@dataclass(frozen=True)
class KnownFields:
    """The fields of one part of a config.json, by their use in this version."""

    carried_out: Mapping[str, Rule]  # used: any value that fits its rule and the other fields
    idle: Set[str]  # unused: any value, because nothing that is trained depends on it
    fixed: Mapping[str, tuple[Any, ...]]  # the only values that this version computes with
    # The released models that have another value in a field of `fixed`.
    others: Mapping[str, str] = field(default_factory=dict)

    def changed(
        self,
        carried_out: Mapping[str, Rule] = {},
        idle: Iterable[str] = (),
        *,
        without: Collection[str] = (),
        **fixed: tuple[Any, ...],
    ) -> "KnownFields":
        """Return the same fields without some, and with more of each use."""
        rules = {name: rule for name, rule in self.carried_out.items() if name not in without}
        values = {name: only for name, only in self.fixed.items() if name not in without}
        return KnownFields(
            rules | dict(carried_out), self.idle | set(idle), values | fixed, self.others
        )


@dataclass(frozen=True)
class ModelFields:
    """The fields of a family's config.json, by part."""

    top: KnownFields
    text: KnownFields
    text_rope: KnownFields
    vision: KnownFields
    vision_rope: KnownFields
    trained: str = "the released kind"  # the models of the family that are trained

    def parts(
        self, top: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any], KnownFields]]:
        """Yield each part: the prefix of its names, its values, and its known fields."""
        yield "", top, self.top
        yield "text_config.", text, self.text
        for name in ("rope_parameters", "rope_scaling"):  # the second is older
            yield "text_config.rope_parameters.", config_part(text, name), self.text_rope
        yield "vision_config.", vision, self.vision
        rope = config_part(vision, "rope_parameters")
        yield "vision_config.rope_parameters.", rope, self.vision_rope


def config_part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a config.json; an empty one where there is none."""
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def other_model(
    folder: str, problems: Sequence[str], trained: str = ModelFields.trained
) -> ConfigError:
    """Return the error for a config.json with these problems."""
    remedy = f"give a checkpoint of {trained}, or remove a field that you know to change nothing"
    if any(problem.startswith("quantization_config=") for problem in problems):
        remedy = advise_unquantized(folder)
    return ConfigError(
        "describes another model than this version trains:\n  " + "\n  ".join(problems),
        place=str(Path(folder) / "config.json"),
        remedy=remedy,
    )


def unsupported_fields(part: str, values: Mapping[str, Any], known: KnownFields) -> Iterator[str]:
    """Yield the fields of a part that are not supported, with the reason."""
    for name, value in sorted(values.items()):
        if name in known.idle:
            continue
        text = f"{part}{name.removeprefix('_')}={reprlib.repr(value)}"
        if rule := known.carried_out.get(name):
            if not rule.fits(value):
                yield f"{text}, not {rule.what}"
        elif name not in known.fixed:
            yield f"{text}, a field that this version does not know"
        elif (value, type(value) is bool) not in [(v, type(v) is bool) for v in known.fixed[name]]:
            has_it = f", as {known.others[name]}" if name in known.others else ""
            only = " or ".join(map(repr, known.fixed[name]))
            yield f"{text}{has_it}, and it computes only {only}"


# Checks that values fit each other: whether each passes, and the text of the problem.
Checks = Iterable[tuple[bool, str]]


def refuse_other_model(config: "PretrainedConfig", known: ModelFields, checks: Checks) -> None:
    """Refuse a config.json, as transformers completes it, with unknown fields, unsupported values,
    or values that do not fit each other."""
    problems = list(_unknown(config, known)) or [problem for fits, problem in checks if not fits]
    if problems:
        raise other_model(config.name_or_path, problems, known.trained)


def _unknown(config: "PretrainedConfig", known: ModelFields) -> Iterator[str]:
    """Yield the fields that are unknown or have an unsupported value."""
    parts = {"text_config": config.text_config, "vision_config": config.vision_config}
    if empty := {name: part for name, part in parts.items() if not hasattr(part, "__dict__")}:
        yield from (f"{name}={part!r}, which has no fields" for name, part in empty.items())
        return
    top, text, vision = map(_fields, (config, *parts.values()))
    top |= {"text_config": text, "vision_config": vision}
    # Some tools repeat a field of the text at the top, where nothing reads it.
    repeated = {name for name in top if name in text and top[name] == text[name]}
    read = top.keys() - (repeated - known.top.fixed.keys())
    for part in known.parts({name: top[name] for name in read}, text, vision):
        yield from unsupported_fields(*part)


def _fields(part: "PretrainedConfig") -> dict[str, Any]:
    config_names = {"_heterogeneity_spec": "per_layer_config"}  # name in config.json
    return {config_names.get(name, name): value for name, value in vars(part).items()}
