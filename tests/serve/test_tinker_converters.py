# make tinker-env, then .venv/bin/python -m pytest tests/serve/test_tinker_converters.py
"""The public Tinker client reads what the service writes and writes what it reads:
tests/support/tinker_client/converters.py, in the client's own environment."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"


@pytest.mark.slow  # the client takes some seconds to import, and torch with it
@pytest.mark.engine("tinker")
def test_the_clients_converters_and_ours():
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
        + ["tests/support/tinker_client/converters.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
