"""The fields of an error as JSON, for another process to raise the same error. Needs no torch."""

from typing import Any

from megatron_vlm.errors import NOT_GIVEN, MegatronVLMError, show_choices, show_value


class ShownValue(str):
    """A value of which only the text that a message shows has arrived."""

    def __repr__(self) -> str:
        return str(self)  # a message shows it again as it is


def error_to_json(error: BaseException) -> dict[str, Any]:
    """The fields, for `error_from_json`; of an error of another kind, its text. What JSON cannot
    hold is sent as a message shows it."""
    if not isinstance(error, MegatronVLMError):
        return {"problem": str(error)}
    fields = error.fields()
    found, allowed = fields.pop("found"), fields["allowed"]
    if isinstance(found, ShownValue) or not _is_plain(found):
        fields |= {} if found is NOT_GIVEN else {"shown": show_value(found)}
    else:
        fields["found"] = found
    if not _is_plain(allowed):
        fields["allowed"] = show_choices(allowed)
    return fields


def error_from_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of an error that has the same message."""
    arguments = dict(fields)
    if "shown" in arguments:
        arguments["found"] = ShownValue(arguments.pop("shown"))
    return arguments


def _is_plain(value: Any) -> bool:
    """Whether JSON returns a value that a message shows in the same way."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)
