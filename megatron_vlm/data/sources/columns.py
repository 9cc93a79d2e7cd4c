"""Names of a data set's columns, message keys and roles, and the names that records have here: by
data.columns and data.roles, or by LLaMA-Factory's dataset_info.json, FILE.json:NAME, which says
where the data is, too. Columns that it does not name are not read, as there."""

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_vlm.config.data_sources import (
    DESCRIBED,
    HUB,
    MESSAGE_FIELDS,
    RECORD_FIELDS,
    SourceSpec,
    names_of_role,
)
from megatron_vlm.data.records.record import is_list, parse_text
from megatron_vlm.errors import ConfigError, within
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

_LISTS_OF_MESSAGES = (
    *("messages", "conversations", "prompt", "completion"),
    *("chosen", "rejected", "rejected_messages"),
)
# Text in a cell of these columns is JSON where it begins like a list or an object.
_JSON_CELLS = (
    *("messages", "conversations", "conversation", "image", "images", "video", "videos"),
    *("texts", "history", "tools", "objects", "chunks", "mask"),
)
_MEDIA = {"system": "system", "tools": "tools", "images": "images", "videos": "videos"}
# Our fields of a record by the names that a description has for them.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_PREFERENCE = {"chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
_COLUMNS = {
    "alpaca": _ALPACA | _MEDIA | _PREFERENCE,
    **dict.fromkeys(("sharegpt", "openai"), {"messages": "messages"} | _MEDIA | _PREFERENCE),
}
# The fields of data without `columns`.
_DEFAULTS = {
    "alpaca": {"instruction", "input", "output"},
    "sharegpt": {"conversations"},
    "openai": {"conversations"},
}
_KEYS = {"role_tag": "role", "content_tag": "content"}
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ELSEWHERE = ("script_url", "cloud_file_name", "ms_hub_url", "om_hub_url")
_KNOWN = (
    *("hf_hub_url", *_ELSEWHERE, "file_name", "formatting", "ranking", "subset", "split"),
    *("folder", "num_samples", "revision", "columns", "tags"),
)


@dataclass(frozen=True)
class FieldNames:
    """The fields of a record, of its messages, and the roles, by a data set's names for them."""

    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    message_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: Collection[str] = ()  # fields for which no column is read, not even one of that name

    @staticmethod
    def from_options(columns: Mapping[str, str], roles: Mapping[str, Any]) -> "FieldNames":
        """Invert mappings of the form of data.columns and data.roles."""
        return FieldNames(
            {column: name for name, column in columns.items() if name not in MESSAGE_FIELDS},
            {column: name for name, column in columns.items() if name in MESSAGE_FIELDS},
            {name: role for role, names in roles.items() for name in names_of_role(names)},
        )

    def __bool__(self) -> bool:
        return bool(self.fields or self.message_fields or self.roles or self.unread)

    def rename(self, raw: Any, where: str) -> Any:
        """Return a raw record with the names that records have here."""
        if not isinstance(raw, Mapping):
            return raw  # it is refused where records are parsed
        record = _rename(raw, self.fields, {*self.fields.values(), *self.unread})
        if self.message_fields or self.roles:
            for name in _LISTS_OF_MESSAGES:
                messages: Any = record.get(name)
                if isinstance(messages, str) and name in _JSON_CELLS:
                    with within(where):
                        messages = parse_text(messages, name)
                if is_list(messages):
                    record[name] = [*map(self._rename_message, messages)]
                elif isinstance(messages, Mapping):  # LLaMA-Factory's chosen and rejected
                    record[name] = self._rename_message(messages)
        return record

    def _rename_message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        renamed = _rename(message, self.message_fields, {*self.message_fields.values()})
        for key in ("role", "from"):
            if isinstance(role := renamed.get(key), str):
                renamed[key] = self.roles.get(role, role)
        return renamed


def _rename(raw: Mapping[str, Any], names: Mapping[str, str], taken: set[str]) -> dict[str, Any]:
    """Return a copy with other names. A key that has one of the `taken` names by chance gets a name
    that no format has, so that it is reported as every key that is not read."""
    return {
        names.get(key, f"{key} (not mapped)" if key in taken else key): value
        for key, value in raw.items()
    }


def parse_cells(record: Any, where: str) -> Any:
    """Parse the JSON in the text cells of a record's lists."""
    for name in _JSON_CELLS:
        cell = record.get(name)
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
            with within(where):
                record[name] = parse_text(cell, name)
    return record


def check_columns_exist(
    names: FieldNames, keys_of_each: Iterable[Collection[str]], place: str
) -> None:
    """Refuse names of columns that no record has. Mostly the first record is enough."""
    missing, seen = dict.fromkeys(names.fields), dict[str, None]()
    for keys in keys_of_each:
        seen.update(dict.fromkeys(keys))
        missing = {column: None for column in missing if column not in keys}
        if not missing:
            return
    for column in missing:
        raise ConfigError(
            f": the data has no column {column!r}",
            place=place,
            key=f"columns.{names.fields[column]}",
            found=column,
            allowed=tuple(seen),
        )


