"""Valid files with mutations: bytes are flipped, cut and inserted; JSON gets other types, names,
depths and numbers. The same seed gives the same content."""

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

DEEP = "[" * 100_000  # more levels than any recursion reaches
# These values may replace the right value at a place in JSON.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "a", "0", "true", "\x00", "\ud800", "\U0001f600", "../../etc/passwd", "/dev/zero"),
    *("<image>", "<|im_end|>", "file://[x", "http://[::1", "data:image/png;base64,", "%s" * 40),
    *([], [[]], [None], [0], ["a"], [-1, -1], {}, {"": {}}, {"a": None}, [{}], [[1, 2], "a"]),
    *([0] * 300, "a" * 3000, {str(i): i for i in range(300)}),
]
_NUMBERS = [b"0", b"-1", b"1e999", b"9" * 30, b"9" * 5000, b"NaN", b"0.5", b"99999999"]
_TOKENS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\n", b"\r", b"\x00", b"null"]


def nested(depth: int) -> Any:
    value: Any = "a"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one to three changes at random places."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        content = chance.choice(_CHANGES)(content, chance)
    return content


def _flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return content
    place = chance.randrange(len(content))
    value = chance.choice([0, 0x7F, 0xFF, content[place] ^ 1 << chance.randrange(8)])
    return content[:place] + bytes([value]) + content[place + 1 :]


def _flip_in_header(content: bytes, chance: random.Random) -> bytes:
    return _flip(content[:256], chance) + content[256:]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _remove(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + content[place + chance.randrange(1, 64) :]


def _repeat(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    piece = content[place : place + chance.randrange(1, 256)]
    return content[:place] + piece * chance.randrange(2, 9) + content[place + len(piece) :]


def _insert(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    piece = chance.choice(
        [
            chance.randbytes(chance.randrange(1, 16)),
            chance.choice(_TOKENS) * chance.choice([1, 1, 1, 3000]),
            b"\xff\xfe\xc3\x28",
        ]
    )
    return content[:place] + piece + content[place:]


def _number(content: bytes, chance: random.Random) -> bytes:
    """Put another number in place of a digit, or of four bytes."""
    places = [i for i in range(len(content)) if content[i : i + 1].isdigit()]
    if places and chance.random() < 0.7:
        place = chance.choice(places)
        return content[:place] + chance.choice(_NUMBERS) + content[place + 1 :]
    place = chance.randrange(len(content) + 1)
    value = chance.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1]).to_bytes(4, "little")
    return content[:place] + value + content[place + 4 :]


_CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(_flip, _flip, _flip_in_header, _cut, _remove, _repeat, _insert, _number)
]


def mutate_json(value: Any, chance: random.Random) -> bytes:
    """Return the text of a JSON value with one to three changes. One time in four the bytes of the
    text are changed instead."""
    value = copy.deepcopy(value)
    if chance.random() < 0.25:
        return mutate_bytes(json.dumps(value).encode(), chance)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = _changed(value, chance)
    text = json.dumps(value)
    if chance.random() < 0.05:
        text = text.replace('{"', '{"' + chance.choice(["a", "x" * 9]) + '": 1, "', 1)
    if chance.random() < 0.05 and isinstance(value, dict) and value:  # a repeated name
        name = json.dumps(chance.choice(list(value)))
        text = text[:-1] + f", {name}: {json.dumps(chance.choice(VALUES))}}}"
    if chance.random() < 0.03:
        place = text.find(": ", chance.randrange(len(text)))
        text = text[: place + 2] + DEEP + text[place + 2 :]
    return text.encode("utf-8", "surrogatepass")


def mutate_value(value: Any, chance: random.Random) -> Any:
    """Return the value with one to three changes, for code that takes values instead of text."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = _changed(value, chance)
    return value


def _changed(value: Any, chance: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return chance.choice(VALUES)
    owner, key = chance.choice(places)
    kind = chance.randrange(10)
    if kind < 5:
        owner[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind == 5:
        del owner[key]
    elif kind == 6:
        other, place = chance.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            owner[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(owner[key])
    elif kind == 7:
        owner[key] = nested(chance.choice([3, 20, 400]))
    elif kind == 8 and isinstance(owner, dict):
        owner[chance.choice(["a", "", "images", "type", "content", key.upper()])] = owner.pop(key)
    else:
        owner[key] = [owner[key]] if chance.random() < 0.5 else {"a": owner[key]}
    return value


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a nested value: the container, and the key or index in it."""
    if depth > 40:
        return
    keys: Iterable[Any] = value if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    for key in keys:
        yield value, key
        yield from _places(value[key], depth + 1)
