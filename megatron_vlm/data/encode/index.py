"""All samples of a source, encoded once and kept: sizes in memory, tokens in files.

The source is cut into chunks. A chunk is encoded by whoever comes first and written under a name
that says all it depends on, first beside it and then renamed: any number of processes may work on
the same source, none waits for another, none reads half a file.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.encode.reader import Reader
from megatron_vlm.data.encode.sample import Dropped, Encoder, Sample
from megatron_vlm.data.processes import in_processes
from megatron_vlm.data.read.sources import Source
from megatron_vlm.errors import DataError

CHUNK = 512  # records
_VERSION = 2  # of the files; raise it when their content changes meaning
# The settings that decide what a sample is.
_DECIDING = [
    "exif_orientation",
    "max_images",
    "max_tokens",
    "truncation",
    "train_on",
    "special_tokens",
    "allow_http",
]


@dataclass(frozen=True)
class Faults:
    """What was left out, and why, each as it is told to people."""

    dropped: tuple[tuple[str, str], ...]  # place and rule
    errors: tuple[str, ...]  # place and mistake


class Index:
    """The usable samples of a source: `len`, `sizes`, `index[i]`, and the record each came from."""

    def __init__(self, source: Source, files: list[Path]):
        self.files = files
        self.ends = parts = [_read_sizes(file) for file in files]
        self.records = np.concatenate(  # the record that each sample came from
            [part["records"] + CHUNK * number for number, part in enumerate(parts)]
        )
        self.chunk_of = np.repeat(range(len(parts)), [len(part["records"]) for part in parts])
        self.place = np.concatenate([np.arange(len(part["records"])) for part in parts])
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
        with safe_open(self.files[chunk], "np") as file:
            return Sample(
                file.get_slice("ids")[tokens],
                file.get_slice("trained")[tokens],
                _grids(file, "image_grids", images),
                _grids(file, "video_grids", videos),
            )


def build_index(
    source: Source, reader: Reader, cfg: DataConfig, scratch: Path, share: tuple[int, int] = (0, 1)
) -> Index:
    """Encode what is not in the cache yet. `share`: this process of so many that do it together."""
    if not len(source):
        raise DataError(f"{source.name} has no records")
    cache = scratch if cfg.cache_dir is None else Path(cfg.cache_dir).expanduser() / "text"
    folder = cache / index_key(source, reader.encoder, cfg, reader.policy.root)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{start:09d}.safetensors" for start in range(0, len(source), CHUNK)]
    # Each process begins at its own part, then helps with what is left.
    first = len(names) * share[0] // share[1]
    turn = [*range(first, len(names)), *range(first)]
    faulty: dict[int, Path] = {}
    missing = (chunk for chunk in turn if not (folder / names[chunk]).exists())
    for chunk, content in _encode_chunks(source, reader, cfg, missing, len(names)):
        if content.faults:  # a mistake may be mended: what has one is never cached
            faulty[chunk] = scratch / f"{folder.name}-{names[chunk]}"
        content.save(faulty.get(chunk, folder / names[chunk]))
    index = Index(source, [faulty.get(chunk, folder / name) for chunk, name in enumerate(names)])
    check_errors(index.faults.errors, cfg)
    return index


def check_errors(errors: Iterable[str], cfg: DataConfig) -> None:
    """Stop where there are more wrong records than data.max_errors."""
    errors = list(errors)
    if len(errors) > cfg.max_errors:
        raise DataError(
            f"{len(errors)} records are wrong, above data.max_errors={cfg.max_errors}; the first: "
            + errors[0]
        )


def index_key(source: Source, encoder: Encoder, cfg: DataConfig, root: str) -> str:
    """Everything that the encoded text depends on."""
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
    """Encoded records of one chunk."""

    samples: list[tuple[int, Sample]]  # with the record's place in the chunk
    dropped: list[tuple[int, str]]  # place and rule
    faults: list[str]

    def save(self, path: Path) -> None:
        """Beside the name first: a reader sees all of it or nothing."""
        samples = [sample for _, sample in self.samples]
        grids = {
            kind: [getattr(sample, f"{kind}_grids") for sample in samples]
            for kind in ("image", "video")
        }
        tensors = {
            "records": np.array([place for place, _ in self.samples], dtype=np.int64),
            "ids": np.concatenate([np.zeros(0, np.int32), *(s.ids_S for s in samples)]),
            "trained": np.concatenate([np.zeros(0, bool), *(s.trained_S for s in samples)]),
            "token_ends": _ends(len(sample.ids_S) for sample in samples),
        }
        for name, counts in (
            ("supervised", [sample.num_supervised for sample in samples]),
            ("patches", [sample.num_patches for sample in samples]),
            ("patch_pairs", [sample.patch_pairs for sample in samples]),
            ("images", [len(sample.image_grids) for sample in samples]),
        ):
            tensors[name] = np.array(counts, dtype=np.int64)
        for kind, lists in grids.items():
            flat = [grid for grids in lists for grid in grids]
            tensors[f"{kind}_grids"] = np.array(flat, dtype=np.int32).reshape(-1, 3)
            tensors[f"{kind}_ends"] = _ends(len(grids) for grids in lists)
        metadata = {"dropped": json.dumps(self.dropped), "errors": json.dumps(self.faults)}
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            save_file(tensors, partial, metadata)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


def encode_chunk(source: Source, reader: Reader, cfg: DataConfig, number: int) -> Chunk:
    """One chunk; with data.on_error=raise the first wrong record ends it."""
    samples: list[tuple[int, Sample]] = []
    dropped: list[tuple[int, str]] = []
    faults = []
    start = number * CHUNK
    for place in range(min(CHUNK, len(source) - start)):
        where = source.where(start + place)
        try:
            samples.append((place, reader.encode(source[start + place], where)))
        except Dropped as rule:
            dropped.append((place, str(rule)))
        except DataError as error:
            if cfg.on_error == "raise":
                raise
            faults.append(str(error))
    return Chunk(samples, dropped, faults)


class _Chunks:
    """The chunks of a source, for worker processes."""

    def __init__(self, source: Source, reader: Reader, cfg: DataConfig):
        self.work = (source, reader, cfg)

    def __getitem__(self, number: int) -> tuple[int, Chunk | DataError]:
        try:
            return number, encode_chunk(*self.work, number)
        except DataError as error:  # a DataLoader would wrap its message in a traceback
            return number, error


def _encode_chunks(
    source: Source, reader: Reader, cfg: DataConfig, missing: Iterator[int], total: int
) -> Iterator[tuple[int, Chunk]]:
    """Chunks as they are done, by data.num_workers processes where there is enough to do."""
    workers = cfg.num_workers if total > 2 * cfg.num_workers else 0
    # `missing` is asked late, chunk by chunk: what others have done by then is left alone.
    for number, chunk in in_processes(_Chunks(source, reader, cfg), missing, workers, 2):
        if isinstance(chunk, DataError):
            raise chunk
        yield number, chunk


def _read_sizes(path: Path) -> dict[str, Any]:
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        sizes: dict[str, Any] = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - not a dict
            if name not in ("ids", "trained", "image_grids", "video_grids")
        }
    sizes["dropped"] = json.loads(metadata["dropped"])
    sizes["errors"] = json.loads(metadata["errors"])
    return sizes


def _ends(counts: Iterable[int]) -> np.ndarray:
    return np.cumsum(np.fromiter(counts, dtype=np.int64), dtype=np.int64)


def _grids(file: Any, name: str, span: slice) -> tuple[Any, ...]:
    if span.start == span.stop:  # safetensors cannot slice what is empty
        return ()
    return tuple(map(tuple, file.get_slice(name)[span].tolist()))
