"""CSV and TSV files, as Python's strict CSV reader takes them: one row is a record, and the first
row has the names of the columns. Every value stays text."""

import codecs
import csv
from collections.abc import Iterable, Iterator, Sequence

from megatron_vlm.data.sources.text_files import MAX_RECORD, iter_lines, too_large_error
from megatron_vlm.errors import DataError

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
