"""A Hugging Face checkpoint folder, opened for reading: config, tensor names, slices."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megatron_vlm.errors import CheckpointError
from megatron_vlm.family import family_of, read_config


@dataclass(frozen=True)
class TensorInfo:
    """Which file a tensor is in and what it is, from the file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. BF16


class HFCheckpoint:
    """Names, shapes and dtypes are read at once from the headers; data only slice by slice."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_config(self.path)
        self.family = family_of(self.config, self.path)
        self.sizes = self.family.sizes_of(self.config)
        self._open_files: dict[Path, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read_headers(self) -> None:
        """Fill `tensors` from the headers of the shards that the index names."""
        index = self.path / "model.safetensors.index.json"
        files = sorted(self.path.glob("*.safetensors"))
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted({self.path / name for name in weight_map.values()})
        if not files:
            raise CheckpointError(f"{self.path} has no *.safetensors files")
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, but {index.name} names it")
            for name, info in read_header(file).items():
                self.tensors[name] = TensorInfo(file, tuple(info["shape"]), info["dtype"])

    def read(self, name: str, spans: Sequence[tuple[int, int] | None]) -> Tensor:
        """A slice of one tensor, (start, end) for each leading dimension; None takes all of it."""
        file = self.tensors[name].file
        if file not in self._open_files:
            self._open_files[file] = safe_open(file, framework="pt")
        piece = self._open_files[file].get_slice(name)
        if not spans:
            return piece[:]
        return piece[tuple(slice(None) if span is None else slice(*span) for span in spans)]

    def close(self) -> None:
        """Unmap the files."""
        self._open_files.clear()


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without its metadata."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{file}: header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = max((info["data_offsets"][1] for info in header.values()), default=0)
    if size < 8 + length + end:
        raise CheckpointError(
            f"{file} is cut short: {size} bytes, its header asks for {8 + length + end}"
        )
    return header
