"""Layout of --help: words stay whole, and an example can be pasted into a shell."""

import argparse
import inspect
import shlex
from collections.abc import Callable
from typing import Any

from megatron_vlm.io.printable import wrap_words

_EXAMPLE = "example: "
_EXAMPLE_WIDTH = 76


def texts_of(run: Callable[..., Any]) -> dict[str, str | None]:
    """Return the texts of a command from the docstring of its function: the first paragraph is its
    line in the list of commands, the second the description, and the rest stands below the
    options. A paragraph `example: COMMAND` has nothing but a command."""
    line, description, *rest = inspect.cleandoc(run.__doc__ or "\n\n").split("\n\n")
    epilog = "\n\n".join(map(_shown, rest)) or None
    return {"help": line, "description": description, "epilog": epilog}


def _shown(paragraph: str) -> str:
    text = " ".join(paragraph.split())
    if not text.startswith(_EXAMPLE):
        return text
    lines = ["  "]
    for word in shlex.split(text.removeprefix(_EXAMPLE), posix=False):  # quotes stay
        if len(lines[-1]) + len(word) > _EXAMPLE_WIDTH:
            lines[-1] += "\\"
            lines.append("      ")
        lines[-1] += f"{word} "
    return "\n".join(["example:", *(line.rstrip() for line in lines)])


class HelpText(argparse.HelpFormatter):
    """Formatter that never breaks a word, leaves lines with two leading spaces as they are, and
    marks required options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            has_layout = "\n  " in paragraph
            paragraphs.append(paragraph if has_layout else "\n".join(_wrap(paragraph, width)))
        return "\n\n".join(paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        return f"{text} (required)" if action.option_strings and action.required else text


class HelpWithDefaults(HelpText):
    """The same, with the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        has_default = not any(action.default is no for no in (None, False, argparse.SUPPRESS))
        return f"{text} (default: %(default)s)" if has_default else text


def _wrap(text: str, width: int) -> list[str]:
    return wrap_words(" ".join(text.split()), width)