def read_dataset_info(spec: SourceSpec) -> tuple[SourceSpec, FieldNames] | None:
    """Return the source that FILE.json:NAME describes and its columns; None for another spec."""
    match = DESCRIBED.fullmatch(spec.path)
    if match is None or os.path.lexists(spec.path):
        return None
    path, name = os.path.expanduser(match[1]), match[2]
    if spec.columns is not None or spec.roles is not None:
        raise ConfigError(
            ": the columns and roles of this data set are those of its description",
            place=spec.path,
            remedy="change them there, or give the file of the data set itself",
        )
    sets = UntrustedFile(path, ConfigError).json().object()
    if name not in sets:
        raise ConfigError(
            "has no such data set", place=path, found=name, key="NAME", allowed=[*sets]
        )
    entry = sets[name]
    _refuse_unsupported(entry)
    return _place(spec, entry, Path(path).parent), _names(entry)


def _refuse_unsupported(entry: JsonField) -> None:
    fields = entry.object()
    if unknown := sorted(fields.keys() - {*_KNOWN}):
        raise entry.file.error(
            ": the meaning of this key is not known", key=fields[unknown[0]].name
        )
    columns = entry.get("columns")
    named = {} if columns is None else columns.object()
    is_ranking, has_pair = _text(entry, "ranking", False), {"chosen", "rejected"} <= named.keys()
    if is_ranking is not False and not has_pair:
        raise entry.file.error(
            ": a ranking has columns for chosen and rejected",
            key=fields["ranking"].name,
            remedy="name both in columns, and train with train.objective=dpo",
        )
    if "audios" in named:
        raise entry.file.error(
            ": this data has sound, and the model takes none", key=named["audios"].name
        )
    is_elsewhere = "hf_hub_url" not in fields
    for key in (*(_ELSEWHERE if is_elsewhere else ()), "num_samples", "folder"):
        if entry.get(key) is not None:
            raise entry.file.error(
                "is not supported", key=fields[key].name, remedy=_REMEDIES.get(key, _DOWNLOAD)
            )


_DOWNLOAD = "download the data, and give its file as file_name"
_REMEDIES = {
    "num_samples": "remove it, and give the data set a weight: "
    "data.train={path: FILE.json:NAME, weight: 0.5}"
}


def _place(spec: SourceSpec, entry: JsonField, folder: Path) -> SourceSpec:
    """Return the spec of the files or of the data set on the Hub."""
    options: dict[str, Any] = {"split": _text(entry, "split", spec.split)}
    if entry.get("hf_hub_url") is not None:
        options |= {
            "path": HUB + entry["hf_hub_url"].string(),
            "subset": _text(entry, "subset", spec.subset),
            "revision": _text(entry, "revision", spec.revision),
        }
        return replace(spec, **options)
    file = folder / entry["file_name"].string()
    return replace(spec, path=str(file), image_root=spec.image_root or str(folder), **options)


def _names(entry: JsonField) -> FieldNames:
    """Return the names of the columns, of the keys of messages, and of the roles."""
    formatting = _text(entry, "formatting", "alpaca")
    if formatting not in _COLUMNS:
        raise entry.file.error(
            key=f"{entry.name}.formatting", found=formatting, allowed=tuple(_COLUMNS), remedy=""
        )
    if entry.get("columns") is None:
        fields, read = dict[str, str](), _DEFAULTS[formatting]
    else:
        fields = _texts(entry["columns"], _COLUMNS[formatting], formatting)
        if "instruction" not in fields.values():  # the question alone
            fields = {c: "instruction" if f == "input" else f for c, f in fields.items()}
        read = set(fields.values())
        _require_texts(entry, read, formatting)
    keys, roles = dict[str, str](), dict[str, str]()
    if entry.get("tags") is not None:
        tags = {} if formatting == "alpaca" else _KEYS | _ROLES
        meanings = _texts(entry["tags"], tags, formatting)
        keys = {name: meaning for name, meaning in meanings.items() if meaning in _KEYS.values()}
        roles = {name: meaning for name, meaning in meanings.items() if meaning in _ROLES.values()}
    return FieldNames(fields, keys, roles, tuple(sorted({*RECORD_FIELDS} - read)))


def _texts(names: JsonField, known: Mapping[str, str], formatting: str) -> dict[str, str]:
    """Return our names by the data set's names."""
    our_columns: dict[str, str] = {}
    for key, field in names.object().items():
        if field.value in (None, ""):
            continue
        if key not in known:
            raise names.file.error(
                f"has no meaning with formatting={formatting}",
                key=field.name,
                allowed=tuple(known) or None,
                remedy="" if known else "set formatting, or remove it",
            )
        if field.string() in our_columns:
            raise names.file.error(
                "is the name of another one, too", key=field.name, found=field.value
            )
        our_columns[field.string()] = known[key]
    return our_columns


def _require_texts(entry: JsonField, read: set[str], formatting: str) -> None:
    """Refuse columns that have no question or no answer."""
    needed = {"instruction": "prompt", "output": "response"}
    if {"chosen", "rejected"} <= read:
        del needed["output"]
    for field, key in (needed if formatting == "alpaca" else {"messages": "messages"}).items():
        if field not in read:
            raise entry.file.error(
                "is missing: there are no questions and answers to learn",
                key=f"{entry.name}.columns.{key}",
            )


def _text(entry: JsonField, key: str, default: Any) -> Any:
    """Return the value at a key of a description: text, or of the type of its default."""
    field = entry.get(key)
    if field is None:
        return default
    return field.value if isinstance(default, bool) else field.string()
