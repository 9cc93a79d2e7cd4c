"""A Hugging Face checkpoint, a folder or a name on the Hub, opened for reading: config, tensor
names, slices. With tokens to add it reads as if they, and their rows, were in it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.family import family_of, read_config
from megatron_vlm.family.new_tokens import find_new_tokens
from megatron_vlm.hub import folder_of, pin

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The types of weights that are trained, by safetensors' names.
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_ROWS = 2**14  # read at a time


@dataclass(frozen=True)
class TensorInfo:
    """Which file a tensor is in and what it is, from the file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. BF16


class HFCheckpoint:
    """Names, shapes and dtypes are read at once from the headers; data only slice by slice."""

    def __init__(self, path: str | Path, add_tokens: Sequence[str] = ()):
        """`add_tokens` is data.add_tokens."""
        self.name = pin(str(path))  # as `model.path`
        self.path = folder_of(self.name)
        self.config = read_config(self.path)
        self.family = family_of(self.config, self.path)
        self.new_tokens = find_new_tokens(self.path, add_tokens)
        self.stored_vocab: int = self.config.text_config.vocab_size
        if self.new_tokens is not None:
            self.new_tokens.grow(self.config)
        self.sizes = self.family.sizes_of(self.config)
        self._means: dict[str, Tensor] = {}  # of the rows of known tokens
        self._open_files: dict[Path, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read_headers(self) -> None:
        """Fill `tensors` from the headers of the weight files. A tensor that is in two of them
        is that of the last, as in transformers. Of a name on the Hub they are downloaded now."""
        folder_of(self.name, weights=True)
        for file in weight_files(self.path):
            for name, info in read_header(file).items():
                shape = tuple(info["shape"])
                if self._has_rows_of_tokens(name) and shape[:1] == (self.stored_vocab,):
                    shape = (self.sizes.text.vocab, *shape[1:])
                self.tensors[name] = TensorInfo(file, shape, info["dtype"])

    def read(self, name: str, spans: Sequence[tuple[int, int] | None]) -> Tensor:
        """A slice of one tensor, (start, end) for each leading dimension; None takes all of it."""
        if self.new_tokens is not None and self._has_rows_of_tokens(name):
            return self._read_grown(name, *(spans or [None]))
        return self._read(name, spans)

    def _read(self, name: str, spans: Sequence[tuple[int, int] | None]) -> Tensor:
        file = self.tensors[name].file
        if file not in self._open_files:
            self._open_files[file] = safe_open(file, framework="pt")
        piece = self._open_files[file].get_slice(name)
        if not spans:
            return piece[:]
        return piece[tuple(slice(None) if span is None else slice(*span) for span in spans)]

    def _has_rows_of_tokens(self, name: str) -> bool:
        return name in (self.family.names.embedding, self.family.names.head)

    def _read_grown(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Rows of the embedding or the head: the stored ones, but for the new tokens the mean of
        those of all known tokens. Spare rows after the new ones stay as they are."""
        assert self.new_tokens is not None
        start, end = rows or (0, self.sizes.text.vocab)
        stored = self._read(name, [(min(start, self.stored_vocab), min(end, self.stored_vocab))])
        found = torch.cat([stored, stored.new_empty(end - start - len(stored), stored.shape[1])])
        first = self.new_tokens.first
        last = first + len(self.new_tokens.names)
        if start < last and end > first:
            if name not in self._means:
                self._means[name] = self._mean(name, first)
            mean = self._means[name].to(found.dtype)
            found[max(first - start, 0) : last - start] = mean
        return found

    def _mean(self, name: str, count: int) -> Tensor:
        """Of the first rows, a part of them at a time: an embedding may be large."""
        total = torch.zeros(self.tensors[name].shape[1], dtype=torch.float64)
        for start in range(0, count, _ROWS):
            rows = self._read(name, [(start, min(start + _ROWS, count))])
            total += rows.sum(0, dtype=torch.float64)
        return total / count

    def close(self) -> None:
        """Unmap the files."""
        self._open_files.clear()


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors, or else those that the index names,
    in the order of their names. Any others are no part of the checkpoint."""
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has an adapter_config.json: an adapter is no whole model; merge it into its "
            "base model and give that folder"
        )
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        found = sorted(f.name for end in ("safetensors", "bin") for f in folder.glob(f"*.{end}"))
        raise CheckpointError(
            f"{folder} has no {WEIGHTS} and no {INDEX}; it has {', '.join(found) or 'no weights'}; "
            "give a folder as save_pretrained or `hf download` writes it"
        )
    return [folder / name for name in sorted(set(_indexed(folder / INDEX)))]


def _indexed(index: Path) -> Iterator[str]:
    """The files that an index names, which are files of its own folder."""
    try:
        names = list(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({type(error).__name__}: {error}); download it again"
        ) from error
    for name in names:
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"{index} names {name!r}, which is not a file inside its folder; download the "
                "checkpoint again, or move the file there and name it so"
            )
        if not (index.parent / path).is_file():
            raise CheckpointError(f"{index.parent / path} is missing, but {index.name} names it")
        yield name


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without its metadata."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{file}: header of {length} bytes in a file of {size}")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((info["data_offsets"][1] for info in header.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: its header is damaged ({type(error).__name__}: {error}); download it again"
        ) from error
    if size < 8 + length + end:
        raise CheckpointError(
            f"{file} is cut short: {size} bytes, its header asks for {8 + length + end}"
        )
    return header
