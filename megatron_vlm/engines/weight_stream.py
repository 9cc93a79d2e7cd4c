"""Weights on their way to the engines: through memory that all of them see, a piece at a time."""

import asyncio
import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.engines.vllm_process import Engine, EngineDiedError
from megatron_vlm.errors import CheckpointError

BUFFER_BYTES = 64 << 20


class SharedBuffer:
    """Memory without a name, which engines inherit: nothing is left of it when all have ended."""

    def __init__(self, size: int = BUFFER_BYTES):
        self.size = size
        self.file = os.memfd_create("megatron-vlm-weights")
        os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[dict[str, Any]]:
        """Put a tensor into the memory, piece by piece, and say so of each. The next one may come
        when all engines have copied the last."""
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        about = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": len(values),
        }
        for start in range(0, len(values), self.size):
            piece = values[start : start + self.size]
            self.memory[: len(piece)] = piece.data
            yield {**about, "piece": len(piece)}

    def close(self) -> None:
        self.memory.close()
        os.close(self.file)


def complete_weights(
    named: Iterable[tuple[str, Tensor]], names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The same, which must be the tensors of a checkpoint with these names: an engine would keep
    the former values of those that are missing, and say nothing."""
    left = set(names)
    for name, tensor in named:
        if name not in left:
            raise CheckpointError(
                "is not in the engine's checkpoint, or came before",
                place="the weights",
                key=name,
                remedy="give each tensor of the checkpoint once, by its name there",
            )
        left.remove(name)
        yield name, tensor
    if left:
        raise CheckpointError(
            f"is one of the {len(left)} tensors out of {len(names)} that are missing",
            place="the weights",
            key=min(left),
            remedy="give each tensor of the engine's checkpoint, also those that did not change",
        )


async def stream(
    named: Iterable[tuple[str, Tensor]],
    engines: Sequence[Engine],
    buffer: SharedBuffer,
    version: int,
) -> dict[Engine, EngineDiedError]:
    """Give the tensors to all engines at once. Those that die are left behind, and returned."""
    feeds = [Feed(engine, version) for engine in engines]
    died: dict[Engine, EngineDiedError] = {}

    async def to_each(do: str, **fields: Any) -> None:
        found = await asyncio.gather(
            *(feed.ask(do, **fields) for feed in feeds), return_exceptions=True
        )
        for feed, each in list(zip(feeds, found, strict=True)):
            if isinstance(each, EngineDiedError):
                died[feed.engine] = each
                feeds.remove(feed)
            elif isinstance(each, BaseException):
                raise each

    try:
        # In this thread, though others wait: taking a tensor may be a collective on its device.
        for name, tensor in named:
            for piece in buffer.pieces(name, tensor):
                await to_each("piece", **piece)
        await to_each("end")
        await to_each("loaded")
    finally:
        for feed in feeds:
            feed.loading.cancel()
    return died


class Feed:
    """An engine that is loading what it is given."""

    def __init__(self, engine: Engine, version: int):
        self.engine = engine
        self.loading = asyncio.create_task(engine.ask("stream_weights", version=version))

    async def ask(self, do: str, **fields: Any) -> None:
        """Of the engine; what has ended its loading says more than its answer."""
        if do == "loaded":
            await self.loading
            return
        asked = asyncio.create_task(self.engine.ask(do, **fields))
        await asyncio.wait({asked, self.loading}, return_when=asyncio.FIRST_COMPLETED)
        if self.loading.done() and self.loading.exception() is not None:
            asked.cancel()
            await asyncio.wait({asked})
            self.loading.result()
        await asked


# A copy of the newest weights on disk, for an engine that has to be started again.

_DATA = "weights"


class WeightCache:
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
