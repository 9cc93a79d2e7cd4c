"""The picture of the report in the README, light and dark, of the run of `make demo`:

    make demo && python scripts/report_picture.py .demo/run

It needs Chromium on the path.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from megatron_vlm.report.run import write_report

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = (1200, 1210)
PICTURES = {"report.png": 1, "report-dark.png": 0}  # Chromium's numbers of the colour schemes
COLOURS = 256  # A palette keeps the files small.


def take(page: Path, scheme: int, out: Path) -> None:
    """Write a picture of the top of a page."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        width, height = SIZE
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--force-device-scale-factor=1", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={width},{height}", f"--screenshot={shot}"]
        command += [f"--blink-settings=preferredColorScheme={scheme}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        with Image.open(shot) as opened:
            opened.convert("RGB").quantize(COLOURS).save(out, optimize=True)
    print(f"wrote {out}")


def main(run: Path) -> int:
    """Write the page of the run, and both pictures of it."""
    page = write_report(run).resolve()
    for name, scheme in PICTURES.items():
        take(page, scheme, IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
