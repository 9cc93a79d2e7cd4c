"""Transfer of weights to the engines through memory that all of them share, one piece at a time."""

import asyncio
import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.engines.vllm_process import EngineDiedError, EngineProcess
from megatron_vlm.errors import CheckpointError

BUFFER_BYTES = 64 << 20


class SharedBuffer:
    """Memory without a name, which engines inherit. It is freed when all processes have ended."""

    def __init__(self, size: int = BUFFER_BYTES):
        self.size = size
        self.file = os.memfd_create("megatron-vlm-weights")
        os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[dict[str, Any]]:
        """Copy a tensor into the memory piece by piece, and yield a description of each piece. Ask
        for the next piece when all engines have copied the last one."""
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
    """Yield the same tensors. They must be all tensors of a checkpoint with these names, because an
    engine would silently keep the former values of missing tensors."""
    missing = set(names)
    for name, tensor in named:
        if name not in missing:
            raise CheckpointError(
                "is not in the engine's checkpoint, or came before",
                place="the weights",
                key=name,
                remedy="give each tensor of the checkpoint once, by its name there",
            )
        missing.remove(name)
        yield name, tensor
    if missing:
        raise CheckpointError(
            f"is one of the {len(missing)} tensors out of {len(names)} that are missing",
            place="the weights",
            key=min(missing),
            remedy="give each tensor of the engine's checkpoint, also those that did not change",
        )


async def stream(
    named: Iterable[tuple[str, Tensor]],
    engines: Sequence[EngineProcess],
    buffer: SharedBuffer,
    version: int,
) -> dict[EngineProcess, EngineDiedError]:
    """Send the tensors to all engines at once. Drop engines that die, and return them with their
    errors."""
    feeds = [Feed(engine, version) for engine in engines]
    died: dict[EngineProcess, EngineDiedError] = {}

    async def to_each(do: str, **fields: Any) -> None:
        results = await asyncio.gather(
            *(feed.ask(do, **fields) for feed in feeds), return_exceptions=True
        )
        for feed, result in list(zip(feeds, results, strict=True)):
            if isinstance(result, EngineDiedError):
                died[feed.engine] = result
                feeds.remove(feed)
            elif isinstance(result, BaseException):
                raise result

    try:
        # Tensors are taken in this thread although other tasks wait for it: taking a tensor may be
        # a collective on its device.
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
    """An engine that is loading streamed weights."""

    def __init__(self, engine: EngineProcess, version: int):
        self.engine = engine
        self.loading = asyncio.create_task(engine.ask("stream_weights", version=version))

    async def ask(self, do: str, **fields: Any) -> None:
        """Send a request to the engine. If the engine's loading has failed, raise that error
        instead: it explains more than the answer."""
        if do == "loaded":
            await self.loading
            return
        request = asyncio.create_task(self.engine.ask(do, **fields))
        await asyncio.wait({request, self.loading}, return_when=asyncio.FIRST_COMPLETED)
        if self.loading.done() and self.loading.exception() is not None:
            request.cancel()
            await asyncio.wait({request})
            self.loading.result()
        await request


# A copy of the newest weights stays on disk, for an engine that has to be restarted.

_DATA = "weights"


class WeightCache:
    """The tensors of the last successful update, in a temporary folder. It takes the disk space of
    the weights, twice while new ones arrive, and the memory of one tensor."""

    def __init__(self, parent: str | None = None):
        """Make the folder inside `parent`, by default inside TMPDIR."""
        self.folder = tempfile.TemporaryDirectory(prefix="megatron-vlm-weights-", dir=parent)
        self.index: list[dict[str, Any]] = []

    def write_through(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors, and write each one to disk. After the last one, they replace the
        former tensors."""
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
        """Yield the tensors, one at a time."""
        if not self.index:
            return
        with (
            (Path(self.folder.name) / _DATA).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory,
        ):
            for entry in self.index:
                count, dtype = entry["shape"].numel(), entry["dtype"]
                values = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["start"])
                yield entry["name"], values.view(entry["shape"]).clone()
                del values  # otherwise the memory could not be released

    def close(self) -> None:
        self.folder.cleanup()
