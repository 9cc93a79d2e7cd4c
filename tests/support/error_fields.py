"""An assertion about the fields of an error, instead of the words of its message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_vlm.errors import MegatronVLMError


@contextmanager
def raises(kind: type[MegatronVLMError], **fields: Any) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of exactly this class whose fields have these values. If a name ends in
    `_has`, the text of that field must contain the value: `remedy_has="parallel.pp"`."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, repr(error)
    for name, expected in fields.items():
        if name.endswith("_has"):
            text = str(error.fields()[name.removesuffix("_has")])
            assert str(expected) in text, f"{name}={expected!r}, and it is {text!r}"
        else:
            actual = error.fields()[name]
            assert actual == expected, f"{name}: expected {expected!r}, got {actual!r}"


def at(
    inside: str = "", key: str | None = None, has: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the fields of an error in the record a:7, or at a place inside it, whose problem has
    these words."""
    named = {
        name: value for name, value in (("key", key), ("problem_has", has)) if value is not None
    }
    return {"place": f"a:7: {inside}" if inside else "a:7", **named, **fields}
