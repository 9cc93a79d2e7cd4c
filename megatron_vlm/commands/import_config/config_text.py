"""The text of a translated configuration: YAML of this package, each line with the setting that it
came from, and comments on what is different and on settings that no rule has read."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.commands.import_config.grpo_rules import REWARD_LINE
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_nothing, is_off
from megatron_vlm.config.key_hints import counterpart_of
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import escape_controls, wrap_words
from megatron_vlm.secret_text import hide_secrets

# Names that this package has, too, in a group; the tables have only other names.
_OWN_NAMES = {"num_workers": "data.num_workers", "max_tokens": "data.max_tokens"}
# These names change what is learnt, where they are used at all.
_CHANGES = (
    "use_dora loraplus_lr_ratio lora_bias neftune_noise_alpha enable_dft_loss packing "
    "neat_packing sample_packing padding_free max_samples template chat_template modules_to_save "
    "additional_target lora_modules_to_save freeze_parameters freeze_parameters_ratio "
    "freeze_parameters_regex trainable_parameters unfrozen_parameters streaming mix_strategy "
    "interleave_probs moe_expert_capacity_factor mtp_num_layers "
    "f_divergence_type enable_thinking tokenizer_type use_galore fp8 overlong_filter "
    "special_tokens mask_truncated_completions rope_scaling moe_aux_loss_coeff moe_z_loss_coeff "
    "use_chat_template external_plugins"
)
# Not to use these changes what is learnt.
_MEANT = ("use_chat_template", "train_on_eos", "train_on_eot", "norm_bbox", "do_sample")
# Classes of names that no table has.
_CLASSES = {
    "what it sets is not read: set it by the keys of docs/configuration.md": re.compile(
        r"\w+_kwargs|response_prefix"
    ),
    "it says how that trainer runs, and not what is learnt": re.compile(
        r"(?:\w*_)?(?:kernels?|fused|fusion|liger|unsloth|compile|xformers|logs?|logging|print|tqdm"
        r"|profiler?|trace|prometheus|otel|debug|hub|caches?(?!_len)|caching|download|serialization"
        r"|shm|hdfs|symlink|workers?|num_proc|processes|timeout|nccl|host|port|ray|memory|gc|p2p"
        r"|watchdog|recompute)(?!_?prob)(?:_\w+)?"
    ),
}


@dataclass
class Leftovers:
    """Settings without a counterpart, by the sentence about them."""

    sentences: dict[str, list[Setting]] = field(default_factory=dict)
    off: list[Setting] = field(default_factory=list)  # not used there either
    unknown: list[Setting] = field(default_factory=list)

    def add(self, sentence: str, setting: Setting) -> None:
        """Add a setting to a sentence."""
        self.sentences.setdefault(sentence, []).append(setting)


def read_leftovers(t: Translation, ignored: frozenset[str], errors: list[ConfigError]) -> Leftovers:
    """Translate the settings that mean the same here, and return the others. A name that is not
    known is an error, unless it is ignored or nobody has written it."""
    left = Leftovers()
    for key, name in t.trainer.same.items():
        t.copy(key, name)
    for name, setting in t.source.settings.items():
        if name not in t.read and name not in ignored:
            _sort(t, left, setting)
    if left.unknown and not t.source.is_dump:
        problem = f"is no key of {t.trainer.title} that is known here"
        names = ",".join(setting.name for setting in left.unknown)
        remedy = f"remove what is not needed, or give --ignore {names}"
        *others, last = left.unknown
        errors += [t.source.error(setting, problem) for setting in others]
        errors.append(t.source.error(last, problem, remedy=remedy))
    return left


def _sort(t: Translation, left: Leftovers, setting: Setting) -> None:
    found = find_counterpart(setting.name)
    if found in leaves():
        _copy(t, left, str(found), setting)
    elif is_off(setting.value) and setting.name.rpartition(".")[2] not in _MEANT:
        left.off.append(setting)
    elif found is not None and setting.name.rpartition(".")[2] in _CHANGES.split():
        t.differ(found, setting)
    elif found is not None:
        left.add(found, setting)
    else:
        left.unknown.append(setting)


def find_counterpart(name: str) -> str | None:
    """Return our key or a sentence. Settings of Megatron-LM that verl passes on have their own."""
    last = name.rpartition(".")[2]
    own = counterpart_of(last) if ".override_" in name else None
    its_class = next((text for text, form in _CLASSES.items() if form.fullmatch(last)), None)
    return own or counterpart_of(name) or _OWN_NAMES.get(name) or its_class


def _copy(t: Translation, left: Leftovers, key: str, setting: Setting) -> None:
    is_switch = key_types()[key] is bool
    if is_nothing(setting.value) or (is_off(setting.value) and not is_switch):
        left.off.append(setting)
    elif key.startswith("lora.") and not t.has_lora:
        left.add("adapters are not trained, since no setting asks for them", setting)
    elif key in t.lines:
        left.add(f"{key} is set already, by another key of the configuration", setting)
    else:
        t.copy_setting(key, setting)


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
