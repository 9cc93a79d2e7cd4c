"""Fields of an error as JSON, so that another process can raise the same error. No torch."""

from typing import Any

from megatron_vlm.errors import NOT_GIVEN, MegatronVLMError, show_choices, show_value


class ShownValue(str):
    """Text of a value from another process, which could not send the value itself."""

    def __repr__(self) -> str:
        return str(self)  # a message shows the text unchanged


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return the fields for `error_from_json`, or only the text of an error that is not a
    MegatronVLMError. Values that JSON cannot hold are sent as a message shows them."""
    if not isinstance(error, MegatronVLMError):
        return {"problem": str(error)}
    fields = error.fields()
    value, choices = fields.pop("found"), fields["allowed"]
    if isinstance(value, ShownValue) or not _is_plain(value):
        fields |= {} if value is NOT_GIVEN else {"shown": show_value(value)}
    else:
        fields["found"] = value
    if not _is_plain(choices):
        fields["allowed"] = show_choices(choices)
    return fields


def error_from_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an error that has the same message."""
    arguments = dict(fields)
    if "shown" in arguments:
        arguments["found"] = ShownValue(arguments.pop("shown"))
    return arguments


def _is_plain(value: Any) -> bool:
    """Return whether a message shows the value in the same way after JSON."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)
