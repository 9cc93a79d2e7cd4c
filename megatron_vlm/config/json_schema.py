"""JSON schema of a `--config` file, from the types, bounds and comments of the keys. An editor
completes and checks such a file by it: `megatron-vlm help schema`."""

import math
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_vlm.config.bounds import Range
from megatron_vlm.config.data_sources import EvalSource, SourceSpec
from megatron_vlm.config.key_docs import group_docs, key_docs
from megatron_vlm.config.key_hints import group_names, recipes_of
from megatron_vlm.config.schema import MAPPINGS, Config

Schema = dict[str, Any]
# A text may look like another value, such as a run named 2024.
_TEXT = {"type": ["string", "number", "boolean"]}
_PLAIN: dict[Any, Schema] = {
    str: _TEXT,
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    dict: {"type": "object"},
    Any: {},
}


def config_schema() -> Schema:
    """Return the schema of the whole file: its recipes, and its keys in their groups."""
    choices = [
        {
            "type": "object",
            "properties": {group: {"enum": list(recipes_of(group))}},
            "required": [group],
            "additionalProperties": False,
        }
        for group in group_names()
        if recipes_of(group)
    ]
    recipes = {"description": "recipes", "type": "array", "items": {"anyOf": choices}}
    schema = _object(Config, "")
    schema["properties"] = {"defaults": recipes, **schema["properties"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "configuration of megatron_vlm",
        **schema,
        "patternProperties": {r"^\w+\.": {}},  # `optim.lr: 1e-5` is a key, too
    }


def _object(node: Any, prefix: str) -> Schema:
    """Return the schema of a group of keys, in which a group may be empty."""
    docs, groups = key_docs(), group_docs()
    properties = {}
    for name, kind in get_type_hints(node, include_extras=True).items():
        key = prefix + name
        if is_dataclass(kind) and key not in MAPPINGS:
            group = _object(kind, f"{key}.") | {"type": ["object", "null"]}
            properties[name] = group | {"description": groups[key].about}
        else:
            doc = docs[key]
            properties[name] = _value(kind) | {
                "description": f"{doc.meaning} (default: {doc.default})"
            }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(kind: Any) -> Schema:
    """Return the schema of a value of this type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(parts[0]) | _bounds(*parts[1:])
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, UnionType):
        return {"anyOf": [_value(part) for part in parts]}
    if origin is dict:
        return {"type": "object"}
    if origin is list:
        return {"type": "array", "items": _value(parts[0])}
    if origin is tuple:
        item = _value(parts[0])
        whole = [_PLAIN[dict]] * (parts[0] is EvalSource) + [_PLAIN[NoneType], item]
        return {"anyOf": [{"type": "array", "items": item}, *whole]}
    if kind in (SourceSpec, EvalSource):
        options = get_type_hints(SourceSpec)
        options = {each.name: _value(options[each.name]) for each in fields(SourceSpec)}
        source = {"type": "object", "properties": options, "required": ["path"]}
        return {"anyOf": [_TEXT, source | {"additionalProperties": False}]}
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        settings = {name: _value(inner) for name, inner in hints.items()}
        return {"type": "object", "properties": settings, "additionalProperties": False}
    return dict(_PLAIN[kind])


def _bounds(allowed: Range) -> Schema:
    lower = {"exclusiveMinimum" if allowed.is_min_open else "minimum": allowed.min}
    if math.isinf(allowed.max):
        return lower
    return lower | {"exclusiveMaximum" if allowed.is_max_open else "maximum": allowed.max}
