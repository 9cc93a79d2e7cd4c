"""Record of a benchmark's figures in the terminal, docs/benchmarks.md and .bench/latest.json."""

import datetime
import json
import os
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "benchmarks.md"
LATEST = ROOT / ".bench" / "latest.json"


def record(name: str, figures: dict[str, float]) -> None:
    """Print a table of the figures, and write it as `write_section` does."""
    lines = [f"| {key} | {value:,.3g} |" for key, value in figures.items()]
    write_section(name, ["| figure | value |", "|---|---|", *lines], figures)


def write_section(name: str, table: list[str], figures: dict[str, float]) -> None:
    """Print a table, write it between the marks `name begin` and `name end` of the document, and
    merge the figures into .bench/latest.json."""
    text = "\n".join(table)
    print(text)
    LATEST.parent.mkdir(exist_ok=True)
    known = json.loads(LATEST.read_text()) if LATEST.exists() else {}
    LATEST.write_text(json.dumps(known | figures, indent=2) + "\n")
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    head, rest = DOC.read_text().split(begin)
    tail = rest.split(end)[1]
    where = (
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    DOC.write_text(f"{head}{begin}\n\nMeasured {where}.\n\n{text}\n\n{end}{tail}")


def cpu_name() -> str:
    """Return the name that Linux reports for the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown CPU"
