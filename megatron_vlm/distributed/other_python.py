"""Programs in the Python of another environment, such as the one that has vLLM."""

import subprocess

from megatron_vlm.distributed.process import without_job


class CannotStartError(Exception):
    """A reason why a Python gives no answer."""


def environment_elsewhere(*prefixes: str) -> dict[str, str]:
    """Return the variables for another Python, without its like and those with a prefix."""
    unfit = ("PYTHON", *prefixes)
    return {name: value for name, value in without_job().items() if not name.startswith(unfit)}


def output_of(python: str, program: str, patience_s: float) -> str | None:
    """Return what a program prints in another Python; None if it fails. Raise CannotStartError if
    there is no such Python, or it does not answer in time."""
    try:
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=patience_s,
            env=environment_elsewhere(),
        )
    except OSError as error:
        raise CannotStartError(error.strerror) from error
    except subprocess.TimeoutExpired as error:
        raise CannotStartError("it does not answer") from error
    return None if done.returncode else done.stdout.strip()
