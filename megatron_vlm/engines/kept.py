"""A copy of the newest weights on disk, for an engine that has to be started again."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.errors import CheckpointError

_DATA = "weights"


class Kept:
    """The tensors of the last update that went through, in a folder of its own. It takes the disk
    that they take, twice while new ones come, and the memory of one."""

    def __init__(self, parent: str | None = None):
        """In a folder inside `parent`, by default of TMPDIR."""
        self.folder = tempfile.TemporaryDirectory(prefix="megatron-vlm-weights-", dir=parent)
        self.index: list[dict[str, Any]] = []

    def through(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same, each tensor kept on its way; with the last one, they take the place of the
        former ones."""
        index: list[dict[str, Any]] = []
        partial = Path(self.folder.name) / f"{_DATA}.partial"
        try:
            with partial.open("wb") as file:
                for name, tensor in named:
                    values = tensor.detach().cpu().contiguous()
                    index.append(
                        {
                            "name": name,
                            "dtype": values.dtype,
                            "shape": values.shape,
                            "start": file.tell(),
                        }
                    )
                    file.write(values.flatten().view(torch.uint8).numpy().data)
                    yield name, values
        except OSError as error:
            raise CheckpointError(
                f"the newest weights cannot be kept for an engine that dies: {error.strerror}",
                place=str(partial),
                remedy="free space there, or give `keep` another folder",
            ) from error
        os.replace(partial, Path(self.folder.name) / _DATA)
        self.index = index

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one at a time."""
        if not self.index:
            return
        with (
            (Path(self.folder.name) / _DATA).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory,
        ):
            for each in self.index:
                count, dtype = each["shape"].numel(), each["dtype"]
                values = torch.frombuffer(memory, dtype=dtype, count=count, offset=each["start"])
                yield each["name"], values.view(each["shape"]).clone()
                del values  # or the memory could not be given back

    def close(self) -> None:
        self.folder.cleanup()
