"""Checks of uploaded adapters, as for lora.path; errors name the fields of the request."""

import re
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.errors import CheckpointError, ConfigError, MegatronVLMError
from megatron_vlm.family.spec import ModelSizes, Part
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.lora.peft_folder import (
    ADAPTER_FILE,
    CONFIG,
    AdapterFolder,
    file_tensors,
    read_adapter_config,
)
from megatron_vlm.lora.targets import adapted_weights
from megatron_vlm.serve.http.schemas import LoraForm
from megatron_vlm.serve.served_models import ModelSettings

_SPARE = 2**20  # bytes of a header, and of the configuration
_WIDEST = 4  # bytes of a value in fp32
# Our keys as a request has them.
_NAMES = {
    r"lora\.rank": "lora_config.rank",
    r"lora\.targets": "lora_config",
    r" and lora\.train": "",
    r"model\.path": "base_model",
}


class AdapterChecks:
    """Checks of the adapters that are uploaded for a checkpoint."""

    def __init__(self, cfg: Config, sizes: ModelSizes) -> None:
        self.cfg, self.sizes = cfg, sizes
        self.lock = threading.Lock()

    @cached_property
    def source(self) -> HFCheckpoint:
        """A reader of the base model's files."""
        source = HFCheckpoint(self.cfg.model.path, self.cfg.data.add_tokens)
        source.read_headers()
        return source

    def file_limits(self, lora: LoraForm) -> Mapping[str, int]:
        """Return the files of such an adapter, and the most bytes that each may have."""
        if lora.rank > self.cfg.serve.max_rank:
            raise ConfigError(
                f": this service has serve.max_rank={self.cfg.serve.max_rank}",
                key="lora_config.rank",
                found=lora.rank,
                allowed="at most that",
            )
        settings = ModelSettings(lora.rank, 0, lora.targets)
        weights = adapted_weights(settings.config(self.cfg), self.sizes)
        values = sum(prod(tensor.shape) for tensor in file_tensors(weights, lora.rank))
        # PEFT copies the head's own weight next to its adapter.
        values += sum(weight.num_values for weight in weights if weight.part is Part.head)
        return {CONFIG: _SPARE, ADAPTER_FILE: _WIDEST * values + _SPARE}

    def settings(self, folder: Path, lora: LoraForm) -> dict[str, Any]:
        """Check an adapter, and return the settings of a model with it."""
        try:
            with self.lock:
                return asdict(self._settings(folder, lora))
        except MegatronVLMError as error:
            text = str(error).replace(f"lora.path={folder}", "the adapter")
            text = text.replace(f"{folder}/", "")
            for ours, theirs in _NAMES.items():
                text = re.sub(ours, theirs, text)
            raise CheckpointError(f": {text}", key="upload_id") from error

    def _settings(self, folder: Path, lora: LoraForm) -> ModelSettings:
        config = read_adapter_config(folder)
        rslora = config.get("use_rslora")
        settings = ModelSettings(
            lora.rank,
            0,
            lora.targets,
            float(config["lora_alpha"].number(0)),
            bool(rslora and rslora.value),
        )
        cfg = settings.config(self.cfg)
        adapter = AdapterFolder(
            str(folder), cfg.lora, adapted_weights(cfg, self.sizes), self.source
        )
        for name in adapter.tensors:
            adapter.read(name)  # raises where values are not finite
        if settings.alpha == self.cfg.serve.lora_alpha and not settings.rslora:
            return ModelSettings(lora.rank, 0, lora.targets)
        return settings
