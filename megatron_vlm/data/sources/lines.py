"""Lines of JSON: where each lies in a file, and its record, within bounds of memory."""

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import Outside

# One record, with the images that it may hold as base64. A few KB can unpack to gigabytes.
MAX_RECORD = 256 * 2**20  # bytes
_BLOCK = 2**22
_SHORT = 8  # bytes; longer lines are not looked through for something that is not blank
_IS_BLANK = np.isin(np.arange(256), list(b" \t\r\n\v\f"))


def parse_json(text: str | bytes, where: str, what: str = "a line of JSON") -> Any:
    """Parse a JSON text; raise a DataError at `where` if it is not JSON, or too much."""
    check_size(len(text), where)
    return Outside(where, remedy="mend the record or drop it").parsed(text, f"is not {what}")


def check_size(size: int, where: str) -> None:
    """Refuse a record of more than MAX_RECORD bytes."""
    if size > MAX_RECORD:
        raise too_large(where)


def too_large(where: str) -> DataError:
    """Make the error of a record that is too large."""
    return DataError(
        f"is larger than {MAX_RECORD // 2**20} MiB",
        place=where,
        remedy="split it, or give its images as files",
    )


def scan_lines(path: str, hasher: Any) -> tuple[np.ndarray, np.ndarray]:
    """The [start, end) of each line that is not blank, and its number, from 1."""
    spans, numbers = [], []
    offset, line = 0, 1
    with open(path, "rb") as file:
        start = 3 if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(0)
        before = b""  # the last bytes of the block before
        while block := file.read(_BLOCK):
            hasher.update(block)
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + offset
            if len(ends):
                found = np.stack([np.concatenate([[start], ends[:-1] + 1]), ends], axis=1)
                keep = _not_blank(found, before + block, offset - len(before))
                spans.append(found[keep])
                numbers.append(np.flatnonzero(keep) + line)
                start, line = int(ends[-1]) + 1, line + len(ends)
            before, offset = (before + block)[-_SHORT:], offset + len(block)
    last = np.array([[start, offset]])
    if offset > start and _not_blank(last, before, offset - len(before))[0]:
        spans.append(last)
        numbers.append(np.array([line]))
    if not spans:
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    return np.concatenate(spans), np.concatenate(numbers)


def _not_blank(spans: np.ndarray, content: bytes, offset: int) -> np.ndarray:
    """Which lines hold more than white space; `content` starts at `offset` of the file."""
    keep: np.ndarray = spans[:, 1] > spans[:, 0]
    short = np.flatnonzero(keep & (spans[:, 1] - spans[:, 0] < _SHORT))
    if len(short):
        marks = ~_IS_BLANK[np.frombuffer(content, dtype=np.uint8)]
        counts = np.concatenate([[0], np.cumsum(marks, dtype=np.int32)])
        starts, ends = (spans[short] - offset).T
        keep[short] = counts[ends] > counts[starts]
    return keep


def iter_lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Every line of a file that comes in blocks, None for one that is too large. Never more than a
    record and a block are held."""
    held, too_large = bytearray(), False
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for piece in whole:
            held += piece
            yield None if too_large or len(held) > MAX_RECORD else bytes(held)
            held, too_large = bytearray(), False
        held += rest
        if len(held) > MAX_RECORD:
            held, too_large = bytearray(), True
    if held or too_large:
        yield None if too_large else bytes(held)
