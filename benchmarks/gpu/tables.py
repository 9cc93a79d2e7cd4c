"""The figures of a run as Markdown, for docs/verified.md and docs/benchmarks.md."""

import datetime
import json
from pathlib import Path
from typing import Any


def write_tables(figures: Path, out: Path) -> bool:
    """Write the tables; return whether all comparisons held."""
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    text = [f"Measured {datetime.date.today()}.", ""]
    right = True
    for step in dict.fromkeys(line["step"] for line in lines):
        text += [f"## {step}", "", "| figure | value |", "|---|---|"]
        for line in lines:
            if line["step"] == step:
                right &= not (
                    isinstance(line["value"], dict) and line["value"].get("holds") is False
                )
                text.append(f"| {line['key']} | {_cell(line['value'])} |")
        text.append("")
    text += [
        "MFU: three times the operations of a forward pass (decoder, head on supervised tokens, "
        "tower; neither padding nor what is recomputed), by the time of a step and the dense bf16 "
        "peak of the table in megatron_vlm/distributed/device.py.",
        "",
    ]
    out.write_text("\n".join(text))
    return right


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        if value.keys() == {"found", "bound", "holds"}:
            sign = "" if value["holds"] else " **does not hold**"
            return f"{_cell(value['found'])} of at most {_cell(value['bound'])}{sign}"
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)
