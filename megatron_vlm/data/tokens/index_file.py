"""Files of encoded samples, one for each chunk of a source. A checksum covers what is read at the
start, and each sample has its own: data that a disk has changed is never trained."""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_vlm.data.records.keys import METADATA
from megatron_vlm.data.tokens.sample import Sample, uneven_weights
from megatron_vlm.io.atomic import replaced_file
from megatron_vlm.io.untrusted import UntrustedFile, require_file

REMEDY = "delete data.cache_dir and start again"
_SIZES = ("supervised", "patches", "patch_pairs", "images")
_ENDS = ("token_ends", "image_ends", "video_ends")
_COLUMNS = ("records", "digests", "rejected", *_SIZES, "checksums", *_ENDS)
_METADATA_KEYS = ("dropped", "errors", "passed", "contrary", "cut")


class RecordId(NamedTuple):
    """The record of a sample: its place in the chunk, and the digest of its content."""

    place: int
    digest: int


@dataclass(frozen=True)
class Chunk:
    """The encoded records of one chunk. The samples of one record follow each other."""

    samples: list[tuple[RecordId, Sample]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)  # place and rule
    faults: list[str] = field(default_factory=list)
    unused_keys: Counter[str] = field(default_factory=Counter)  # unused keys
    contrary: list[int] = field(default_factory=list)  # places; see AnswerOpening.is_contrary
    truncated: list[int] = field(default_factory=list)  # places of records with a truncated row

    def save(self, path: Path) -> None:
        """Write under a temporary name first, so that readers see the complete file or no file."""
        tensors = self._tensors()
        values = (self.dropped, self.faults, self.unused_keys, self.contrary, self.truncated)
        metadata = dict(zip(_METADATA_KEYS, map(json.dumps, values), strict=True))
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        checksum = {"checksum": _checksum(shapes, tensors, metadata)}
        with replaced_file(path) as new:
            save_file(tensors, new, metadata | checksum)

    def _tensors(self) -> dict[str, np.ndarray]:
        samples = [sample for _, sample in self.samples]
        tensors = {
            "records": _column(record.place for record, _ in self.samples),
            "digests": _column(record.digest for record, _ in self.samples),
            "rejected": _column(int(s.is_rejected) for s in samples),
            "ids": np.concatenate([np.zeros(0, np.int32), *(s.ids_S for s in samples)]),
            "trained": np.concatenate([np.zeros(0, bool), *(s.trained_S for s in samples)]),
            "token_ends": _column(len(s.ids_S) for s in samples).cumsum(),
            "supervised": _column(s.num_supervised for s in samples),
            "patches": _column(s.num_patches for s in samples),
            "patch_pairs": _column(s.patch_pairs for s in samples),
            "images": _column(len(s.image_grids) for s in samples),
            "checksums": _column(map(_checksum_of_sample, samples)),
        }
        if any(s.weights_S is not None for s in samples):
            lists = [s.trained_S if s.weights_S is None else s.weights_S for s in samples]
            tensors["weights"] = np.concatenate(lists, dtype=np.float32)
        for kind in ("image", "video"):
            grids = [getattr(sample, f"{kind}_grids") for sample in samples]
            flat = [grid for sample_grids in grids for grid in sample_grids]
            tensors[f"{kind}_grids"] = np.array(flat, dtype=np.int32).reshape(-1, 3)
            tensors[f"{kind}_ends"] = _column(map(len, grids)).cumsum()
        return tensors


@dataclass(frozen=True)
class ChunkFile:
    """A file that `Chunk.save` has written, and the part of it that is kept in memory."""

    path: Path
    columns: Mapping[str, np.ndarray]  # Each column has an entry for each sample.
    dropped: list[tuple[int, str]]
    errors: list[str]
    unused_keys: dict[str, int]  # number of records with each unused key
    contrary: list[int]  # places; see AnswerOpening.is_contrary
    truncated: list[int]  # places of records with a truncated row
    weighted: bool  # true if it has weights of tokens

    @staticmethod
    def open(path: Path, remedy: str = REMEDY) -> "ChunkFile":
        """Open a file. Raise a DataError if it is not as it was written."""
        outside = UntrustedFile(str(path), remedy=remedy)
        require_file(path)
        with outside.wrap_errors("the cache is damaged"), safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            columns = {name: file.get_tensor(name) for name in _COLUMNS}
            metadata = {name: file.metadata()[name] for name in _METADATA_KEYS}
            if file.metadata()["checksum"] != _checksum(shapes, columns, metadata):
                raise ValueError("its checksum is another than when it was written")
            values = [outside.parse(metadata[name]) for name in _METADATA_KEYS]
            values.append("weights" in shapes)
        return ChunkFile(path, columns, *values)

    def sample(self, place: int) -> Sample:
        """Read a sample. Raise a DataError if it is not as it was written."""

        def span(kind: str) -> slice:
            ends = self.columns[kind]
            return slice(int(ends[place - 1]) if place else 0, int(ends[place]))

        tokens, images, videos = span("token_ends"), span("image_ends"), span("video_ends")
        outside = UntrustedFile(str(self.path), remedy=REMEDY)
        with outside.wrap_errors("the cache is damaged"), safe_open(self.path, "np") as file:
            ids_S, trained_S = (file.get_slice(name)[tokens] for name in ("ids", "trained"))
            grids = _grids(file, "image_grids", images), _grids(file, "video_grids", videos)
            weights_S = uneven_weights(file.get_slice("weights")[tokens]) if self.weighted else None
            rejected = bool(self.columns["rejected"][place])
            sample = Sample(ids_S, trained_S, *grids, weights_S, rejected)
            if _checksum_of_sample(sample) != self.columns["checksums"][place]:
                raise ValueError(f"the checksum of sample {place} is another than when written")
        return sample


def _checksum(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, np.ndarray],
    metadata: dict[str, str],
) -> str:
    """Return a checksum of everything that the samples' own checksums do not cover."""
    described = repr((sorted(shapes.items()), sorted(metadata.items()))).encode()
    return str(_sum([tensors[name] for name in _COLUMNS], zlib.crc32(described)))


def _checksum_of_sample(sample: Sample) -> int:
    weights = [] if sample.weights_S is None else [sample.weights_S]
    grids = [np.array(part, np.int64) for part in (sample.image_grids, sample.video_grids)]
    return _sum([sample.ids_S, sample.trained_S, *weights, *grids])


def _sum(arrays: Iterable[np.ndarray], start: int = 0) -> int:
    for array in arrays:
        start = zlib.crc32(array.data, zlib.crc32(array.dtype.str.encode(), start))
    return start


def _column(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _grids(file: Any, name: str, span: slice) -> tuple[Any, ...]:
    if span.start == span.stop:  # safetensors cannot slice an empty tensor
        return ()
    return tuple(map(tuple, file.get_slice(name)[span].tolist()))


def digest_record(raw: Any, ignored: Collection[str]) -> int:
    """Return 64 bits as a signed number, without metadata and ignored keys if there are others."""
    if isinstance(raw, dict):
        raw = {k: v for k, v in raw.items() if k not in METADATA and k not in ignored} or raw
    text = json.dumps(_plain(raw), sort_keys=True)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _plain(value: Any) -> Any:
    """Return a value of a record as JSON has it, with digests in place of pictures."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, PIL.Image.Image):
        value = repr((value.mode, value.size)).encode() + value.tobytes()
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value if isinstance(value, bool | int | float | str | None) else str(value)
