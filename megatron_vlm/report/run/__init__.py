"""`megatron-vlm report RUN ...`: the log of one run, or of several, as one page."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile, real_path
from megatron_vlm.report.html import render_page
from megatron_vlm.report.run.metrics_arrays import LoggedRun, read_metrics
from megatron_vlm.report.run.page import comparison_report, run_report
from megatron_vlm.report.sections import Report

_MAX_CONFIG_BYTES = 2**20


def write_report(*folders: Path, out: Path | None = None) -> Path:
    """Write the page of the lines that these runs have logged so far, and return its path. Without
    `out` it is RUN/report.html, and FIRST_RUN/comparison.html for several runs."""
    page = render_page(read_report(*folders))
    path = out or folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", place=str(path)) from error
    return path


def read_report(*folders: Path) -> Report:
    """Return the report of one run, or of several that are compared."""
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    return run_report(runs[0], folders[0]) if len(runs) == 1 else comparison_report(runs, folders)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as are needed to distinguish the runs."""
    paths = [real_path(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"{len(paths)} runs were given, {len(set(paths))} of them different",
            place="report",
            remedy="give each run once",
        )
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def _read(folder: Path, name: str) -> LoggedRun:
    config = folder / "config.yaml"
    text = ""
    if os.path.lexists(config):
        text = UntrustedFile(str(config)).content(_MAX_CONFIG_BYTES).decode(errors="replace")
    return LoggedRun(name, read_metrics(folder / "metrics.jsonl"), text)
