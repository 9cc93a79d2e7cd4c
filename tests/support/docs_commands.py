"""Commands of the docs, as tests run them."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_in_docs(page: str, program: str, python: Path, cwd: Path, changes: dict[str, str]) -> None:
    """Run the command of a page that calls `program`, by this Python, after the changes."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    [line] = [each.strip() for each in text.splitlines() if f" -m {program} " in each]
    for old, new in {**changes, " python ": f" {python} "}.items():
        assert old in line, (old, line)
        line = line.replace(old, new)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_", "OPENAI"))}
    done = subprocess.run(
        line,
        shell=True,
        cwd=cwd,
        env=env | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
