"""The picture of the report in the README, light and dark, of the run of `make demo`:

    make demo && python scripts/report_picture.py .demo/run

It shows the page without its tables, and without the charts of each step but the loss, which leaves
room for scores and answers. It needs Chromium on the path.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image

from megatron_vlm.report.charts import Charts
from megatron_vlm.report.html import render_page
from megatron_vlm.report.run import read_report
from megatron_vlm.report.sections import Table

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = (1200, 1895)
PICTURES = {"report.png": 1, "report-dark.png": 0}  # Chromium's numbers of the colour schemes
COLOURS = 256  # A palette keeps the files small.


def take(page: Path, scheme: int, out: Path) -> None:
    """Write a picture of the top of a page."""
    shot = page.with_suffix(".png")
    width, height = SIZE
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--force-device-scale-factor=1", f"--user-data-dir={page.parent}/profile"]
    command += [f"--window-size={width},{height}", f"--screenshot={shot}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(shot) as opened:
        opened.convert("RGB").quantize(COLOURS).save(out, optimize=True)
    print(f"wrote {out}")


def main(run: Path) -> int:
    """Take both pictures of the page of the run."""
    report = read_report(run)
    parts = [
        part
        for part in report.sections
        if not isinstance(part, Table)
        and not (isinstance(part, Charts) and "Learning rate" in [c.title for c in part.charts])
    ]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(render_page(replace(report, sections=parts)), encoding="utf-8")
        for name, scheme in PICTURES.items():
            take(page, scheme, IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
