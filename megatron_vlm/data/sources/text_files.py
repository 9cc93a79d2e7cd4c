"""Files as bytes: their digests, their unpacked content, and their lines. Of CSV and TSV files, as
Python's strict CSV reader takes them, one row is a record, and the first row has the names of the
columns. Every value stays text."""

import codecs
import csv
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import replaced_file, scratch_folder
from megatron_vlm.io.untrusted import UntrustedFile, require_file

_log = logging.getLogger("megatron_vlm.data")

_WHOLE_DIGEST = 2**30  # larger files are digested in samples
_SAMPLE = 2**20
# Text of chats unpacks to 3 to 20 times its size; a bomb, to 1000 times and more.
MAX_RATIO = 200
_ALWAYS = 64 * 2**20  # bytes that any file may unpack to


def file_digest(path: str) -> str:
    """Return a digest of a file's content or, if it is large, of its size, time and samples."""
    stat = os.stat(path)
    hasher = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        if stat.st_size <= _WHOLE_DIGEST:
            return hashlib.file_digest(file, lambda: hasher).hexdigest()
        hasher.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for start in np.linspace(0, stat.st_size - _SAMPLE, 64).astype(int).tolist():
            file.seek(start)
            hasher.update(file.read(_SAMPLE))
    return hasher.hexdigest()


def name_of_files(paths: Sequence[str]) -> str:
    """Return the name of a source of these files."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def suffix_of(path: str) -> str:
    """Return the suffix of a file's name, with the one before it for a packed file."""
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:]) if path.endswith((".gz", ".zst")) else Path(path).suffix


def unpacked_suffix(path: str) -> str:
    """Return the suffix of a file once it is unpacked."""
    return suffix_of(path).removesuffix(".gz").removesuffix(".zst")


def unpacked_path(path: str, cache: Path | None) -> str:
    """Return the path of a file without packing: it is unpacked into the cache, to seek in it."""
    if not path.endswith((".gz", ".zst")):
        return path
    if cache is None:
        raise ConfigError(
            f": {path} is unpacked into it",
            key="data.cache_dir",
            found=None,
            remedy="set it, or unpack the file yourself",
        )
    target = cache / "unpacked" / f"{file_digest(path)}.jsonl"
    if _is_as_unpacked(target):
        return str(target)
    try:
        return _unpack(path, target)
    except OSError as error:
        _log.warning("continuing without data.cache_dir: %s cannot be written: %s", target, error)
    target = scratch_folder() / target.name
    try:
        return _unpack(path, target)
    except OSError as error:
        raise DataError(
            f"is unpacked into {target}, which cannot be written: {error}",
            place=path,
            remedy="free space there, set TMPDIR to another folder, or unpack it yourself",
        ) from error


def _unpack(path: str, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(target) as new, new.open("wb") as plain:
        plain.writelines(content_of(path))
    with replaced_file(target.with_suffix(".digest")) as new:  # as the file was when written
        new.write_text(file_digest(str(target)))
    return str(target)


def _is_as_unpacked(target: Path) -> bool:
    """Return whether the cache has an unpacked file, and its content is that of its digest."""
    try:
        digest = UntrustedFile(str(target.with_suffix(".digest"))).text()
        return digest == file_digest(str(require_file(target)))
    except (DataError, OSError):
        return False


def content_of(path: str) -> Iterator[bytes]:
    """Yield the content of a file in blocks. The file may be compressed, as its suffix says. Raise
    a DataError where it is cut off, or where it unpacks to more than can be right."""
    num_bytes = 0
    try:
        # Arrow reads the file: the readers of gzip and zstandard accept a truncated zst in silence.
        size, file, packing = _opened(path)
        max_bytes = max(_ALWAYS, MAX_RATIO * size)
        with pyarrow.input_stream(file, packing) as stream:
            while num_bytes <= max_bytes and (block := stream.read(_SAMPLE)):
                num_bytes += len(block)
                yield block
    except Exception as error:  # each library raises its own
        raise DataError(
            f"cannot be unpacked: {error}", place=path, remedy="check that it is complete"
        ) from error
    if num_bytes > max_bytes:
        raise DataError(
            f"unpacks to more than {max_bytes // 2**20} MiB, {MAX_RATIO} times its size or more",
            place=path,
            remedy="if that is right, unpack it yourself",
        )


def _opened(path: str) -> tuple[int, Any, str | None]:
    """Return the size of a file here or on the Hub, what Arrow opens, and how it is packed."""
    if not path.startswith("hf://"):
        return os.path.getsize(path), path, "detect"
    from huggingface_hub import HfFileSystem

    system = HfFileSystem()
    packing = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1])
    return system.info(path)["size"], system.open(path, "rb", block_size=0), packing


