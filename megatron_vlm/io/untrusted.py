"""Files from outside: others wrote them, or they may have been changed since. They are opened and
parsed here, within bounds of size and depth. Any failure of a parser, here or in a library, reaches
users as an error of this package, with the file, the field, the reason and the remedy."""

import json
import math
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron_vlm.errors import ConfigError, DataError, MegatronVLMError

MAX_FILE_BYTES = 2**28  # limit for a file that is read at once
# A value of JSON takes up to 200 bytes of memory, and may take only 3 bytes of the file.
MAX_JSON_VALUES = 2**22
# Deeper values end in RecursionError somewhere, in code that walks through them.
MAX_JSON_DEPTH = 100
_NESTING = (Mapping, list, tuple)
_LONGEST = 300  # characters of a reason
_PANIC = "PanicException"  # raised by libraries in Rust; not an Exception


@dataclass(frozen=True)
class UntrustedFile:
    """A file from outside, or a place in one: its name, the type of its errors, the remedy."""

    name: str
    kind: type[MegatronVLMError] = DataError
    remedy: str = ""

    def error(self, problem: str = "", **fields: Any) -> MegatronVLMError:
        """Make the error of this kind that names the file and the remedy."""
        return self.kind(problem, **{"place": self.name, "remedy": self.remedy} | fields)

    @contextmanager
    def wrap_errors(self, doing: str) -> Iterator[None]:
        """Turn any error of a library into one of this kind. `doing` begins the reason."""
        try:
            yield
        except MegatronVLMError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise self.error(f"{doing}: {reason(error)}") from error

    def regular_path(self) -> Path:
        """Return the path of the regular file with this name."""
        try:
            return require_file(self.name)
        except DataError as error:
            remedy = self.remedy or error.remedy
            raise self.kind(**error.fields() | {"remedy": remedy}) from error

    def content(self, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of the regular file with this name."""
        data = self.read_beginning(max_bytes + 1)
        if len(data) > max_bytes:
            raise self.error(f"has more than {max_bytes:,} bytes, which cannot be right")
        return data

    def read_beginning(self, max_bytes: int) -> bytes:
        """Return the first bytes of the regular file with this name."""
        path = self.regular_path()
        with self.wrap_errors("cannot be read"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(min(size + 1, max_bytes))  # read allocates as much as it may return

    def text(self, max_bytes: int = MAX_FILE_BYTES) -> str:
        """Return the text of the file, which is UTF-8."""
        try:
            return self.content(max_bytes).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(f"is not UTF-8 text, at byte {error.start}") from error

    def json(self, max_bytes: int = MAX_FILE_BYTES) -> "JsonField":
        """Parse the JSON in the file."""
        return JsonField(self.parse(self.content(max_bytes)), "", self)

    def parse(
        self, text: str | bytes, fault: str = "is not JSON", most_values: int = MAX_JSON_VALUES
    ) -> Any:
        """Parse a JSON text. A name that occurs twice in an object is refused: one of its values
        would be left out. `fault`: the problem of a text that is not JSON."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        opened = raw.count(b"[") + raw.count(b"{")
        if (values := opened + raw.count(b",")) > most_values:
            raise self.error(
                f"has about {values} values in one record, above the limit of {most_values}"
            )
        try:
            value = json.loads(text, object_pairs_hook=_unique_pairs)
        except ValueError as error:
            raise self.error(f"{fault}: {_shorten(str(error))}") from error
        except RecursionError:
            raise self.depth_error() from None
        if opened > MAX_JSON_DEPTH and is_too_deep(value):
            raise self.depth_error()
        return value

    def depth_error(self) -> MegatronVLMError:
        """Make the error of a value with too many levels."""
        return self.error(
            f"has JSON that is nested too deeply, in more than {MAX_JSON_DEPTH} levels"
        )


def path_remedy(path: str) -> str:
    """Return the remedy for a path at which there is nothing."""
    if "\\" in path:
        return f"separate folders by /, as in {path.replace(chr(92), '/')}"
    return "" if os.path.isabs(path) else f"a relative path begins in this folder, {os.getcwd()}"


def no_file_error(path: str, key: str = "") -> ConfigError:
    """Make the error of a path at which there is nothing."""
    named = {"key": key, "found": path} if key else {"place": path}
    return ConfigError(": there is no such file or folder", remedy=path_remedy(path), **named)


@dataclass(frozen=True)
class JsonField:
    """A value in a JSON file, with the names that lead to it."""

    value: Any
    name: str
    file: UntrustedFile

    def error(self, expected: str) -> MegatronVLMError:
        """Make the error of a value that is not the expected one."""
        problem = f"is not {expected}"
        if not self.name:
            problem = f": its content is {reprlib.repr(self.value)}, not {expected}"
        return self.file.error(problem, key=self.name, found=self.value, allowed=expected)

    def object(self) -> "dict[str, JsonField]":
        """Return the fields of an object."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        before = f"{self.name}." if self.name else ""
        return {key: JsonField(value, before + key, self.file) for key, value in self.value.items()}

    def get(self, key: str) -> "JsonField | None":
        """Return a field of an object; None where it is absent or null."""
        field = self.object().get(key)
        return None if field is None or field.value is None else field

    def __getitem__(self, key: str) -> "JsonField":
        field = self.object().get(key)
        if field is None:
            raise self.file.error("is missing", key=f"{self.name}.{key}" if self.name else key)
        return field

    def items(self) -> "list[JsonField]":
        """Return the values of a list."""
        if not isinstance(self.value, list):
            raise self.error("a list")
        return [
            JsonField(value, f"{self.name}[{i}]", self.file) for i, value in enumerate(self.value)
        ]

    def whole(self, minimum: int = 0, maximum: int = 2**63 - 1) -> int:
        """Return a whole number; true and 1.0 are refused."""
        if type(self.value) is not int or not minimum <= self.value <= maximum:
            raise self.error(f"a whole number from {minimum} to {maximum}")
        return int(self.value)

    def number(self, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """Return a finite number, whole or not, just as it was written."""
        value = self.value
        if type(value) not in (int, float) or not (
            abs(value) < 1e308 and minimum <= value <= maximum
        ):
            bounds = "" if minimum == -math.inf else f" from {minimum:g} to {maximum:g}"
            raise self.error(f"a finite number{bounds}")
        return value

    def string(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("text")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def read(self, kind: Any) -> Any:
        """Return a value of this type: a dataclass, a tuple or a dict of values, a text, a number,
        or a flag. Null stands for the default of a dataclass's field."""
        if isinstance(kind, type) and is_dataclass(kind):
            needed = {item.name for item in fields(kind) if item.default is MISSING}
            types = get_type_hints(kind)
            names = [name for name in types if name in needed or self.get(name) is not None]
            return kind(**{name: self[name].read(types[name]) for name in names})
        part, *_ = get_args(kind) or (None,)
        if get_origin(kind) is tuple:
            return tuple(each.read(part) for each in self.items())
        if get_origin(kind) is dict:
            return {key: each.read(get_args(kind)[1]) for key, each in self.object().items()}
        readers = {int: self.whole, float: lambda: float(self.number()), bool: self.flag}
        return readers.get(part or kind, self.string)()


def reason(error: BaseException) -> str:
    """Return the message of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = " ".join(str(error).split())
    return _shorten(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested in more than MAX_JSON_DEPTH levels."""
    level: list[Any] = [[value]]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner = chain(*(each.values() if isinstance(each, Mapping) else each for each in level))
        nested = {id(each): each for each in inner if isinstance(each, _NESTING)}  # none twice
        level = list(nested.values())
    return bool(level)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, and refuse a name that comes twice: the last value would win silently."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = Counter(key for key, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0][:80]!r} occurs twice in an object")
    return fields


# Users and their data name these paths. Only regular files are opened.
#
# Opening a named pipe waits until a process writes into it, and a device may never end.

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def what_is_at(path: str | Path) -> str:
    """Return `a file`, `a folder`, `a named pipe`, `nothing` or the like; links are followed. Raise
    OSError or ValueError where no such path can exist."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "something else")
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"


def real_path(path: str | Path) -> Path:
    """Return the absolute path without links. For links in a circle it is one of them, and opening
    it raises OSError; Path.resolve would raise RuntimeError."""
    return Path(os.path.realpath(path))


def home_path(path: str | Path) -> Path:
    """Return the path with a leading ~ replaced. For a user who does not exist the path stays as it
    is, where Path.expanduser would raise RuntimeError."""
    return Path(os.path.expanduser(path))


def require_file(path: str | Path) -> Path:
    """Return the path of a regular file; anything else is refused before it is opened."""
    try:
        kind = what_is_at(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", place=str(path)) from error
    if kind == "nothing":
        lost = ": it is a link that leads nowhere" if os.path.islink(path) else ""
        raise DataError(f"does not exist{lost}", place=str(path))
    if kind != "a file":
        raise DataError(
            f"is {kind}, and only files are read", place=str(path), remedy="give a file"
        )
    return Path(path)


def require_files_in(folder: str | Path) -> None:
    """Refuse a folder that holds anything but files and folders, however deep."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            try:
                kind = what_is_at(path)
            except OSError as error:  # a loop of links
                raise DataError(
                    f"cannot be read: {error.strerror}", place=str(path), remedy="remove it"
                ) from error
            if kind not in ("a file", "a folder", "nothing"):
                raise DataError(
                    f"is {kind}, and only files are read", place=str(path), remedy="remove it"
                )
