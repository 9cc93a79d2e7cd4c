"""Names of recipes and keys, for the --help of the commands that take them."""

from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.config.group_values import config_dir, group_names
from megatron_vlm.config.schema import leaves
from megatron_vlm.config.unused_keys import UNREAD_GROUPS
from megatron_vlm.io.printable import wrap_words

_WIDTH = 78


def listing(command: str) -> str:
    """Return the recipes and keys that a command takes, a paragraph for each group."""
    groups = [name for name in group_names() if name not in UNREAD_GROUPS[command]]
    lines = ["  recipes:"]
    for group in groups:
        if names := recipe_names(group):
            lines += _paragraph(f"{group}=", names)
    lines += ["  keys:", *_paragraph("", [key for key in leaves() if "." not in key])]
    for group in groups:
        names = [key.partition(".")[2] for key in leaves() if key.startswith(f"{group}.")]
        lines += _paragraph(f"{group}.", names)
    return "\n".join([*lines, "  megatron-vlm help KEY explains a key, help GROUP. a group."])


def recipe_names(group: str) -> list[str]:
    """Return the recipes of a group. A `default` that sets nothing is no choice."""
    files = sorted((config_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if file.stem != "default" or _sets_something(file)]


def _sets_something(file: Path) -> bool:
    """Return whether a recipe has a key. YAML is too slow for every --help."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return any(line not in ("", "{}") for line in lines)


def _paragraph(prefix: str, names: Sequence[str]) -> list[str]:
    return wrap_words(f"{prefix:13}{' '.join(names)}", _WIDTH, " " * 4, " " * 17)
