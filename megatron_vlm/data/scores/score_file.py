"""Files of scores, one for each chunk of a data set, as `megatron-vlm score` writes them; and the
scores of a folder, found by record, which are a reference's log-probs or a teacher's targets.

A record is found by the digest of its content, and by that of its sample: its tokens, and which of
them are supervised. One checksum covers the columns, which are read at once. Each record has its
own, which is verified whenever the record is read.

Shapes: N supervised tokens of a record, J the model's most likely tokens of each, R the J + 1
events: these tokens, and all others together.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from megatron_vlm.data.scores import score_index
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Sample
from megatron_vlm.errors import DataError
from megatron_vlm.io.atomic import replaced_file
from megatron_vlm.io.untrusted import UntrustedFile, home_path, require_file

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


_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
OTHER_SAMPLE = (
    "score it again with the settings of data.* that training has: the template, the limits, and "
    "what data.train_on supervises decide the tokens"
)


@dataclass(frozen=True)
class ScoreLookup:
    """The scores of a folder. `places` [scores, 2] are sorted by digest."""

    key: str  # key of the configuration that names the folder
    folder: str
    index: score_index.ScoreIndex
    files: tuple[ScoreFile, ...]
    digests: np.ndarray  # digests of the records of all scores, in rising order
    places: np.ndarray  # [scores, 2]: the file of each score, and its place there

    @staticmethod
    def open(
        key: str, folder: str, index: score_index.ScoreIndex, vocabulary: Mapping[str, int]
    ) -> "ScoreLookup":
        """Open a folder with this index, for a model with this vocabulary."""
        if index.vocabulary != score_index.digest_vocabulary(vocabulary):
            raise DataError(
                "was scored with another tokenizer: its tokens have other ids than those of "
                "model.path",
                key=key,
                found=folder,
                remedy="score the data with a model of the same family, and with the same "
                "data.add_tokens",
            )
        files = tuple(ScoreFile.open(home_path(folder) / name) for name in index.files)
        for file in files:
            if file.top_k != index.top_k:
                raise DataError(
                    f"stores {file.top_k} tokens of each place, and scores.json says {index.top_k}",
                    place=str(file.path),
                    key=key,
                    found=folder,
                    remedy="score the data again in a new folder",
                )
        digests = np.concatenate([file.columns["digests"] for file in files])
        counts = [len(file) for file in files]
        numbers = np.repeat(np.arange(len(files)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(digests, kind="stable")
        pairs = np.stack([numbers, places], axis=1)[order]
        return ScoreLookup(key, folder, index, files, digests[order], pairs)

    def spans(self, index: Index, where: Callable[[int], str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first place of each sample's scores, and the place after the last one. Refuse
        the first sample without scores. `where` names the place of a sample."""
        first, last = (np.searchsorted(self.digests, index.digests, side) for side in _SIDES)
        if len(missing := np.flatnonzero(first == last)):
            raise self.error(
                f"has no scores of {len(missing):,} of {len(index):,} samples; the first is "
                f"{where(int(missing[0]))}",
                "score these records, too: megatron-vlm score scores data.train and data.eval",
            )
        return first, last

    def find(self, digest: int, sample: Sample, where: str) -> tuple[int, int]:
        """Return the file of the record with this digest and these tokens, and the place there."""
        first, last = (int(np.searchsorted(self.digests, digest, side)) for side in _SIDES)
        wanted = digest_sample(sample)
        for number, place in self.places[first:last].tolist():
            if self.files[number].columns["sample_digests"][place] == wanted:
                return number, place
        problem = "other tokens of" if last > first else "no scores of"
        raise self.error(f"has {problem} {where}", OTHER_SAMPLE)

    def error(self, problem: str, remedy: str) -> DataError:
        """Return an error about the folder."""
        return DataError(problem, key=self.key, found=self.folder, remedy=remedy)


class ReferenceScores:
    """The log-probs of a folder."""

    def __init__(self, folder: str, vocabulary: Mapping[str, int]):
        """Open a folder for a model with this vocabulary."""
        key = "preference.reference"
        self.scores = ScoreLookup.open(
            key, folder, score_index.read_complete(key, folder), vocabulary
        )
        self.sums = [file.sums() for file in self.scores.files]  # log-prob of each answer

    def table(self, index: Index, where: Callable[[int], str]) -> np.ndarray:
        """Return the log-probs of the answers of each sample [samples, answers], and nan where a
        sample has fewer. Refuse a sample without scores, or with scores of other tokens. `where`
        names the place of a sample."""
        self.scores.spans(index, where)
        table = np.full((len(index), 2), np.nan)
        for number in range(len(index)):
            for row, sample in enumerate(index.example(number)):
                digest = int(index.digests[number])
                file, place = self.scores.find(digest, sample, where(number))
                table[number, row] = self.sums[file][place]
        return table


@dataclass(frozen=True)
class TeacherTargets:
    """The targets of a folder."""

    scores: ScoreLookup
    top_k: int  # tokens that a sample gets of those that are stored

    @staticmethod
    def open(folder: str, top_k: int | None, vocabulary: Mapping[str, int]) -> "TeacherTargets":
        """Open a folder for a student with this vocabulary, and `top_k` tokens of each place."""
        index = score_index.check_scores(folder, top_k)
        scores = ScoreLookup.open("teacher.path", folder, index, vocabulary)
        return TeacherTargets(scores, index.top_k if top_k is None else top_k)

    def check(self, index: Index, where: Callable[[int], str]) -> None:
        """Refuse the first sample of an index without targets, or with targets of another length.
        `where` names the place of a sample."""
        first, last = self.scores.spans(index, where)
        starts = np.cumsum([0, *map(len, self.scores.files)])[:-1]
        by_digest = starts[self.scores.places[:, 0]] + self.scores.places[:, 1]
        tokens, counts = (
            np.concatenate([getter(file) for file in self.scores.files])[by_digest]
            for getter in (lambda file: file.columns["tokens"], lambda file: file.counts)
        )
        # A digest may occur several times. Only the sample's own tokens tell these apart.
        is_other = (last - first == 1) & (
            (tokens[first] != index.tokens) | (counts[first] != index.supervised)
        )
        if len(wrong := np.flatnonzero(is_other)):
            place = int(wrong[0])
            at = first[place]
            raise self.scores.error(
                f"has scores of other tokens of {len(wrong):,} of {len(index):,} samples; the "
                f"first is {where(place)}, which has {int(index.tokens[place])} tokens and "
                f"{int(index.supervised[place])} supervised ones, and was scored with "
                f"{int(tokens[at])} and {int(counts[at])}",
                OTHER_SAMPLE,
            )

    def taught(self, row: Row, sample: Sample, where: str, digest: int) -> Row:
        """Return the row of a sample with its targets."""
        number, place = self.scores.find(digest, sample, where)
        record = self.scores.files[number].record(place)
        assert record.top_ids_NJ is not None and record.top_log_probs_NR is not None
        ids_NJ = torch.from_numpy(record.top_ids_NJ)
        log_probs_NR = torch.from_numpy(record.top_log_probs_NR)
        return replace(
            row,
            teacher_ids_NJ=ids_NJ[:, : self.top_k],
            teacher_log_probs_NR=lump_tail(log_probs_NR, self.top_k),
        )


def lump_tail(log_probs_NR: Tensor, top_k: int) -> Tensor:
    """Return the log-probs of the first `top_k` tokens, and of all others together."""
    others_N = log_probs_NR[:, top_k:].double().logsumexp(dim=1)
    return torch.cat([log_probs_NR[:, :top_k], others_N.to(log_probs_NR.dtype)[:, None]], dim=1)
