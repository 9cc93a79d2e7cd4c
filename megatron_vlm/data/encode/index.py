"""All samples of a source, encoded once and kept: sizes in memory, tokens in files.

The source is cut into chunks. The first process to come to a chunk encodes it into a file whose
name depends on everything that the content depends on. Files are written under a temporary name and
renamed, so any number of processes may work on the same source without waiting for each other, and
none of them reads half a file.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.encode.reader import Reader
from megatron_vlm.data.encode.sample import Dropped, Encoder, Sample, uneven
from megatron_vlm.data.processes import in_processes
from megatron_vlm.data.read.sources import Source
from megatron_vlm.errors import DataError
from megatron_vlm.outside import Outside
from megatron_vlm.paths import require_file

_log = logging.getLogger("megatron_vlm.data")

CHUNK = 512  # records
_COLUMNS = ("records", "supervised", "patches", "patch_pairs", "images")
_SIZES = (*_COLUMNS, "token_ends", "image_ends", "video_ends")
_TABLES = ("ids", "trained", "image_grids", "video_grids")
_PARTS = {
    "token": ("ids", "trained", "weights"),
    "image": ("image_grids",),
    "video": ("video_grids",),
}
_FAULTS = ("dropped", "errors")
_VERSION = 4  # of the files; raise it when the meaning of their content changes
# The settings that decide what a sample is.
_DECIDING = [
    "exif_orientation",
    "max_images",
    "max_tokens",
    "truncation",
    "train_on",
    "special_tokens",
    "ignore_keys",
    "template_kwargs",
    "allow_http",
]


@dataclass(frozen=True)
class Faults:
    """What was left out, and why, as users are told."""

    dropped: tuple[tuple[str, str], ...]  # place and rule
    errors: tuple[str, ...]  # place and mistake


class Index:
    """The usable samples of a source: `len`, `index[i]`, and for each its sizes and its record."""

    def __init__(self, source: Source, files: list[Path], parts: list[dict[str, Any]]):
        """`parts`: for each chunk's file what `_read_sizes` gives."""
        self.files, self.ends = files, parts
        places = [part["records"] for part in parts]  # of the samples' records in their chunks
        self.records = np.concatenate([places[i] + CHUNK * i for i in range(len(parts))])
        self.chunk_of = np.repeat(range(len(parts)), [len(part) for part in places])
        self.place = np.concatenate([np.arange(len(part)) for part in places])
        self.tokens = np.concatenate([np.diff(part["token_ends"], prepend=0) for part in parts])
        self.supervised, self.patches, self.patch_pairs, self.images = (
            np.concatenate([part[name] for part in parts])
            for name in ("supervised", "patches", "patch_pairs", "images")
        )
        self.faults = Faults(
            tuple(
                (source.where(CHUNK * number + place), rule)
                for number, part in enumerate(parts)
                for place, rule in part["dropped"]
            ),
            tuple(message for part in parts for message in part["errors"]),
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, sample: int) -> Sample:
        chunk, place = int(self.chunk_of[sample]), int(self.place[sample])

        def span(kind: str) -> slice:
            ends = self.ends[chunk][kind]
            return slice(int(ends[place - 1]) if place else 0, int(ends[place]))

        tokens, images, videos = span("token_ends"), span("image_ends"), span("video_ends")
        outside = Outside(str(self.files[chunk]), remedy="delete data.cache_dir and start again")
        with outside.border("the cache is damaged"), safe_open(self.files[chunk], "np") as file:
            ids_S, trained_S = (file.get_slice(name)[tokens] for name in ("ids", "trained"))
            grids = _grids(file, "image_grids", images), _grids(file, "video_grids", videos)
            weighted = self.ends[chunk]["weighted"]
            weights_S = uneven(file.get_slice("weights")[tokens]) if weighted else None
            return Sample(ids_S, trained_S, *grids, weights_S)