def refuse_utf_16(path: str, name: str) -> None:
    """Refuse a file whose text is UTF-16, as some programs on Windows write it."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or start.count(0) == 1:
        remedy = "save it as UTF-8, such as by iconv -f UTF-16 -t UTF-8"
        raise DataError("is UTF-16 text", place=name, remedy=remedy)


def begins_list(content: bytes) -> bool:
    """Return whether the content of a file begins a list."""
    return content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def parse_list(content: bytes, path: str) -> Any:
    """Parse the list of records that a file holds. It may be as large as memory."""
    return UntrustedFile(path, remedy="mend the file").parse(content, most_values=len(content))


# A record may hold images as base64. A few KB can unpack to gigabytes.
MAX_RECORD = 256 * 2**20  # bytes


def parse_json(text: str | bytes, where: str, what: str = "a line of JSON") -> Any:
    """Parse a JSON text. Raise a DataError at `where` if it is not JSON, or exceeds a limit."""
    check_size(len(text), where)
    if what == "a line of JSON" and text[:9].strip() in ("{", "[", b"{", b"["):
        raise DataError(
            f"is not {what}: it goes on in the next lines",
            place=where,
            remedy="write each record in one line, as jq -c does, or give a list in a .json file",
        )
    return UntrustedFile(where, remedy="mend the record or drop it").parse(text, f"is not {what}")


def check_size(size: int, where: str) -> None:
    """Refuse a record of more than MAX_RECORD bytes."""
    if size > MAX_RECORD:
        raise too_large_error(where)


def too_large_error(where: str) -> DataError:
    """Make the error of a record that is too large."""
    return DataError(
        f"is larger than {MAX_RECORD // 2**20} MiB",
        place=where,
        remedy="split it, or give its images as files",
    )


def iter_lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield every line of a file that comes in blocks: its number, the place of its first byte, and
    its bytes, or None if it is too large. At most a record and a block are held in memory."""
    line, number, start, size = bytearray(), 1, 0, 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            yield number, start, None if size > MAX_RECORD else bytes(line) + piece
            number, start, size = number + 1, start + size + 1, 0
            line.clear()
        size += len(rest)
        line += rest if size <= MAX_RECORD else b""
    if size:
        yield number, start, None if size > MAX_RECORD else bytes(line)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
_NAMES = {",": "a comma", "\t": "a tab"}


def iter_rows(
    blocks: Iterable[bytes], name: str, delimiter: str
) -> Iterator[tuple[int, int, bytes]]:
    """Yield each row that is not blank, from the content of a file in blocks: its first line, the
    place of its first byte, and its bytes with a line end."""
    taken: list[bytes] = []  # lines of the current row

    def texts() -> Iterator[str]:
        for number, _, line in iter_lines(blocks):
            if line is None:
                raise too_large_error(f"{name}:{number}")
            taken.append(line + b"\n")
            # Every byte is a character here. Those that matter are ASCII, and no other character
            # of UTF-8 contains them.
            yield taken[-1].decode("latin-1")

    csv.field_size_limit(MAX_RECORD)
    reader, start = csv.reader(texts(), delimiter=delimiter, strict=True), 0
    while True:
        line = reader.line_num + 1
        taken.clear()
        try:
            next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"cannot be read as rows of cells from here on: {error}",
                place=f"{name}:{line}",
                remedy=_quote_remedy(delimiter),
            ) from error
        content = b"".join(taken)
        if content.strip(b" \r\n\v\f"):
            yield line, start, content
        start += len(content)


def parse_header(row: tuple[int, int, bytes] | None, name: str, delimiter: str) -> list[str]:
    """Return the names of the columns from the first row of a file."""
    if row is None:
        raise DataError("is empty; its first row must have the names of the columns", place=name)
    where = f"{name}:{row[0]}"
    cells = _cells_of(row[2].removeprefix(codecs.BOM_UTF8), delimiter, where)
    if len(cells) == 1 and any(other in cells[0] for other in ",;\t"):
        raise DataError(
            f"has a single column with the name {cells[0][:200]!r}",
            place=where,
            remedy=f"separate its cells by {_NAMES[delimiter]}; commas are for .csv, and tabs for "
            ".tsv",
        )
    # Tables of pandas have a column of row numbers without a name.
    header = [cell.strip() or f"Unnamed: {number}" for number, cell in enumerate(cells)]
    for cell in header:
        if header.count(cell) > 1:
            raise DataError(f"has two columns with the name {cell[:200]!r}", place=where)
    return header


def parse_row(content: bytes, header: Sequence[str], delimiter: str, where: str) -> dict[str, str]:
    """Return the cells of a row by the names of their columns."""
    cells = _cells_of(content, delimiter, where)
    if len(cells) != len(header):
        raise DataError(
            f"has {len(cells)} cells, and the first row names {len(header)} columns",
            place=where,
            remedy=_quote_remedy(delimiter),
        )
    return dict(zip(header, cells, strict=True))


def _cells_of(content: bytes, delimiter: str, where: str) -> list[str]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not UTF-8 text, at byte {error.start} of the row",
            place=where,
            remedy="save the file as UTF-8",
        ) from error
    return next(csv.reader([text], delimiter=delimiter, strict=True))


def _quote_remedy(delimiter: str) -> str:
    return (
        f"put cells with {_NAMES[delimiter]}, a line break or a double quote in double quotes, and "
        "write quotes within them twice"
    )
