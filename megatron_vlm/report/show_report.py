"""Output of a command's report: the terminal, and the page of --html."""

from rich.console import Console

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import home_path
from megatron_vlm.report.html import render_page
from megatron_vlm.report.sections import Report
from megatron_vlm.report.terminal import print_report


def show_report(report: Report, html: str | None) -> None:
    """Print a report, and write it as a page if `html` is a path."""
    console = Console(highlight=False)
    print_report(report, console)
    if html is None:
        return
    try:
        home_path(html).write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key="--html", found=html
        ) from error
    console.print(escape_controls(f"wrote {html}"), markup=False, soft_wrap=True)