def build_index(
    source: Source, reader: Reader, cfg: DataConfig, scratch: Path, share: tuple[int, int] = (0, 1)
) -> Index:
    """Encode what is not in the cache yet. `share`: which of how many processes this is, where
    several do it together."""
    if not len(source):
        raise DataError(f"{source.name} has no records")
    cache = scratch if cfg.cache_dir is None else Path(cfg.cache_dir).expanduser() / "text"
    folder = cache / index_key(source, reader.encoder, cfg, reader.policy.root)
    with contextlib.suppress(OSError):  # then nothing can be kept there, and `_keep` says why
        folder.mkdir(parents=True, exist_ok=True)
    names = [f"{start:09d}.safetensors" for start in range(0, len(source), CHUNK)]
    # Each process begins at its own share, then helps with what is left.
    first = len(names) * share[0] // share[1]
    turn = [*range(first, len(names)), *range(first)]
    kept: dict[int, dict[str, Any]] = {}  # what was read of chunks that the cache has

    def missing() -> Iterator[int]:
        """Drawn late, chunk by chunk, so that chunks others have done by then are skipped."""
        for chunk in turn:
            if (sizes := _kept_sizes(folder / names[chunk])) is None:
                yield chunk
            else:
                kept[chunk] = sizes

    workers = cfg.num_workers if len(names) > 2 * cfg.num_workers else 0
    elsewhere: dict[int, Path] = {}
    for chunk, content in in_processes(_Chunks(source, reader, cfg), missing(), workers, 2):
        if isinstance(content, DataError):
            raise content
        # Somebody may fix what is faulty, so such a chunk is never cached.
        if content.faults or not _keep(content, folder / names[chunk], quiet=bool(elsewhere)):
            elsewhere[chunk] = scratch / f"{folder.name}-{names[chunk]}"
            _write(content, elsewhere[chunk])
    files = [elsewhere.get(chunk, folder / name) for chunk, name in enumerate(names)]
    parts = [kept[i] if i in kept else _read_sizes(file) for i, file in enumerate(files)]
    index = Index(source, files, parts)
    check_errors(index.faults.errors, cfg)
    return index


