"""`megatron-vlm report RUN ...`: the log of one run, or of several, as one page."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile, real_path
from megatron_vlm.report.charts import chart_css, chart_scripts
from megatron_vlm.report.heat import heat_css, heat_script
from megatron_vlm.report.html import document
from megatron_vlm.report.run.comparison import comparison_page
from megatron_vlm.report.run.metrics_arrays import LoggedRun, read_metrics
from megatron_vlm.report.run.page import run_page

_MAX_CONFIG_BYTES = 2**20


def write_report(*folders: Path, out: Path | None = None) -> Path:
    """Write the page of the lines that these runs have logged so far, and return its path. Without
    `out` it is RUN/report.html, and FIRST_RUN/comparison.html for several runs."""
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    if len(runs) == 1:
        [run], [folder] = runs, folders
        title, body = f"{run.name}: training report", run_page(run, folder)
    else:
        title, body = f"{len(runs)} runs compared", comparison_page(runs)
    has_map = len(runs) == 1 and runs[0].metrics.loads
    scripts = (*chart_scripts(), *[heat_script()] * bool(has_map))
    css = chart_css() + heat_css() + Path(__file__).with_name("report.css").read_text()
    path = out or folders[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    try:
        path.write_text(document(title, css, body, scripts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", place=str(path)) from error
    return path


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
