"""Index: all samples of a source, encoded once and cached; sizes in memory, tokens in files. The
first process that reaches a chunk encodes it into a file whose name depends on everything that the
content depends on, under a temporary name at first. So any number of processes may work on the same
source without waiting, and none reads half a file."""

import contextlib
import copy
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.records.keys import Unknown, UnknownKeysError, unknown_keys_problem
from megatron_vlm.data.sources.source import Source
from megatron_vlm.data.tokens.index_file import Chunk, ChunkFile, RecordId, digest_record
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.sample import Example, RecordDropped, Sample
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import home_path

_log = logging.getLogger("megatron_vlm.data")

CHUNK = 512  # records
_MAX_SURVEYED = 5000  # records that are read again to name all their unknown keys at once
_VERSION = 11  # version of the files; raise it when the meaning of their content changes
# These settings decide the content of a sample.
_DECIDING = (
    *("exif_orientation", "max_images", "max_tokens", "truncation", "train_on", "special_tokens"),
    *("ignore_keys", "unknown_keys", "lone_marks", "caption_prompt", "system", "template_kwargs"),
    "allow_http",
)


@dataclass(frozen=True)
class Faults:
    """Records and keys that were left out or cut, and the reasons, in the form that users see."""

    dropped: tuple[tuple[str, str], ...]  # place and rule
    errors: tuple[str, ...]  # place and mistake
    unused_keys: Mapping[str, int]  # number of records with each unused key
    contrary: int  # number of records whose answers no prompt of the template asks for
    truncated: int  # number of records that were truncated


