"""Checks of config.json without transformers, whose import takes many seconds.

Only values that are certainly wrong are refused here. The rest is left to the family's `sizes_of`,
which sees the fields as transformers completes them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.field_rules import (
    KnownFields,
    ModelFields,
    advise_other_family,
    config_part,
    other_model,
    unsupported_fields,
)
from megatron_vlm.family.gemma4.fields import GEMMA4_FIELDS
from megatron_vlm.family.qwen3_5.fields import QWEN3_5_FIELDS, QWEN3_5_MOE_FIELDS
from megatron_vlm.family.qwen3_vl.fields import QWEN3_VL_FIELDS, QWEN3_VL_MOE_FIELDS
from megatron_vlm.io.untrusted import JsonField, UntrustedFile, what_is_at

_MAX_BYTES = 2**20
_MODELS = "Qwen3-VL, Qwen3.5 or Gemma 4"  # 3.6 and 3.8 are Qwen3.5 by their model_type
_DIVIDED_BY_TP = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "num_global_key_value_heads"),
)
_EXPERTS = ("num_experts", "num_local_experts")  # two names of one field
_FIELDS = {
    "qwen3_vl": QWEN3_VL_FIELDS,
    "qwen3_vl_moe": QWEN3_VL_MOE_FIELDS,
    "qwen3_5": QWEN3_5_FIELDS,
    "qwen3_5_moe": QWEN3_5_MOE_FIELDS,
    "gemma4": GEMMA4_FIELDS,
}


@dataclass(frozen=True)
class Counts:
    """The numbers that a layout must divide."""

    layers: int
    divided_by_tp: Mapping[str, int]  # by their names in config.json
    deepstack: int | None  # None if transformers fills in a list of its own
    experts: int = 0


def read_counts(folder: str) -> Counts | None:
    """Read the counts in a folder's config.json; None if only transformers can tell them."""
    try:
        if what_is_at(Path(folder) / "config.json") == "nothing":
            return None
    except (OSError, ValueError):
        return None
    config = read_fields(folder).value
    return _counts(config_part(config, "text_config"), config_part(config, "vision_config"))


def read_fields(folder: str | Path) -> JsonField:
    """Read the config.json in a folder. Refuse one that is certainly of another model: of some
    values transformers says nothing, at others it fails or never ends."""
    file = UntrustedFile(
        str(Path(folder) / "config.json"), ConfigError, f"give a folder of a {_MODELS} checkpoint"
    )
    config = file.json(_MAX_BYTES)
    config.object()
    fields: dict[str, Any] = config.value
    check_model_type(fields.get("model_type"), folder)
    known = _FIELDS[fields["model_type"]]
    problems = [*_contradictions(config_part(fields, "text_config")), *_problems(fields, known)]
    if problems:
        raise other_model(str(folder), problems, known.trained)
    return config


def _contradictions(text: dict[str, Any]) -> Iterator[str]:
    name, rope = "partial_rotary_factor", config_part(text, "rope_parameters")
    is_other_kind = rope.get("rope_type", "default") != "default"  # the table of fields refuses it
    if name in text and name in rope and text[name] != rope[name] and not is_other_kind:
        yield f"text_config.{name}={text[name]!r}, but rope_parameters has {rope[name]!r}"
    counts = {name: text[name] for name in _EXPERTS if text.get(name) is not None}
    if any(count != each for count in counts.values() for each in counts.values()):
        yield " and ".join(f"text_config.{name}={count!r}" for name, count in counts.items())
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds[-1:] == ["sliding_attention"]:
        yield "text_config.layer_types ends in sliding_attention, and transformers changes that"
    name = "full_attention_interval"
    # transformers has a default for an absent interval, but none for one that is null.
    if name in text and text[name] is None and text.get("layer_types") is None:
        yield f"text_config.{name}=None, without layer_types to say which layers have attention"


def no_config_json(folder: str | Path) -> ConfigError:
    """Return the error for a folder that is not a checkpoint."""
    if os.path.lexists(Path(folder) / "adapter_config.json"):
        return ConfigError(
            "has an adapter and no model",
            key="model.path",
            found=str(folder),
            remedy="to continue from it, give its base model as model.path and this folder as "
            "lora.path",
        )
    return ConfigError(
        "has no config.json",
        key="model.path",
        found=str(folder),
        remedy=f"give the folder of a {_MODELS} checkpoint, or the name of one on the Hub, such as "
        "Qwen/Qwen3-VL-2B-Instruct",
    )


def check_model_type(model_type: Any, path: str | Path) -> None:
    """Raise a ConfigError for models of other families."""
    if not isinstance(model_type, str) or model_type not in _FIELDS:
        advice = advise_other_family(str(model_type))
        raise ConfigError(
            f"has model_type={model_type!r} in its config.json",
            key="model.path",
            found=str(path),
            remedy="give a checkpoint of Qwen3-VL (model_type='qwen3_vl'), Qwen3-VL-MoE "
            "('qwen3_vl_moe'), Qwen3.5, 3.6 or 3.8 ('qwen3_5', with experts 'qwen3_5_moe'), or "
            f"Gemma 4 31B or 26B-A4B ('gemma4'): this version trains these{advice}",
        )


def _problems(config: dict[str, Any], known: ModelFields) -> Iterator[str]:
    text, vision = config_part(config, "text_config"), config_part(config, "vision_config")
    for part in known.parts(config, text, vision):
        yield from _other_values(*part)


def _other_values(part: str, settings: dict[str, Any], known: KnownFields) -> Iterator[str]:
    """Yield the fields that have one meaning here and another value in the file. transformers sets
    the model types of the parts itself, and replaces null by its own value."""
    names = (known.fixed.keys() | known.carried_out.keys()) - {"model_type"}
    values = {name: settings[name] for name in names & settings.keys()}
    null = {name for name, value in values.items() if value is None and name in known.carried_out}
    yield from unsupported_fields(
        part, {name: values[name] for name in values.keys() - null}, known
    )


def _counts(text: dict[str, Any], vision: dict[str, Any]) -> Counts | None:
    blocks = vision.get("deepstack_visual_indexes")
    deepstack = len(blocks) if isinstance(blocks, list) else None
    experts: Any = text.get("num_experts", text.get("num_local_experts", 0)) or 0
    layers: Any = text.get("num_hidden_layers")
    # transformers fills in what is absent or null.
    by_tp: dict[str, Any] = {
        name: text[name] for name in _DIVIDED_BY_TP if text.get(name) is not None
    }
    counts = (layers, experts, *by_tp.values())
    if not all(type(count) is int and count >= 0 for count in counts):
        return None
    return Counts(layers, by_tp, deepstack, experts)
