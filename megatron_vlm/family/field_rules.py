"""Rules for the fields of a config.json. An unknown field may change what the model computes, and
training would go on with another model. Therefore it is refused."""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.other_models import advise_unquantized


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
    "a finite number from 0 on",
    lambda value: type(value) in (int, float) and 0 <= value <= 1e300,
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


@dataclass(frozen=True)
class ModelFields:
    """The fields of a family's config.json, by part."""

    top: KnownFields
    text: KnownFields
    text_rope: KnownFields
    vision: KnownFields
    vision_rope: KnownFields


def other_model(folder: str, problems: Sequence[str]) -> ConfigError:
    """Return the error for a config.json with these problems."""
    remedy = (
        "give a checkpoint of the released kind, or remove a field that you know to change nothing"
    )
    if any(problem.startswith("quantization_config=") for problem in problems):
        remedy = advise_unquantized(folder)
    return ConfigError(
        "describes another model than this version trains:\n  " + "\n  ".join(problems),
        place=str(Path(folder) / "config.json"),
        remedy=remedy,
    )


def unsupported_fields(part: str, values: Mapping[str, Any], known: KnownFields) -> Iterator[str]:
    """Yield the fields that are not supported, with the reason. `part` is a prefix of their
    names."""
    for field, value in sorted(values.items()):
        if field in known.idle:
            continue
        text = f"{part}{field.removeprefix('_')}={reprlib.repr(value)}"
        if rule := known.carried_out.get(field):
            if not rule.fits(value):
                yield f"{text}, not {rule.what}"
        elif field not in known.fixed:
            yield f"{text}, a field that this version does not know"
        elif value not in known.fixed[field]:
            yield f"{text}, and it computes only {' or '.join(map(repr, known.fixed[field]))}"
