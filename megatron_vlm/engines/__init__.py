"""Samples from an engine that runs next to the trainer.

sampler = await VllmSampler.start(EngineSettings(python, folder))
samples = await sampler.sample(row, SamplingSettings(max_tokens=64), seeds=[0, 1, 2, 3])
await sampler.update(worker.named_weights(), version=1)
"""

from megatron_vlm.engines.sampler import Adapter, Checkpoint, Sampler, SamplerError, Weights
from megatron_vlm.engines.vllm_process import EngineSettings
from megatron_vlm.engines.vllm_sampler import VllmSampler

__all__ = [
    "Adapter",
    "Checkpoint",
    "EngineSettings",
    "Sampler",
    "SamplerError",
    "VllmSampler",
    "Weights",
]
