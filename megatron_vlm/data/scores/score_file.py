"""Files of scores, one for each chunk of a data set, as `megatron-vlm score` writes them.

A record is found by the digest of its content, and by that of its sample: its tokens, and which of
them are supervised. One checksum covers the columns, which are read at once. Each record has its
own, which is verified whenever the record is read.

Shapes: N supervised tokens of a record, J the model's most likely tokens of each, R the J + 1
events: these tokens, and all others together.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.io.atomic import replaced_file
from megatron_vlm.io.untrusted import UntrustedFile, require_file

_REMEDY = "delete the file and run megatron-vlm score again, which computes it anew"
_COLUMNS = ("numbers", "digests", "sample_digests", "tokens", "ends", "checksums")
_VALUES = ("positions", "ids", "log_probs")
_TOP = ("top_ids", "top_log_probs")


@dataclass(frozen=True)
class RecordScore:
    """The score of a record: of each supervised token its place in the sample, its id and its
    log-prob, and the most likely tokens with the log-probs of these and of all others."""

    number: int  # place of the sample in its data set
    digest: int  # digest of the record's content
    sample_digest: int
    tokens: int  # number of tokens of the sample
    where: str  # place of the record, for people
    positions_N: np.ndarray  # int32
    ids_N: np.ndarray  # int32
    log_probs_N: np.ndarray  # float32
    top_ids_NJ: np.ndarray | None = None  # int32
    top_log_probs_NR: np.ndarray | None = None  # float32

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """The values of the supervised tokens, in the order of the tensors of a file."""
        plain = (self.positions_N, self.ids_N, self.log_probs_N)
        if self.top_ids_NJ is None or self.top_log_probs_NR is None:
            return plain
        return (*plain, self.top_ids_NJ, self.top_log_probs_NR)


def digest_sample(sample: Sample) -> int:
    """Return a signed number of 64 bits for a sample's tokens and which of them are supervised."""
    hasher = hashlib.blake2b(sample.ids_S.astype("<i4").tobytes(), digest_size=8)
    hasher.update(supervised_positions(sample).astype("<i4").tobytes())
    return int.from_bytes(hasher.digest(), "big", signed=True)


def supervised_positions(sample: Sample) -> np.ndarray:
    """Return the places of the supervised tokens. The first token is none: nothing predicts it."""
    return (np.flatnonzero(sample.trained_S[1:]) + 1).astype(np.int32)


def save_scores(path: Path, records: Sequence[RecordScore]) -> None:
    """Write a file under a temporary name first, so that it appears whole or not at all."""
    ends = np.cumsum([len(record.ids_N) for record in records], dtype=np.int64)
    columns = {
        "numbers": np.array([record.number for record in records], dtype=np.int64),
        "digests": np.array([record.digest for record in records], dtype=np.int64),
        "sample_digests": np.array([record.sample_digest for record in records], dtype=np.int64),
        "tokens": np.array([record.tokens for record in records], dtype=np.int64),
        "ends": ends,
        "checksums": np.array([checksum_of(record.values) for record in records], dtype=np.int64),
    }
    names = (*_VALUES, *_TOP)[: len(records[0].values) if records else len(_VALUES)]
    parts = zip(*(record.values for record in records), strict=True)
    values = {name: np.concatenate(part) for name, part in zip(names, parts, strict=False)}
    metadata = {"where": json.dumps([record.where for record in records])}
    metadata["checksum"] = _checksum_of_columns(columns, values, metadata["where"])
    with replaced_file(path, is_synced=True) as new:
        save_file(columns | values, new, metadata)


@dataclass(frozen=True)
class ScoreFile:
    """A file that `save_scores` has written, and the columns with an entry for each record."""

    path: Path
    columns: Mapping[str, np.ndarray]
    where: tuple[str, ...]
    top_k: int  # stored tokens of each supervised token

    @staticmethod
    def open(path: Path) -> "ScoreFile":
        """Open a file. Raise a DataError if it is not as it was written."""
        outside = UntrustedFile(str(path), remedy=_REMEDY)
        outside.regular_path()
        require_file(path)
        with outside.wrap_errors("the file is damaged"), safe_open(path, "np") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            columns = {name: file.get_tensor(name) for name in _COLUMNS}
            values = {name: shape for name, shape in shapes.items() if name not in _COLUMNS}
            metadata = file.metadata()
            if metadata["checksum"] != _checksum_of_columns(columns, values, metadata["where"]):
                raise ValueError("its checksum is another than when it was written")
            where = tuple(outside.parse(metadata["where"]))
            top_k = shapes[_TOP[0]][1] if _TOP[0] in names else 0
        return ScoreFile(path, columns, where, top_k)

    def __len__(self) -> int:
        return len(self.where)

    @property
    def counts(self) -> np.ndarray:
        """Numbers of supervised tokens of the records."""
        return np.diff(self.columns["ends"], prepend=0)

    def record(self, place: int) -> RecordScore:
        """Read a record. Raise a DataError if it is not as it was written."""
        outside = UntrustedFile(str(self.path), remedy=_REMEDY)
        with outside.wrap_errors("the file is damaged"), safe_open(self.path, "np") as file:
            values = self._values(file, place)
        number, digest, sample_digest, tokens = (
            int(self.columns[name][place]) for name in _COLUMNS[:4]
        )
        where = self.where[place]
        return RecordScore(number, digest, sample_digest, tokens, where, *values)

    def _values(self, file: Any, place: int) -> list[np.ndarray]:
        """Read the values of a record from the opened file."""
        ends = self.columns["ends"]
        span = slice(int(ends[place - 1]) if place else 0, int(ends[place]))
        names = (*_VALUES, *_TOP) if self.top_k else _VALUES
        values = [file.get_slice(name)[span] for name in names]
        if checksum_of(values) != self.columns["checksums"][place]:
            raise ValueError(f"the checksum of record {place} is another than when written")
        return values

    def sums(self) -> np.ndarray:
        """Read the sum of the log-probs of each record, in float64. Raise a DataError if a record
        is not as it was written."""
        outside = UntrustedFile(str(self.path), remedy=_REMEDY)
        with outside.wrap_errors("the file is damaged"), safe_open(self.path, "np") as file:
            log_probs = [self._values(file, place)[2] for place in range(len(self))]
        return np.array([values.sum(dtype=np.float64) for values in log_probs])

    def log_probs(self) -> list[np.ndarray]:
        """Read the log-probs of all records."""
        outside = UntrustedFile(str(self.path), remedy=_REMEDY)
        with outside.wrap_errors("the file is damaged"), safe_open(self.path, "np") as file:
            if not len(self):
                return []
            return np.split(file.get_tensor("log_probs"), self.columns["ends"][:-1])


def checksum_of(values: Iterable[np.ndarray]) -> int:
    """Return a checksum of the types, shapes and contents of arrays."""
    checksum = 0
    for value in values:
        described = f"{value.dtype.str}{value.shape}".encode()
        checksum = zlib.crc32(np.ascontiguousarray(value).data, zlib.crc32(described, checksum))
    return checksum


def _checksum_of_columns(
    columns: Mapping[str, np.ndarray], values: Mapping[str, Any], where: str
) -> str:
    """Return a checksum of everything that the records' own checksums do not cover. Of values, only
    the shapes count."""
    shapes = {name: tuple(getattr(value, "shape", value)) for name, value in values.items()}
    described = repr((sorted(shapes.items()), where)).encode()
    parts = [np.frombuffer(described, dtype=np.uint8), *(columns[name] for name in _COLUMNS)]
    return str(checksum_of(parts))
