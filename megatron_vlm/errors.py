"""Errors that a user can cause. An error holds its facts in fields, and only `render` turns them
into a sentence, so that all messages have one form and tests can check the facts."""

import errno
import importlib.util
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from megatron_vlm.secret_text import HIDDEN, hide_secrets, is_secret

NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda _: "NOT_GIVEN"})()
_LONG = 4096  # characters at either end of a text that are looked at
_BARE = re.compile(r"[\w./:+@~%,=\-\[\]]+", re.ASCII)  # text that needs no quotes


class _Repr(reprlib.Repr):
    """Shortened text of any value, in which texts have no secrets."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hide_secrets(x[:_LONG] + x[_LONG:][-_LONG:]), level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python prints no integer of more than 4300 digits
            return f"an integer of {x.bit_length()} bits"


_QUOTED = _Repr()
_QUOTED.maxstring = _QUOTED.maxother = 200
_QUOTED.maxlevel = 2


class MegatronVLMError(ValueError):
    """Base class of all errors that a user can correct.

    problem: predicate of the subject, such as "exceeds train.steps=5"; with a leading colon it is
        a complete clause, such as ": the model has no experts"
    place: record, file or call where it happened, such as "train.jsonl line 3" or "optim_step"
    key: configuration key, or field at that place, such as "parallel.tp" or "messages[0].role"
    found: value that the key has
    allowed: values that the key may have: a range, several choices, or a phrase
    remedy: what to do about it, in the imperative; by default "give ALLOWED"
    further: errors of the same kind that were found together with this one; a copy is without them
    """

    further: tuple["MegatronVLMError", ...] = ()

    def __init__(
        self,
        problem: str = "",
        *,
        place: str = "",
        key: str = "",
        found: Any = NOT_GIVEN,
        allowed: Any = None,
        remedy: str = "",
    ) -> None:
        self.problem, self.place, self.key, self.found = problem, place, key, found
        self.allowed, self.remedy = allowed, remedy
        super().__init__(render(**self.fields()))

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal error."""
        names = ("problem", "place", "key", "found", "allowed", "remedy")
        return {name: vars(self)[name] for name in names}

    def within(self, place: str) -> Self:
        """Return the same error, at a place that contains its place."""
        inner = self.place and f": {self.place}"
        return type(self)(**self.fields() | {"place": place + inner})

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.fields()
        if self.found is NOT_GIVEN:  # pickle would copy the marker, which is compared by identity
            del fields["found"]
        return _make, (type(self), fields)


def _make(kind: type[MegatronVLMError], fields: dict[str, Any]) -> MegatronVLMError:
    return kind(**fields)


class ConfigError(MegatronVLMError):
    """A configuration that cannot work. It is detected before any weight is read."""


class DataError(MegatronVLMError):
    """A row or a batch that the model cannot take."""


class LostError(DataError):
    """A process that read data has ended, for example for its memory. Starting again may help."""


class CheckpointError(MegatronVLMError):
    """A checkpoint whose tensors are not the ones that this model needs."""


class TrainError(MegatronVLMError):
    """A run that cannot continue."""


def require_extra(
    extra: str, *modules: str, kind: type[MegatronVLMError] = ConfigError, **named: Any
) -> None:
    """Refuse what needs modules of an extra that is not installed. `named`: its key or place."""
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            remedy = f"run pip install 'megatron_vlm[{extra}]'"
            raise kind(f"needs the package {module}", remedy=remedy, **named)


@contextmanager
def within(place: str) -> Iterator[None]:
    """Put the errors of a block at a place that contains their own."""
    try:
        yield
    except MegatronVLMError as error:
        raise error.within(place) from error


def render(
    problem: str = "",
    *,
    place: str = "",
    key: str = "",
    found: Any = NOT_GIVEN,
    allowed: Any = None,
    remedy: str = "",
) -> str:
    """Return the sentence `PLACE: KEY=FOUND PROBLEM; REMEDY`, without missing parts."""
    subject = key if found is NOT_GIVEN else f"{key}={show_value(found, key)}" if key else ""
    if subject and problem:
        subject += problem if problem.startswith(":") else f" {problem}"
    clause = subject or problem.removeprefix(":").lstrip()
    if not remedy and allowed is not None:
        remedy = f"give {show_choices(allowed)}"
    return "; ".join(filter(None, (": ".join(filter(None, (place, clause))), remedy)))


def show_value(value: Any, key: str = "") -> str:
    """Return the value of a key as a configuration writes it. Text of several words is quoted and
    shortened, and secrets are hidden."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if is_secret(key):
        return HIDDEN
    if isinstance(value, str):
        is_bare = len(value) <= 200 and _BARE.fullmatch(value)
        return hide_secrets(value if is_bare else _QUOTED.repr(value))
    is_short = isinstance(value, list | tuple) and len(value) <= 20
    if is_short and not any(isinstance(each, list | tuple) for each in value):
        return hide_secrets(f"[{','.join(map(show_value, value))}]")
    return hide_secrets(_QUOTED.repr(value))


def show_choices(allowed: Any) -> str:
    """Return choices as a phrase: `1, 2 or 4`, or `from 1 to 8` for a range."""
    if isinstance(allowed, range):
        return f"from {allowed[0]} to {allowed[-1]}"
    if isinstance(allowed, str) or not isinstance(allowed, Iterable):
        return allowed if isinstance(allowed, str) else show_value(allowed)
    ordered = isinstance(allowed, list | tuple | Mapping)
    choices = [show_value(choice) for choice in (allowed if ordered else sorted(allowed))]
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


# The disk or its owner can refuse any access. These errors are no faults of the program.
_REFUSALS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "allow larger files there",
    errno.EROFS: "give a folder that can be written to",
    errno.EACCES: "change its permissions, or give another folder",
    errno.EPERM: "change its permissions, or give another folder",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "it is one of links in a circle: remove them",
    errno.EIO: "the disk or the network that it is on has failed",
    errno.ESTALE: "the server of this folder has replaced or removed it",
}


def gather_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Return the first of these errors with the others as `further`, so that all are shown."""
    first, *further = errors
    first.further = tuple(further)
    first.args = ("\n".join(str(error) for error in errors),)
    return first


def error_line(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def sentences(error: Exception) -> list[str]:
    """Return a sentence for each mistake of a user; nothing for a fault of the program."""
    if isinstance(error, MegatronVLMError):
        return [render(**each.fields()) for each in (error, *error.further)]
    if isinstance(error, OSError) and (remedy := _REFUSALS.get(error.errno or 0)) is not None:
        file = "a file" if error.filename is None else os.fsdecode(error.filename)
        why = os.strerror(error.errno or 0)
        return [f"{file} cannot be used: {why}; {remedy}, and start again"]
    return []
