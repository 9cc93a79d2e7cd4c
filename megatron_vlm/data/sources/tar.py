"""WebDataset shards as a source."""

import hashlib
import os
import tarfile
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from megatron_vlm.data.sources.text_files import check_size, file_digest, name_of_files, parse_json
from megatron_vlm.errors import DataError

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")


class TarSource:
    """WebDataset shards with random access. `datasets` would first copy them into Arrow, which
    refuses JSON members whose fields differ from sample to sample."""

    def __init__(self, paths: Sequence[str], root: str):
        self.paths, self.root = list(paths), root
        self.name = name_of_files(paths)
        self.samples: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
        for shard, path in enumerate(self.paths):
            self.samples += _scan_tar(shard, path)

    @cached_property
    def digest(self) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            hasher.update(file_digest(path).encode())
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return join_members(self.members(index), self.where(index))

    def members(self, index: int) -> dict[str, bytes]:
        """Return the content of each member of a sample, by the end of its name."""
        shard, _, members = self.samples[index]
        check_size(sum(size for _, size in members.values()), self.where(index))
        with open(self.paths[shard], "rb") as file:
            values = {}
            for field, (offset, size) in members.items():
                file.seek(offset)
                values[field] = file.read(size)
        return values

    def where(self, index: int) -> str:
        shard, key, _ = self.samples[index]
        return f"{self.paths[shard]}: {key}"


def _scan_tar(shard: int, path: str) -> list[tuple[int, str, dict[str, tuple[int, int]]]]:
    """Return the samples of a shard: adjacent members with the same name up to the first dot."""
    samples: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            total = os.path.getsize(path)
            for member in tar:
                # A size below 0 would lead back to members that have been read.
                if member.size < 0 or member.offset_data > total - member.size:
                    raise tarfile.ReadError(f"{member.name} has a size of {member.size} bytes")
                folder, _, base = member.name.rpartition("/")
                stem, _, field = base.partition(".")
                if not member.isfile() or not field:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not samples or samples[-1][1] != key:
                    samples.append((shard, key, {}))
                if member.issparse():  # its size is not that of its content
                    raise tarfile.ReadError(f"{member.name} is stored with holes")
                samples[-1][2][field.lower()] = (member.offset_data, member.size)
            if tar.offset > total:
                raise tarfile.ReadError("unexpected end of data")
    except Exception as error:  # tarfile raises many kinds
        raise DataError(f"is not a readable, uncompressed tar file: {error}", place=path) from error
    return samples


def join_members(values: dict[str, Any], where: str) -> Any:
    """Join a sample's members: the JSON with its pictures, or a picture and its caption."""
    pictures = [values[field] for field in sorted(values) if field.split(".")[-1] in _PICTURES]
    record, text = values.get("json"), values.get("txt")
    if record is not None:
        if isinstance(record, str | bytes):
            record = parse_json(record, f"{where}.json", "JSON")
        if isinstance(record, dict) and pictures:
            record = {key: value for key, value in record.items() if key != "image"}
            record["images"] = pictures
        return record
    if text is not None and pictures:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return {"images": pictures, "text": text.strip()}
    raise DataError(
        f"has {sorted(values)}, and a sample needs .json, or a picture and .txt", place=where
    )
