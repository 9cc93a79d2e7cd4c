"""Transfer of weights to the engines through memory that all of them share, one piece at a time.
`stored_tensors` in hf/gather_weights.py yields them, under Hugging Face's names and in the dtypes
of the source checkpoint."""

import asyncio
import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.engines.server.cuda_memory import CudaMemory
from megatron_vlm.engines.vllm_process import EngineProcess
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.hf_checkpoint import weight_files
from megatron_vlm.io.child import ChildDiedError

BUFFER_BYTES = 64 << 20


class SharedBuffer:
    """Memory that engines share with this process: memory of the host without a name, which engines
    inherit, and memory of a GPU on which all of them are as well, if there is one. Both are freed
    when all processes have ended."""

    def __init__(self, size: int = BUFFER_BYTES):
        self.size = size
        self.file = os.memfd_create("megatron-vlm-weights")
        os.ftruncate(self.file, size)
        self.memory = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        self.on_gpu: tuple[Tensor, str] | None = None

    def memory_for(
        self, device: torch.device, gpus: Collection[str]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the memory for weights on a device, as a tensor of bytes, and what the engines on
        `gpus` need to find it: nothing for that of the host."""
        if device.type == "cuda":
            shared = CudaMemory(device.index)
            if set(gpus) == {shared.uuid()}:
                self.on_gpu = self.on_gpu or shared.allocate(self.size)
                return self.on_gpu[0], {"handle": self.on_gpu[1], "size": self.size}
        return self.memory, {}

    def close(self) -> None:
        del self.memory
        os.close(self.file)


def pack_pieces(
    memory: Tensor, named: Iterable[tuple[str, Tensor]]
) -> Iterator[list[dict[str, Any]]]:
    """Copy tensors into the memory, one after the other. Yield the parts that it holds, as
    server/weight_pieces.py describes them, each time that it is full, and at the end. Ask for the
    next piece when all engines have copied the last one."""
    parts: list[dict[str, Any]] = []
    filled = 0
    for name, tensor in named:
        values = tensor.detach().contiguous().flatten().view(torch.uint8)
        about = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": len(values),
        }
        start = 0
        while start < len(values):
            count = min(len(values) - start, len(memory) - filled)
            memory[filled : filled + count].copy_(values[start : start + count])
            parts.append({**about, "start": start, "offset": filled, "count": count})
            start, filled = start + count, filled + count
            if filled == len(memory):
                yield parts
                parts, filled = [], 0
    if parts:
        yield parts


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


def read_folder(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint's folder as they are stored, one at a time."""
    for file in weight_files(Path(folder)):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


async def ask_each(
    engines: Collection[EngineProcess], do: str, **fields: Any
) -> dict[EngineProcess, ChildDiedError]:
    """Send a request to all engines at once. Return those that died, with their errors."""
    requests = [engine.ask(do, **fields) for engine in engines]
    results = await asyncio.gather(*requests, return_exceptions=True)
    died = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, ChildDiedError):
            died[engine] = result
        elif isinstance(result, BaseException):
            raise result
    return died


async def stream(
    named: Iterable[tuple[str, Tensor]],
    engines: Collection[EngineProcess],
    buffer: SharedBuffer,
    version: int,
) -> dict[EngineProcess, ChildDiedError]:
    """Send the tensors to all engines at once. Return the engines that died, with their errors."""
    died: dict[EngineProcess, ChildDiedError] = {}

    async def to_each(do: str, **fields: Any) -> None:
        died.update(await ask_each(engines, do, **fields))

    # Tensors are taken in this thread although other tasks wait for it: taking a tensor may be a
    # collective on its device.
    rest = iter(named)
    first = next(rest)
    memory, where = buffer.memory_for(
        first[1].device, [gpu for each in engines for gpu in each.gpus]
    )
    await to_each("start_weights", **where)
    for parts in pack_pieces(memory, chain([first], rest)):
        if memory.is_cuda:
            torch.accelerator.synchronize(memory.device)
        await to_each("piece", parts=parts)
    await to_each("finish_weights", version=version)
    return died


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
                    yield name, tensor
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
