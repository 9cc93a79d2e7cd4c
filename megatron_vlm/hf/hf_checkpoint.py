"""Hugging Face checkpoint, from a folder or a name on the Hub, opened for reading: config, tensor
names, slices. With tokens to add it reads as if they and their rows were already in it."""

import os
import reprlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import extra_head
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family import family_of, read_config
from megatron_vlm.family.added_tokens import find_new_tokens
from megatron_vlm.family.decoder_layers import MtpHeadSpec
from megatron_vlm.family.spec import SCORE, lacks_mtp_head
from megatron_vlm.hf.block_weight import StoredBlocks, find_blocks
from megatron_vlm.hf.expert_layouts import ExpertStorage, Span, find_form, slices_of
from megatron_vlm.io.hub import folder_of, pin
from megatron_vlm.io.untrusted import JsonField, UntrustedFile, what_is_at

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 2**28  # maximum number of bytes; safetensors itself accepts 100 MB
# Dtypes of trainable weights, by safetensors' names.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_ROWS = 2**14  # number of rows to read at a time


@dataclass(frozen=True)
class TensorInfo:
    """Location and type of a tensor, from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. BF16
    num_bytes: int


class HFCheckpoint:
    """Checkpoint whose headers are read at once, and whose data is read slice by slice."""

    def __init__(
        self, path: str | Path, add_tokens: Sequence[str] = (), extra_head: str | None = None
    ):
        """Open the checkpoint. `add_tokens` is data.add_tokens. `extra_head` is as in `read_sizes`;
        if there is no scalar head, it reads as if it had a new one."""
        self.name = pin(str(path))  # in the form of `model.path`
        self.path = folder_of(self.name)
        self.config = read_config(self.path)
        self.family = family_of(self.config, self.path)
        self.new_tokens = find_new_tokens(self.path, add_tokens)
        self.stored_vocab: int = self.config.text_config.vocab_size
        if self.new_tokens is not None:
            self.new_tokens.grow(self.config)
        self.sizes = self.family.sizes_of(self.config).with_extra_head(extra_head, self.name)
        self.has_new_score = False
        self._means: dict[str, Tensor] = {}  # means of the rows of known tokens
        self._open_files: dict[Path, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}  # the stored form
        # Tensors that an export copies, see `Family.passthrough`.
        self.passthrough: dict[str, TensorInfo] = {}
        self.in_blocks: dict[str, StoredBlocks] = {}  # tensors that are stored in 4 bits
        self._files: dict[str, Path] = {}  # file of every stored tensor
        self.is_untied = False  # see `untied`
        self.experts = self.mtp_experts = ExpertStorage.out_in

    @staticmethod
    def of(cfg: Config, path: str | None = None) -> "HFCheckpoint":
        """Open the checkpoint of a configuration, or another one in its place."""
        return HFCheckpoint(path or cfg.model.path, cfg.data.add_tokens, extra_head(cfg))

    def read_headers(self) -> None:
        """Fill `tensors` and `passthrough` from the headers of the weight files. If two files have
        the same tensor, the last one counts, as in transformers. The files of a name on the Hub are
        downloaded now."""
        folder_of(self.name, weights=True)
        patterns = () if self.sizes.trains_mtp else self.family.passthrough
        for file in weight_files(self.path):
            for name, info in read_header(file).items():
                shape = tuple(info["shape"])
                start, end = info["data_offsets"]
                num_bytes = end - start
                if self._has_rows_of_tokens(name) and shape[:1] == (self.stored_vocab,):
                    num_bytes = num_bytes // self.stored_vocab * self.sizes.text.vocab
                    shape = (self.sizes.text.vocab, *shape[1:])
                passes = any(fnmatchcase(name, pattern) for pattern in patterns)
                kind = self.passthrough if passes else self.tensors
                kind[name] = TensorInfo(file, shape, info["dtype"], num_bytes)
                self._files[name] = file
        self._find_blocks()
        if self.sizes.has_score:
            self.tensors.pop(self.sizes.names.head, None)
            self.has_new_score = SCORE not in self.tensors
        if self.has_new_score:
            like, shape = self.tensors[self.sizes.names.embedding], self.sizes.shapes[SCORE]
            num_bytes = prod(shape) * FLOATS[like.dtype].itemsize
            self.tensors[SCORE] = TensorInfo(like.file, shape, like.dtype, num_bytes)
        mtp_names = {name for name in self.tensors if name.startswith(MtpHeadSpec.prefix)}
        if self.sizes.trains_mtp and not mtp_names:
            raise lacks_mtp_head(self.name)
        if self.sizes.text.experts is not None:
            mtp_shapes = {name: self.tensors[name].shape for name in mtp_names}
            shapes = {n: info.shape for n, info in self.tensors.items() if n not in mtp_names}
            self.experts = find_form(str(self.path), shapes, self.sizes)
            self.mtp_experts = find_form(str(self.path), mtp_shapes, self.sizes)

    def form_of(self, name: str) -> ExpertStorage:
        """Return the form in which a tensor is stored if it is of experts. An MTP head may
        have another form than the model."""
        return self.mtp_experts if name.startswith(MtpHeadSpec.prefix) else self.experts

    def stored_name(self, name: str) -> str:
        """Return the tensor that has a weight's values: the embedding for a tied head."""
        names = self.sizes.names
        return names.embedding if self.sizes.tied and name == names.head else name

    def stored_names(self, name: str) -> list[str]:
        """Return the names under which a tensor is stored: a tied embedding also as the head, where
        the checkpoint does so, and experts in its form."""
        names = self.sizes.names
        if name == names.embedding and self.sizes.tied and names.head in self.tensors:
            return [name, names.head]
        return list(self.form_of(name).stored(name, self.sizes.shapes[name]))

    def as_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return a tensor under the names and in the form in which the checkpoint stores it."""
        names, values = self.stored_names(name), self.form_of(name).split(name, tensor)
        return zip(names, values * (len(names) // len(values)), strict=True)

    def _find_blocks(self) -> None:
        """Find the tensors in 4 bits, and describe the values that they stand for."""
        for kind in (self.tensors, self.passthrough):
            shapes = {name: info.shape for name, info in kind.items()}
            for stored in find_blocks(str(self.path), shapes, self._read_stored):
                num_bytes = prod(stored.shape) * FLOATS[stored.dtype].itemsize
                file = kind[stored.name].file
                kind[stored.name] = TensorInfo(file, stored.shape, stored.dtype, num_bytes)
                self.in_blocks[stored.name] = stored
                for name in stored.side_tensors:
                    del kind[name]

    def is_in_blocks(self, name: str) -> bool:
        """Return whether all stored tensors of a weight are in 4 bits."""
        stored = self.form_of(name).stored(name, self.sizes.shapes[name])
        return self.in_blocks.keys() >= stored.keys()

    def without_tied_head(self) -> "HFCheckpoint":
        """Return the same checkpoint with a separate head, in the embedding's dtype. It serves the
        export of a tied model whose head is now a different matrix from the embedding."""
        checkpoint = copy(self)
        checkpoint.sizes = replace(self.sizes, tied=False, tensors=self.sizes.with_head)
        head = self.sizes.names.head
        checkpoint.tensors = {**self.tensors, head: self.tensors[self.stored_name(head)]}
        checkpoint.is_untied = True
        return checkpoint

    def read(self, name: str, spans: Sequence[Span]) -> Tensor:
        """Read a slice of one tensor, (start, end) or None for each leading dimension."""
        if name == SCORE and self.has_new_score:
            return self._new_score()
        if self.new_tokens is not None and self._has_rows_of_tokens(name):
            return self._read_grown(name, *(spans or [None]))
        return self.form_of(name).read(self._read, name, spans)

    def _new_score(self) -> Tensor:
        """Return the values of a new scalar head: normal ones with the standard deviation of
        transformers, the same in every run."""
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self.sizes.shapes[SCORE], generator=generator)
        return values * self.config.text_config.initializer_range

    def read_passthrough(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that an export copies, as they are stored."""
        for name in sorted(self.passthrough):
            tensor = self._read(name, ())
            if name in self.in_blocks:
                tensor = tensor.to(FLOATS[self.passthrough[name].dtype])
            yield name, tensor
        self.close()

    def _read(self, name: str, spans: Sequence[Span]) -> Tensor:
        """Read the values of a stored tensor: those in 4 bits in fp32, all others as they are."""
        if (stored := self.in_blocks.get(name)) is not None:
            return stored.read(self._read_stored, spans)
        return self._read_stored(name, spans)

    def _read_stored(self, name: str, spans: Sequence[Span]) -> Tensor:
        file = self._files[name]
        with _untrusted_file(file).wrap_errors(f"{name} cannot be read"):
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            piece = self._open_files[file].get_slice(name)
            return piece[slices_of(spans) if spans else slice(None)]

    def _has_rows_of_tokens(self, name: str) -> bool:
        return name in (self.sizes.names.embedding, self.sizes.names.head)

    def _read_grown(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Return rows of the embedding or the head. The rows of new tokens are the mean of the rows
        of all known tokens; all others are the stored rows, including spare rows after the new
        ones."""
        assert self.new_tokens is not None
        start, end = rows or (0, self.sizes.text.vocab)
        stored = self._read(name, [(min(start, self.stored_vocab), min(end, self.stored_vocab))])
        grown = torch.cat([stored, stored.new_empty(end - start - len(stored), stored.shape[1])])
        first = self.new_tokens.first
        last = first + len(self.new_tokens.names)
        if start < last and end > first:
            if name not in self._means:
                self._means[name] = self._mean(name, first)
            mean = self._means[name].to(grown.dtype)
            grown[max(first - start, 0) : last - start] = mean
        return grown

    def _mean(self, name: str, count: int) -> Tensor:
        """Return the mean of the first rows, read part by part."""
        total = torch.zeros(self.tensors[name].shape[1], dtype=torch.float64)
        for start in range(0, count, _ROWS):
            rows = self._read(name, [(start, min(start + _ROWS, count))])
            total += rows.sum(0, dtype=torch.float64)
        return total / count

    def close(self) -> None:
        """Unmap the files."""
        self._open_files.clear()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads: model.safetensors, or otherwise those that the
    index names, in the order of their names. Any other files are not part of the checkpoint."""
    if os.path.lexists(folder / "adapter_config.json"):
        raise CheckpointError(
            "the folder has an adapter_config.json, and an adapter is not a whole model",
            place=str(folder),
            remedy="to continue from it, give its base model as model.path and the adapter as "
            "lora.path",
        )
    if os.path.lexists(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if not os.path.lexists(folder / INDEX):
        files = sorted(f.name for end in ("safetensors", "bin") for f in folder.glob(f"*.{end}"))
        raise CheckpointError(
            f"the folder has no {WEIGHTS_FILE} and no {INDEX}, but "
            f"{', '.join(files) or 'no weights at all'}",
            place=str(folder),
            found=files,
            remedy="give a folder as save_pretrained or `hf download` writes it",
        )
    return [folder / name for name in sorted(set(_files_of_index(folder / INDEX)))]


def _files_of_index(index: Path) -> Iterator[str]:
    """Yield the files that an index names; they must be inside the index's folder."""
    for field in _untrusted_file(index).json()["weight_map"].object().values():
        path = PurePosixPath(field.value) if isinstance(field.value, str) else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                "is not a file inside the folder of the index",
                place=str(index),
                key=field.name,
                found=field.value,
                remedy="download the checkpoint again, or move the file there and name it so",
            )
        file = index.parent / path
        with _untrusted_file(index).wrap_errors(f"it names {reprlib.repr(field.value)}"):
            kind = what_is_at(file)
        if kind != "a file":
            instead = "missing" if kind == "nothing" else kind
            raise CheckpointError(
                f"the file is {instead}, but {index.name} names it", place=str(file)
            )
        yield field.value


def read_header(file: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file, without its metadata: the dtype, shape and
    data_offsets of each tensor. The offsets are checked to be inside the file."""
    with _untrusted_file(file).wrap_errors("cannot be read"):
        kind = what_is_at(file)
    if kind != "a file":
        raise _untrusted_file(file).error(f"there is {kind} in its place")
    with _untrusted_file(file).wrap_errors("cannot be read"), open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"the header has {length} bytes in a file of {size}", place=str(file)
            )
        text = stream.read(length)
    outside = _untrusted_file(f"{file}: its header is damaged")
    tensors = JsonField(outside.parse(text), "", outside).object()
    tensors.pop("__metadata__", None)
    end = 0
    for tensor in tensors.values():
        tensor["dtype"].string()
        for side in tensor["shape"].items():
            side.whole()
        offsets = [place.whole() for place in tensor["data_offsets"].items()]
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise tensor["data_offsets"].error("the two places where the tensor begins and ends")
        end = max(end, offsets[1])
    if size < 8 + length + end:
        raise CheckpointError(
            f"the file is cut short: it has {size} bytes, and its header needs {8 + length + end}",
            place=str(file),
        )
    return {name: tensor.value for name, tensor in tensors.items()}


def _untrusted_file(file: Path | str) -> UntrustedFile:
    return UntrustedFile(str(file), CheckpointError, "download it again")
