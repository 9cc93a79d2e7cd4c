"""Typed access to the values of a record, for the files that read its formats."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import UntrustedFile

_MIN_WEIGHT, _MAX_WEIGHT = 1e-20, 1e20  # float32 holds these weights and sums of their losses


def dicts(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects. A single object and a JSON string are accepted, too."""
    value = parse_text(value, key, where) if isinstance(value, str) else value
    value = [value] if isinstance(value, Mapping) else value
    if not is_list(value) or not all(isinstance(item, Mapping) for item in value):
        raise DataError(f"must be a list of objects, not {kind_of(value)}", place=where, key=key)
    try:  # transformers 5.23 shows only the type of values that tables hold and JSON cannot
        json.dumps([*value], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"must be JSON: {error}", place=where, key=key) from error
    return [dict(item) for item in value]


def parse_text(text: str, key: str, where: str) -> Any:
    """Parse the JSON text at this key."""
    try:
        return UntrustedFile(where).parse(text, "is a string that is not JSON")
    except DataError as error:
        raise DataError(**error.fields() | {"key": key}) from error


def text_of(value: Any, name: str, where: str) -> str:
    """Return the value, which must be a string."""
    if not isinstance(value, str):
        raise DataError(f"must be a string, not {kind_of(value)}", place=where, key=name)
    return value


def weight_of(value: Any, key: str, where: str) -> float:
    """Return a loss weight, of a message or a token. True is 1, and false is 0."""
    if isinstance(value, bool | int | float) and (not value or _MIN_WEIGHT <= value <= _MAX_WEIGHT):
        return float(value)
    weights = (
        f"0 (or false), 1 (or true), or another weight from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
    )
    raise DataError(place=where, key=key, found=value, allowed=weights)


def single_value(raw: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """Return the value at one of these keys, which all mean the same; None if all are absent."""
    values = {name: raw[name] for name in names if raw.get(name) is not None}
    filled = {name: value for name, value in values.items() if not is_empty(value)}
    first, *others = [*(filled or values).items()] or [("", None)]
    for name, value in others:
        if filled and value != first[1]:
            raise DataError(
                f"and {name} mean the same and differ",
                place=where,
                key=first[0],
                remedy="give one of them",
            )
    return first[1]


def is_empty(value: Any) -> bool:
    """Return whether a value is null, or a text, list or object with nothing in it. Such a value
    counts as absent."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | bytes | Sequence) and not len(value))


def is_list(value: Any) -> bool:
    """Return whether the value is a list, of any type, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def kind_of(value: Any) -> str:
    """Return the type of a value, for messages."""
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
