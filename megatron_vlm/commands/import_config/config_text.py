"""The text of a translated configuration: YAML of this package, each line with the setting that it
came from, and comments on what is different."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from megatron_vlm.commands.import_config.grpo_rules import REWARD_LINE
from megatron_vlm.commands.import_config.leftovers import Leftovers
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation
from megatron_vlm.config.schema import leaves
from megatron_vlm.io.printable import escape_controls, wrap_words
from megatron_vlm.secret_text import hide_secrets

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z_./~][\w./:@+~-]*", re.ASCII)  # text that YAML needs no quotes for
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "nan", "inf", "~")
ON_PURPOSE = (
    "the loss of a step is divided once, by the supervised tokens of its whole global batch, not "
    "by those of each GPU or each accumulated pass",
    "rows are not packed: micro-batches of equal cost are planned instead, and no token sees "
    "another row",
    "the chat template is that of the checkpoint, for training, evaluation and export alike",
)


def config_text(t: Translation, left: Leftovers) -> str:
    """Return the whole text."""
    lines = [*_head(t), *_body(t), *_notes(t, left)]
    shown = "\n".join(lines)
    silent = [
        each
        for each in t.source.settings.values()
        if each.name in t.read and each.value is not None and each.name not in shown
    ]
    if silent:
        lines += _comment(f"Read, with nothing to set for it here: {t.origin(*silent)}.")
    return "\n".join(lines) + "\n"


def _head(t: Translation) -> Iterator[str]:
    gpus = f", for {t.gpus} GPU{'s' * (t.gpus != 1)}" if t.gpus else ""
    file, command = escape_controls(shlex.quote(t.source.file)), t.source.command
    source = f"command `{command}`" if command else f"configuration {file}"
    source += f" with {file}" if command and t.source.file else ""
    yield from _comment(f"From the {source} of {t.trainer.title}{gpus}. Save it as FILE.yaml.")
    command, more = ("rl", f" {REWARD_LINE}") if t.is_rl else ("train", "")
    if "engine.name" in t.lines and t.lines["engine.name"].value == "vllm":
        more += " engine.python=.venv-vllm/bin/python"
    yield "# Look at it, then start it:"
    yield f"#   megatron-vlm {command} --config FILE.yaml{more} --dry-run --gpus {t.gpus or 8}"
    yield f"#   megatron-vlm {command} --config FILE.yaml{more}"


def _body(t: Translation) -> Iterator[str]:
    if t.recipes:
        yield "defaults:"
        for group, line in t.recipes.items():
            yield from _lines(f"  - {group}: {line.value}", line.comment)
    group = ""
    for key in leaves():
        if key not in t.lines:
            continue
        parent, _, name = key.rpartition(".")
        if parent and parent != group:
            yield f"{parent}:"
        group = parent
        line = t.lines[key]
        yield from _lines(f"{'  ' * bool(parent)}{name}: {yaml_value(line.value)}", line.comment)


def _lines(text: str, comment: str) -> Iterator[str]:
    """Yield a line with its comment, which stands above it where both are too long for one."""
    comment = hide_secrets(comment)
    if not comment:
        yield text
    elif len(text) + len(comment) + 4 <= _WIDTH:
        yield f"{text}  # {comment}"
    else:
        indent = " " * (len(text) - len(text.lstrip()))
        yield from (f"{indent}{line}" for line in _comment(comment))
        yield text


def _notes(t: Translation, left: Leftovers) -> Iterator[str]:
    yield ""
    without = [f"{t.origin(*each)}: {sentence}" for sentence, each in left.sentences.items()]
    for title, sentences in {
        "Different here on purpose": ON_PURPOSE,
        "Different here, for you to decide": dict.fromkeys(t.different),
        "Without a counterpart, and what is here instead": without,
    }.items():
        if sentences:
            yield f"# {title}:"
        for sentence in sentences:
            yield from _comment(sentence, "- ", "  ")
    if left.off:
        yield from _comment(f"Not used there either: {_names(left.off)}.")
    if left.unknown:
        yield from _comment(f"Not known here: {_names(left.unknown)}.")


def _names(settings: list[Setting]) -> str:
    return ", ".join(escape_controls(setting.name) for setting in settings)


def _comment(text: str, first: str = "", others: str = "") -> Iterator[str]:
    text = " ".join(escape_controls(hide_secrets(text)).split())
    yield from wrap_words(text, _WIDTH, f"# {first}", f"# {others}")


def yaml_value(value: Any) -> str:
    """Return a value as YAML 1.2 on one line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, dict):
        pairs = (f"{yaml_value(str(key))}: {yaml_value(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    text = str(value)
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS and not text.endswith(":")
    return text if is_plain else json.dumps(text)
