"""Names of recipes and keys, for the --help of the commands that take them."""

import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path

from megatron_vlm.config.load import config_dir
from megatron_vlm.config.schema import key_types, leaves

# Groups that a command does not read, or refuses.
_OTHER_GROUPS = {
    "train": ("rl", "serve", "engine"),
    "rl": ("serve",),
    "serve": ("lora", "eval", "checkpoint", "log", "rl"),
}
_WIDTH = 78


def listing(command: str) -> str:
    """Return the recipes and keys that a command takes, one paragraph for each group. Each line
    begins with two spaces."""
    groups = [name for name in group_names() if name not in _OTHER_GROUPS[command]]
    lines = ["  recipes:"]
    for group in groups:
        if names := recipe_names(group):
            lines += _paragraph(f"{group}=", names)
    lines += ["  keys:", *_paragraph("", [key for key in leaves() if "." not in key])]
    for group in groups:
        names = [key.partition(".")[2] for key in leaves() if key.startswith(f"{group}.")]
        lines += _paragraph(f"{group}.", names)
    return "\n".join([*lines, "  megatron-vlm help KEY explains a key, help GROUP. a group."])


def group_names() -> list[str]:
    """Return the groups of keys."""
    return [key for key, kind in key_types().items() if is_dataclass(kind)]


def recipe_names(group: str) -> list[str]:
    """Return the recipes of a group. A `default` that sets nothing is no choice."""
    files = sorted((config_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if file.stem != "default" or _sets_something(file)]


def _sets_something(file: Path) -> bool:
    """Return whether a recipe has a key. YAML is too slow for every --help."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return any(line not in ("", "{}") for line in lines)


def _paragraph(prefix: str, names: Sequence[str]) -> list[str]:
    text = f"{prefix:13}{' '.join(names)}"
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * 17,
        break_long_words=False,
        break_on_hyphens=False,
    )
