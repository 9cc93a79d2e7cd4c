"""`megatron-vlm report RUN`: what a run logged, as one page, RUN/report.html."""

from pathlib import Path

from megatron_vlm.errors import ConfigError
from megatron_vlm.run.report.examples import read_examples
from megatron_vlm.run.report.metrics import read_metrics
from megatron_vlm.run.report.page import render_report


def write_report(run: Path) -> Path:
    """Write RUN/report.html from what the run has logged so far; its path."""
    metrics = read_metrics(run / "metrics.jsonl")
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    page = render_report(run.resolve().name, metrics, read_examples(run / "examples.json"), text)
    path = run / "report.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return path
