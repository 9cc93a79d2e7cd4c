"""Entries of data.train and data.eval: each source of records, and each evaluation set."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError

# These keys of data.* change no row of data.train.
WITHOUT_EFFECT = (
    *("eval", "image_root", "unknown_keys", "lone_marks", "max_errors", "cache_dir"),
    *("num_workers", "prefetch"),
)
HELD_OUT = "held_out"  # name of the evaluation set that data.split makes
HUB = "hub:"  # prefix of a data set that is on the Hub, even if this folder has the same name
# FILE:NAME is a data set that LLaMA-Factory's dataset_info.json describes.
DESCRIBED = re.compile(r"(.+\.json):([^:/]+)")
# Names that data.columns may give columns: fields of a record, and fields of its messages.
RECORD_FIELDS = (
    *("messages", "conversations", "conversation", "prompt", "completion", "query", "response"),
    *("instruction", "input", "output", "history", "question", "answer", "answers", "problem"),
    *("solution", "text", "caption", "texts", "system", "system_prompt", "tools", "functions"),
    *("image", "images", "video", "videos", "objects", "chunks", "mask"),
    *("chosen", "rejected", "rejected_response", "rejected_messages", "label", "kto_tag"),
    "margin",
)
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "weight")
ROLES = ("system", "user", "assistant", "tool", "function_call")


@dataclass(frozen=True)
class SourceSpec:
    """Source of records. docs/data.md has a table of these options."""

    path: str  # file, glob, folder, or the name of a Hugging Face data set: NAME or hub:NAME
    weight: float = 1.0  # occurrences of each record in an epoch; 0.5: every other epoch
    split: str = "train"  # split of a Hugging Face data set
    subset: str | None = None  # configuration of a Hugging Face data set
    streaming: bool = False  # read a Hugging Face data set as it arrives
    image_root: str | None = None  # null: data.image_root
    revision: str | None = None  # branch, tag or commit of a Hugging Face data set
    columns: dict[str, str] | None = None  # null: data.columns
    roles: dict[str, Any] | None = None  # null: data.roles


@dataclass(frozen=True)
class EvalSource:
    """Evaluation set with its name."""

    name: str  # name in scores, predictions and checkpoint.best
    source: SourceSpec


def parse_sources(value: Any, key: str) -> tuple[SourceSpec, ...]:
    """Return the sources of a path, a mapping, or a list of both; an empty tuple for null."""
    if value is None:
        return ()
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ConfigError("is an empty list", key=key, allowed="at least one source")
    return tuple(_parse_source(entry, key) for entry in entries)


def _parse_source(entry: Any, key: str) -> SourceSpec:
    options = {"path": entry} if isinstance(entry, str) else entry
    names = [item.name for item in fields(SourceSpec)]
    is_valid = isinstance(options, dict) and isinstance(options.get("path"), str)
    if not is_valid or set(options) - set(names):
        raise ConfigError(f"is not a path or an object of {', '.join(names)}", key=key, found=entry)
    spec = SourceSpec(**options)
    # A weight stays an int where it was one, because it is part of the fingerprint of the data, by
    # which a run resumes.
    if type(spec.weight) not in (int, float) or not 0 < spec.weight < 1000:
        raise ConfigError(
            place=spec.path,
            key=f"{key}.weight",
            found=spec.weight,
            allowed="more than 0 and less than 1000",
        )
    check_columns(spec.columns or {}, f"{key}.columns", spec.path)
    check_roles(spec.roles or {}, f"{key}.roles", spec.path)
    for item in fields(SourceSpec):
        value = getattr(spec, item.name)
        if item.name in ("weight", "columns", "roles"):
            continue
        if not isinstance(value, item.type):  # type: ignore[arg-type]
            is_switch = item.type is bool
            raise ConfigError(
                "is not true or false" if is_switch else "is not text",
                place=spec.path,
                key=f"{key}.{item.name}",
                found=value,
                remedy="" if is_switch else "put it in quotes",
            )
    return spec


def check_columns(columns: Any, key: str, place: str = "") -> None:
    """Refuse a mapping with an unknown field, or with a column named twice."""
    if not isinstance(columns, Mapping) or not all(
        isinstance(text, str) and text for text in (*columns, *columns.values())
    ):
        raise ConfigError(
            place=place,
            key=key,
            found=columns,
            allowed="names of fields with their columns, such as {image: photo, question: q}",
        )
    known = (*RECORD_FIELDS, *MESSAGE_FIELDS)
    for field, column in columns.items():
        if field not in known:
            is_reversed = column in known
            raise ConfigError(
                f": {field!r} is not a field",
                place=place,
                key=key,
                found=dict(columns),
                allowed=known,
                remedy=f"give the field first: {{{column}: {field}}}" if is_reversed else "",
            )
    for names in (RECORD_FIELDS, MESSAGE_FIELDS):
        _refuse_repeated([columns[name] for name in names if name in columns], key, place)


def check_roles(roles: Any, key: str, place: str = "") -> None:
    """Refuse a mapping with an unknown role, or with a name of the data listed twice."""
    if not isinstance(roles, Mapping) or not all(map(_is_name_of_role, roles.values())):
        raise ConfigError(
            place=place,
            key=key,
            found=roles,
            allowed="roles with the names that the data has for them, such as "
            "{user: customer, assistant: [agent, bot]}",
        )
    for role in roles:
        if role not in ROLES:
            problem = f": {role!r} is not a role"
            raise ConfigError(problem, place=place, key=key, found=dict(roles), allowed=ROLES)
    _refuse_repeated(
        [name for names in roles.values() for name in names_of_role(names)], key, place
    )


def names_of_role(names: str | Sequence[str]) -> list[str]:
    """Return a data set's names for a role, as a list even if there is only one."""
    return [names] if isinstance(names, str) else list(names)


