"""Checkpoints of a run's folder, as a reader finds them."""

from contextlib import ExitStack
from pathlib import Path

from megatron_vlm.checkpoint.run_checkpoints import hold_latest


def find_latest(run_folder: Path) -> Path | None:
    """Return the checkpoint that was written last among those that are whole and unchanged."""
    with ExitStack() as reading:
        return hold_latest(run_folder, reading)
