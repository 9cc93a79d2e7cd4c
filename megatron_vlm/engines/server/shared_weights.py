"""Transfer of whole weights to vLLM's workers, which copy them from memory of the trainer.

Each worker imports this module before it loads a model, because the class of its extension is here.
The transfer is then known to vLLM by its name, and faults of vLLM are corrected.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cuda_memory import CudaMemory
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm_fixes import adapt_values_as_keys, fix_vllm_on_cpu
from weight_pieces import Message, TensorAssembly


@dataclass
class MemoryInfo(WeightTransferInitInfo):
    """The memory of the trainer: a file that this process can open, or memory of `size` bytes on
    its GPU."""

    path: str
    handle: str | None
    size: int


@dataclass
class PieceInfo(WeightTransferUpdateInfo):
    """The parts of tensors that the memory holds (see weight_pieces.py)."""

    parts: list[Message]


class SharedWeights(WeightTransferEngine[MemoryInfo, PieceInfo]):
    """A worker's end of the transfer. The model takes its own part of each tensor. An MTP
    head is another model of the worker, which takes its tensors afterwards, in an update without
    parts. It shares the embedding and the head of the model."""

    init_info_cls, update_info_cls = MemoryInfo, PieceInfo
    where: MemoryInfo | None = None
    memory: torch.Tensor
    arriving: TensorAssembly
    mtp_tensors: dict[str, torch.Tensor]

    def init_transfer_engine(self, init_info: MemoryInfo) -> None:
        if init_info == self.where:
            return
        self.where = init_info
        if init_info.handle is not None:
            self.memory = CudaMemory(self.device.index).open(init_info.handle, init_info.size)
            return
        with open(init_info.path, "r+b") as file:
            self.memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def start_weight_update(self) -> None:
        if not self._is_of_mtp_head:
            new = partial(torch.empty, dtype=torch.uint8, device=self.memory.device)
            self.arriving, self.mtp_tensors = TensorAssembly(self.memory, new), {}
        initialize_layerwise_reload(self.model)

    @property
    def _is_of_mtp_head(self) -> bool:
        return self.model_config is not self.vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class waits for an accelerator in any case
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PieceInfo) -> None:
        named = self._complete_tensors(update_info.parts)
        if self._is_of_mtp_head:
            named, self.mtp_tensors = iter(self.mtp_tensors.items()), {}
        with disable_mtp_completeness_check():  # no piece has all weights
            self.model.load_weights(named)

    def _complete_tensors(self, parts: list[Message]) -> Iterator[tuple[str, torch.Tensor]]:
        drafts = self.vllm_config.speculative_config is not None
        for about, values in self.arriving.take(parts):
            tensor = values.view(getattr(torch, about["dtype"])).view(about["shape"])
            if drafts and about["name"].startswith("mtp."):
                self.mtp_tensors[about["name"]] = tensor.clone()
            yield about["name"], tensor

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Methods that vLLM's workers lack. Each of them imports the module of this class."""

    device: torch.device

    def name_of_gpu(self) -> str | None:
        """Return the name of this worker's GPU, if it has one."""
        return None if self.device.type != "cuda" else CudaMemory(self.device.index).uuid()


WeightTransferEngineFactory.register_engine("shared", SharedWeights)
adapt_values_as_keys()
if current_platform.is_cpu():
    fix_vllm_on_cpu()