def _is_name_of_role(names: Any) -> bool:
    listed = names_of_role(names) if isinstance(names, str | list | tuple) else []
    return bool(listed) and all(isinstance(name, str) and name for name in listed)


def _refuse_repeated(names: Sequence[str], key: str, place: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"has {name!r} more than once", place=place, key=key, remedy="give each once"
            )


def parse_sets(value: Any) -> tuple[EvalSource, ...]:
    """Return the sets of data.eval. Each source is a set, named as in {name: SOURCE} or after its
    file."""
    if isinstance(value, dict) and "path" not in value:
        return tuple(
            EvalSource(str(name), _parse_single_source(name, entry))
            for name, entry in value.items()
        )
    specs = parse_sources(value, "data.eval")
    names = [name_of_source(spec.path) for spec in specs]
    return tuple(
        EvalSource(name if names.count(name) == 1 else f"{name}-{place}", spec)
        for place, (name, spec) in enumerate(zip(names, specs, strict=True))
    )


def name_of_source(path: str) -> str:
    """Return the name of a source that has none of its own: its file's, or its data set's."""
    described = DESCRIBED.fullmatch(path)
    return described[2] if described else Path(path.removeprefix(HUB)).name.split(".")[0]


def _parse_single_source(name: Any, entry: Any) -> SourceSpec:
    specs = parse_sources(entry, key := f"data.eval.{name}")
    if len(specs) != 1:
        raise ConfigError(f"has {len(specs)} sources", key=key, remedy="give each set exactly one")
    return specs[0]


def plain_sources(specs: Sequence[SourceSpec]) -> Any:
    """Return the shortest value from which `parse_sources` makes these sources."""
    entries = [_plain_source(spec) for spec in specs]
    return entries[0] if len(entries) == 1 else entries or None


def _plain_source(spec: SourceSpec) -> Any:
    options = {
        key: value for key, value in vars(spec).items() if value != vars(SourceSpec).get(key)
    }
    return options if len(options) > 1 else spec.path


def plain_sets(sets: Sequence[EvalSource]) -> Any:
    """Return the shortest value from which `parse_sets` makes these sets: without names where they
    equal the files' names."""
    plain = plain_sources([held_out.source for held_out in sets])
    if parse_sets(plain) == tuple(sets):
        return plain
    return {held_out.name: _plain_source(held_out.source) for held_out in sets}
