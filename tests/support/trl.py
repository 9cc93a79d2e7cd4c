"""TRL itself, in its own environment (make trl-env)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parents[2] / ".venv-trl" / "bin" / "python"


def run_trl(script: str, *arguments: object, given: Any = None) -> Any:
    """Run a script of this folder there, and return the JSON that it prints."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name(script), *map(str, arguments)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_"))},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)