class Index:
    """The usable records of a source, of one row or several: `len`, `example(i)`, and the sizes and
    the record of each. A size is the sum over the rows."""

    def __init__(self, source: Source, files: list[ChunkFile]):
        self.files = files
        places = [file.columns["records"] for file in files]  # places in the chunks
        records = np.concatenate([places[i] + CHUNK * i for i in range(len(files))])
        starts = np.flatnonzero(np.diff(records, prepend=-1))  # first row of each record
        self.records, self.rows = records[starts], np.diff(starts, append=len(records))
        self.chunk_of = np.repeat(range(len(files)), [len(part) for part in places])[starts]
        self.place = np.concatenate([np.arange(len(part)) for part in places])[starts]

        def column(name: str) -> np.ndarray:
            return np.concatenate([file.columns[name] for file in files])

        def lengths(name: str) -> np.ndarray:
            return np.concatenate([np.diff(file.columns[name], prepend=0) for file in files])

        def total(rows: np.ndarray) -> np.ndarray:
            return np.add.reduceat(rows, starts) if len(starts) else rows

        tokens = lengths("token_ends")
        self.digests, self.tokens = column("digests")[starts], total(tokens)
        self.longest = np.maximum.reduceat(tokens, starts) if len(starts) else tokens
        self.supervised, self.patches, self.patch_pairs, self.images = (
            total(column(name)) for name in ("supervised", "patches", "patch_pairs", "images")
        )
        self.videos, self.rejected = total(lengths("video_ends")), total(column("rejected"))
        self.faults = Faults(
            tuple(
                (source.where(CHUNK * number + place), rule)
                for number, file in enumerate(files)
                for place, rule in file.dropped
            ),
            tuple(message for file in files for message in file.errors),
            sum((Counter(file.unused_keys) for file in files), Counter()),
            sum(len(file.contrary) for file in files),
            sum(len(file.truncated) for file in files),
        )

    def __len__(self) -> int:
        return len(self.records)

    def lengths(self, sample: int) -> list[int]:
        """Return the tokens of each row of a sample."""
        if self.rows[sample] == 1:  # each epoch asks for all samples
            return [int(self.tokens[sample])]
        start, stop = self.place[sample], self.place[sample] + self.rows[sample]
        ends = self.files[self.chunk_of[sample]].columns["token_ends"][max(start - 1, 0) : stop]
        lengths: list[int] = np.diff(ends, prepend=0)[min(start, 1) :].tolist()
        return lengths

    def only(self, chosen: np.ndarray) -> "Index":
        """Return the index of the chosen samples; `chosen` has a flag for each."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):  # an entry for each sample
                setattr(part, name, value[chosen])
        return part

    def __getitem__(self, number: int) -> Sample:
        """Read the first row of a record: its only one, or the chosen answer of a pair."""
        return self.files[self.chunk_of[number]].sample(int(self.place[number]))

    def example(self, number: int) -> Example:
        """Read all rows of a record."""
        file, start = self.files[self.chunk_of[number]], int(self.place[number])
        return tuple(file.sample(start + row) for row in range(int(self.rows[number])))


def build_index(
    source: Source, reader: Reader, cfg: DataConfig, scratch: Path, share: tuple[int, int] = (0, 1)
) -> Index:
    """Encode the chunks that the cache lacks, and return the index. If several processes do it
    together, `share` is the index of this process and their number."""
    if not len(source):
        raise DataError("has no records", place=source.name)
    cache = scratch if cfg.cache_dir is None else home_path(cfg.cache_dir) / "text"
    folder = cache / index_key(source, reader, cfg)
    with contextlib.suppress(OSError):  # Nothing can be cached there then, and `_keep` logs why.
        folder.mkdir(parents=True, exist_ok=True)
    names = [f"{start:09d}.safetensors" for start in range(0, len(source), CHUNK)]
    # Each process begins at its own share, then helps with the remaining chunks.
    first = len(names) * share[0] // share[1]
    turn = [*range(first, len(names)), *range(first)]
    cached: dict[int, ChunkFile] = {}  # chunks that the cache has

    def missing() -> Iterator[int]:
        """Yield missing chunks one by one, without those that other processes have made."""
        for chunk in turn:
            if (file := _open_cached(folder / names[chunk])) is None:
                yield chunk
            else:
                cached[chunk] = file

    workers = cfg.num_workers if len(names) > 2 * cfg.num_workers else 0
    scratch_paths: dict[int, Path] = {}
    for chunk, content in map_in_processes(_Chunks(source, reader, cfg), missing(), workers, 2):
        if isinstance(content, UnknownKeysError):
            raise unknown_keys_error(source, reader) or content
        if isinstance(content, DataError):
            raise content
        # A chunk with faults is never cached, because its records may be corrected.
        if content.faults or not _keep(content, folder / names[chunk], quiet=bool(scratch_paths)):
            scratch_paths[chunk] = scratch / f"{folder.name}-{names[chunk]}"
            _write(content, scratch_paths[chunk])
    paths = [scratch_paths.get(chunk, folder / name) for chunk, name in enumerate(names)]
    files = [cached[i] if i in cached else ChunkFile.open(path) for i, path in enumerate(paths)]
    index = Index(source, files)
    check_errors(index.faults.errors, cfg)
    return index


def _open_cached(path: Path) -> ChunkFile | None:
    """Open a chunk of the cache, or return None. A damaged file is deleted."""
    if not os.path.lexists(path):
        return None
    try:
        return ChunkFile.open(path, "it is made again")
    except DataError as error:
        _log.warning("%s", error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _keep(content: Chunk, path: Path, quiet: bool) -> bool:
    """Write a chunk into the cache. Warn and return False if it cannot be written."""
    try:
        content.save(path)
    except (OSError, SafetensorError) as error:
        if not quiet:
            _log.warning("continuing without data.cache_dir: %s cannot be written: %s", path, error)
        return False
    return True


def _write(content: Chunk, path: Path) -> None:
    try:
        content.save(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot be written: {error}",
            place=str(path),
            remedy="free space there, or set TMPDIR to another folder",
        ) from error


def unknown_keys_error(source: Source, reader: Reader) -> DataError | None:
    """Return an error that names all keys for which records are refused, or None."""
    first: UnknownKeysError | None = None
    keys, counts = dict[str, Unknown](), Counter[str]()
    surveyed = min(len(source), _MAX_SURVEYED)
    for number in range(surveyed):
        try:
            reader.chats(source[number], source.where(number))
        except UnknownKeysError as error:
            first = first or error
            keys = error.keys | keys
            counts.update([*error.keys])
        except DataError:
            continue
    if first is None:
        return None
    among = f" of the first {surveyed:,}" if surveyed < len(source) else ""
    records_by_key = {
        name: f"{count:,} record{'s' * (count > 1)}{among}" for name, count in counts.items()
    }
    problem = unknown_keys_problem(keys, reader.encoder.cfg.ignore_keys, records_by_key)
    return DataError(**problem, place=first.place)


def check_errors(errors: Sequence[str], cfg: DataConfig) -> None:
    """Raise a DataError if there are more wrong records than data.max_errors."""
    if len(errors) > cfg.max_errors:
        raise DataError(
            f"is below the {len(errors)} wrong records, of which the first is {errors[0]}",
            key="data.max_errors",
            found=cfg.max_errors,
        )


def index_key(source: Source, reader: Reader, cfg: DataConfig) -> str:
    """Return a digest of everything that the encoded text depends on."""
    encoder, tokenizer = reader.encoder, reader.encoder.renderer.tokenizer
    parts = {
        "version": [_VERSION, CHUNK],
        "source": [source.digest, len(source), reader.policy.root],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "template": tokenizer.chat_template,
        "images": vars(encoder.images),
        "videos": vars(encoder.videos),
        "rules": {key: getattr(cfg, key) for key in _DECIDING},
    }
    if reader.kind != "chat":
        parts["records"] = reader.kind if isinstance(reader.kind, str) else asdict(reader.kind)
    text = json.dumps(parts, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Chunks:
    """A source's chunks, encoded, or without data.max_errors the first wrong record's error."""

    source: Source
    reader: Reader
    cfg: DataConfig

    def __getitem__(self, number: int) -> tuple[int, Chunk | DataError]:
        chunk = Chunk()
        start = number * CHUNK
        for place in range(min(CHUNK, len(self.source) - start)):
            where = self.source.where(start + place)
            try:
                raw = self.source[start + place]
                example = self.reader.encode_example(raw, where, chunk.unused_keys)
                # Only what was understood is digested: other records may be nested without an end.
                record = RecordId(place, digest_record(raw, self.cfg.ignore_keys))
                chunk.samples.extend((record, sample) for sample in example)
                if self.reader.is_contrary(raw, example[0]):
                    chunk.contrary.append(place)
                if any(sample.is_truncated for sample in example):
                    chunk.truncated.append(place)
            except RecordDropped as rule:
                chunk.dropped.append((place, str(rule)))
            except DataError as error:
                if not self.cfg.max_errors:
                    return number, error  # a DataLoader would wrap a raised error's message
                chunk.faults.append(str(error))
        return number, chunk
