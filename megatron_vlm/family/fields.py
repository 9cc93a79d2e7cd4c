"""What is known of the fields of a config.json. A field that is not known may change what the model
computes, and training would go on with another model: so it is refused."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class KnownFields:
    """The fields of one part of a config.json, by what this version does with them."""

    carried_out: Set[str]  # any value that fits the others
    idle: Set[str]  # any value: nothing that is trained depends on it
    fixed: Mapping[str, tuple[Any, ...]]  # the values with which it computes


def other_model(folder: str, problems: Sequence[str]) -> ConfigError:
    """The refusal of a config.json with these problems."""
    return ConfigError(
        f"the config.json of {folder} describes another model than this version "
        "trains:\n  " + "\n  ".join(problems) + "\ngive a checkpoint of the released kind, or "
        "remove a field that you know to change nothing"
    )


def refused(part: str, given: Mapping[str, Any], known: KnownFields) -> Iterator[str]:
    """The fields that cannot be carried out, with the reason. `part` goes before their names."""
    for field, value in sorted(given.items()):
        if field in known.carried_out | known.idle:
            continue
        said = f"{part}{field.removeprefix('_')}={reprlib.repr(value)}"
        if field not in known.fixed:
            yield f"{said}, a field that this version does not know"
        elif value not in known.fixed[field]:
            yield f"{said}, and it computes only {' or '.join(map(repr, known.fixed[field]))}"