def _kept_sizes(path: Path) -> dict[str, Any] | None:
    """Those of a chunk that the cache has; one that is damaged goes."""
    if not os.path.lexists(path):
        return None
    try:
        return _read_sizes(path)
    except DataError as error:
        _log.warning("%s; it is made again", error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _keep(content: "Chunk", path: Path, quiet: bool) -> bool:
    """Write a chunk into the cache; a cache that cannot be written is done without."""
    try:
        content.save(path)
    except (OSError, SafetensorError) as error:
        if not quiet:
            _log.warning("data.cache_dir is done without: %s cannot be written: %s", path, error)
        return False
    return True


def _write(content: "Chunk", path: Path) -> None:
    try:
        content.save(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be written: {error}; free space there, or set TMPDIR to another folder"
        ) from error


def check_errors(errors: Sequence[str], cfg: DataConfig) -> None:
    """Stop if there are more wrong records than data.max_errors."""
    if len(errors) > cfg.max_errors:
        raise DataError(
            f"{len(errors)} records are wrong, above data.max_errors={cfg.max_errors}; the first: "
            + errors[0]
        )


def index_key(source: Source, encoder: Encoder, cfg: DataConfig, root: str | None) -> str:
    """A digest of everything that the encoded text depends on."""
    tokenizer = encoder.renderer.tokenizer
    parts = {
        "version": [_VERSION, CHUNK],
        "source": [source.digest, len(source), root],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "template": tokenizer.chat_template,
        "images": asdict(encoder.images),
        "videos": asdict(encoder.videos),
        "rules": {key: getattr(cfg, key) for key in _DECIDING},
    }
    text = json.dumps(parts, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Chunk:
    """The encoded records of one chunk."""

    samples: list[tuple[int, Sample]]  # each with its record's place in the chunk
    dropped: list[tuple[int, str]]  # place and rule
    faults: list[str]

    def save(self, path: Path) -> None:
        """Write under a temporary name first, so that readers see all of it or nothing."""
        samples = [sample for _, sample in self.samples]
        tensors = {
            "records": _column(place for place, _ in self.samples),
            "ids": np.concatenate([np.zeros(0, np.int32), *(s.ids_S for s in samples)]),
            "trained": np.concatenate([np.zeros(0, bool), *(s.trained_S for s in samples)]),
            "token_ends": _column(len(s.ids_S) for s in samples).cumsum(),
            "supervised": _column(s.num_supervised for s in samples),
            "patches": _column(s.num_patches for s in samples),
            "patch_pairs": _column(s.patch_pairs for s in samples),
            "images": _column(len(s.image_grids) for s in samples),
        }
        if any(s.weights_S is not None for s in samples):
            lists = [s.trained_S if s.weights_S is None else s.weights_S for s in samples]
            tensors["weights"] = np.concatenate(lists, dtype=np.float32)
        for kind in ("image", "video"):
            lists = [getattr(sample, f"{kind}_grids") for sample in samples]
            flat = [grid for grids in lists for grid in grids]
            tensors[f"{kind}_grids"] = np.array(flat, dtype=np.int32).reshape(-1, 3)
            tensors[f"{kind}_ends"] = _column(map(len, lists)).cumsum()
        metadata = {"dropped": json.dumps(self.dropped), "errors": json.dumps(self.faults)}
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            save_file(tensors, partial, metadata)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a source, encoded in worker processes. With data.on_error=raise, the first
    wrong record's error takes the place of its chunk."""

    source: Source
    reader: Reader
    cfg: DataConfig

    def __getitem__(self, number: int) -> tuple[int, Chunk | DataError]:
        chunk = Chunk([], [], [])
        start = number * CHUNK
        for place in range(min(CHUNK, len(self.source) - start)):
            where = self.source.where(start + place)
            try:
                sample = self.reader.encode(self.source[start + place], where)
                chunk.samples.append((place, sample))
            except Dropped as rule:
                chunk.dropped.append((place, str(rule)))
            except DataError as error:
                if self.cfg.on_error == "raise":
                    return number, error  # a DataLoader would wrap the message of a raised one
                chunk.faults.append(str(error))
        return number, chunk


def _read_sizes(path: Path) -> dict[str, Any]:
    """What is kept in memory of a chunk; a DataError where it is not as `Chunk.save` wrote it."""
    outside = Outside(str(path), remedy="delete data.cache_dir and start again")
    require_file(path)
    with outside.border("the cache is damaged"), safe_open(path, "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        sizes = {name: file.get_tensor(name) for name in _SIZES}
        faults = {name: outside.parsed(file.metadata()[name]) for name in _FAULTS}
        _check_chunk(shapes, sizes, faults)
    return {**faults, **sizes, "weighted": "weights" in shapes}


def _check_chunk(
    shapes: dict[str, tuple[int, ...]], sizes: dict[str, np.ndarray], faults: dict[str, Any]
) -> None:
    """ValueError where the parts of a chunk contradict each other."""
    count = len(sizes["records"])
    if any(values.shape != (count,) or (values < 0).any() for values in sizes.values()):
        raise ValueError("its columns differ in length, or have numbers below 0")
    for kind, table in _PARTS.items():
        ends = sizes[f"{kind}_ends"]
        last = int(ends[-1]) if count else 0
        if (np.diff(ends) < 0).any() or any(shapes.get(n, (last,))[0] != last for n in table):
            raise ValueError(f"its {kind}_ends are not those of its {' and '.join(table)}")
    if not set(_TABLES) <= shapes.keys() or (sizes["records"] >= CHUNK).any():
        raise ValueError("it lacks a part, or is of more records than a chunk has")
    pairs = [*faults["dropped"], *((0, text) for text in faults["errors"])]
    if not all(type(place) is int and isinstance(text, str) for place, text in pairs):
        raise ValueError("what was left out is not said as a place and a text")


def _column(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _grids(file: Any, name: str, span: slice) -> tuple[Any, ...]:
    if span.start == span.stop:  # safetensors cannot slice what is empty
        return ()
    return tuple(map(tuple, file.get_slice(name)[span].tolist()))
