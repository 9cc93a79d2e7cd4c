"""Names of a data set's columns, message keys and roles, and the names that records have here:
data.columns and data.roles."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.config.data_sources import MESSAGE_FIELDS, names_of_role
from megatron_vlm.data.records.record_values import is_list, parse_text
from megatron_vlm.errors import ConfigError

_LISTS_OF_MESSAGES = (
    *("messages", "conversations", "prompt", "completion"),
    *("chosen", "rejected", "rejected_messages"),
)
# Text in a cell of these columns is JSON where it begins like a list or an object.
_JSON_CELLS = (
    *("messages", "conversations", "conversation", "image", "images", "video", "videos"),
    *("texts", "history", "tools", "objects", "chunks", "mask"),
)


@dataclass(frozen=True)
class FieldNames:
    """The fields of a record, of its messages, and the roles, by the names that a data set has for
    them."""

    fields: Mapping[str, str] = field(default_factory=dict)
    message_fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
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
                    messages = parse_text(messages, name, where)
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
            record[name] = parse_text(cell, name, where)
    return record


def check_columns_exist(
    names: FieldNames, keys_of_each: Iterable[Collection[str]], place: str
) -> None:
    """Refuse names of columns that no record has. The records are read only until each column was
    seen, which is mostly the first one."""
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
