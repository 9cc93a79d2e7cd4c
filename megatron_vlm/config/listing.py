"""Names of all recipes and keys, for `megatron-vlm train --help`."""

import argparse
import textwrap
from dataclasses import is_dataclass

from megatron_vlm.config.load import config_dir
from megatron_vlm.config.schema import key_types, leaves

_WIDTH = 78


def listing() -> str:
    """Return recipes and keys, one paragraph for each group. Each line begins with two spaces."""
    groups = [key for key, kind in key_types().items() if is_dataclass(kind)]
    lines = ["  recipes:"]
    for group in groups:
        names = sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))
        if own := [name for name in names if name != "default"]:
            lines += _paragraph(f"{group}=", own)
    lines += ["  keys:", *_paragraph("", [key for key in leaves() if "." not in key])]
    for group in groups:
        names = [key.partition(".")[2] for key in leaves() if key.startswith(f"{group}.")]
        lines += _paragraph(f"{group}.", names)
    return "\n".join(lines)


def _paragraph(prefix: str, names: list[str]) -> list[str]:
    text = f"{prefix:13}{' '.join(names)}"
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * 17,
        break_long_words=False,
        break_on_hyphens=False,
    )


class ListingFormatter(argparse.HelpFormatter):
    """Formatter that leaves lines with two leading spaces as they are and fills paragraphs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        prose, mark, rest = text.partition("\n  recipes:")
        return super()._fill_text(prose, width, indent) + mark + rest
