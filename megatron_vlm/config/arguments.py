"""The words after `megatron-vlm`: a command, then options, --config and KEY=VALUE in any order."""

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

from megatron_vlm.config.config_file import ConfigFile, add_config_option, chosen_file
from megatron_vlm.config.key_hints import option_error, setting_of_word
from megatron_vlm.errors import ConfigError, show_value
from megatron_vlm.secret_text import hide_secrets

# Commands of TRL, ms-swift, LLaMA-Factory, axolotl, vLLM and other programs.
_OTHER_COMMANDS = {
    "did you mean train?": "sft pt pretrain finetune fine-tune fine_tune fit run launch lora",
    "did you mean rl?": "grpo ppo rlhf gspo dapo rloo reinforce",
    "did you mean train? It learns from preferences with train.objective=dpo": (
        "dpo ipo kto orpo simpo cpo bco"
    ),
    "did you mean train? It learns from the scores of a teacher with train.objective=distill, and "
    "megatron-vlm score writes them": "kd",
    "did you mean score? It writes log-probs and perplexities": "perplexity ppl logprobs logits",
    "did you mean train? It learns a reward model with train.objective=reward": "rm reward",
    "did you mean rl? It learns from a teacher with rl=distill, and train does from stored scores "
    "with train.objective=distill": "gkd distill distillation opd",
    "did you mean train? It learns them with train.objective=embed or rerank": (
        "embed embedding embeddings rerank reranker"
    ),
    "did you mean eval?": "evaluate evaluation test benchmark validate",
    "did you mean eval? Its option --predictions FILE writes the answers": "predict",
    "did you mean chat?": "infer inference generate webchat webui web-ui app ask",
    "did you mean export? With --as merged it merges adapters into the model": (
        "merge merge-lora merge_lora merge-sharded-fsdp-weights convert save"
    ),
    "did you mean push? It uploads an export": "upload push-to-hub",
    "vLLM serves the folder that `megatron-vlm export` writes (docs/deploy.md); "
    "`megatron-vlm serve` is a training service for the Tinker client": (
        "deploy api vllm-serve vllm rollout start-server"
    ),
    "did you mean inspect? It prints what the model will see of a data set": (
        "preprocess data dataset show view tokenize preview"
    ),
    "did you mean plan? `train --dry-run` checks one layout": "estimate memory fit-memory layout",
    "did you mean doctor?": "env check info diagnose status",
    "did you mean report? It writes the page of a run": "plot tensorboard compare page",
    "write megatron-vlm serve --add-client NAME FILE": "serve-key",
    "write megatron-vlm demo shapes": "shapes",
    "write megatron-vlm demo tiny": "tiny",
    "did you mean --version?": "version",
    "did you mean --help?": "help",
}
_MAX_CUTS = 50  # words of a value that the shell has cut
_HINTS = {name: hint for hint, names in _OTHER_COMMANDS.items() for name in names.split()}


class SecretiveParser(argparse.ArgumentParser):
    """Parser whose errors show no secret."""

    def error(self, message: str) -> NoReturn:
        super().error(hide_secrets(message))


def add_overrides(
    parser: argparse.ArgumentParser, text: str = "see megatron-vlm train --help"
) -> None:
    """Add KEY=VALUE and --config to a command that takes a configuration."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)
    add_config_option(parser)


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command, with overrides in any place. Refuse unknown options."""
    args, rest = parser.parse_known_args(words)
    if rest and not hasattr(args, "overrides"):
        options = [word.partition("=")[0] for word in rest if word.startswith("-")]
        parser.error(f"unrecognized arguments: {ascii(' '.join(options or rest))[1:-1]}")
    for word in rest:
        if re.match(r"--?\w", word):
            raise _option_error(word, words)
    if hasattr(args, "overrides"):
        args.overrides += rest
        _check_words(args.overrides, "eval" if words[:1] == ["eval"] else "train")
    return args


def rank_arguments(
    words: Sequence[str],
    add_arguments: Callable[[argparse.ArgumentParser], None] = add_overrides,
    prog: str | None = None,
) -> tuple[argparse.Namespace, ConfigFile | None]:
    """Return the arguments of one of a command's processes, and the file of --config."""
    parser = argparse.ArgumentParser(prog, allow_abbrev=False)
    add_arguments(parser)
    args = parse_arguments(parser, words)
    return args, chosen_file(args)


def _check_words(overrides: Sequence[str], data: Literal["train", "eval"]) -> None:
    """Refuse words alone, such as `train base chats.jsonl`, with the settings that they mean."""
    alone = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if not alone:
        return
    meant = [
        f"--config {word}" if word.endswith((".yaml", ".yml")) else setting_of_word(word, data)
        for word in alone
    ]
    if (whole := _cut_value(overrides)) is not None:
        raise ConfigError(
            ": the shell has cut this value at its spaces",
            key=whole.partition("=")[0],
            found=whole.partition("=")[2],
            remedy=f"put it in quotes: {shlex.quote(whole)}",
        )
    raise ConfigError(
        ": arguments are given as KEY=VALUE",
        key=" ".join(map(show_value, alone)),
        remedy=f"write {' '.join(filter(None, meant))}" if any(meant) else "",
    )


def _cut_value(words: Sequence[str]) -> str | None:
    """Return the setting whose list or mapping is in several words, or None."""
    starts = (i for i, word in enumerate(words) if "=" in word and not _is_closed(word))
    start = next(starts, len(words))
    longer = range(start + 2, min(len(words), start + _MAX_CUTS) + 1)
    return next(filter(_is_closed, (" ".join(words[start:end]) for end in longer)), None)


def _is_closed(text: str) -> bool:
    return all(text.count(first) <= text.count(last) for first, last in ("[]", "{}"))


def read_configuration(args: argparse.Namespace) -> tuple[ConfigFile | None, list[str]]:
    """Return the file of --config, and the words that give other processes the same keys."""
    file = chosen_file(args)
    return file, [*(file.words if file else []), *args.overrides]


def _option_error(option: str, words: Sequence[str]) -> ConfigError:
    known = ["--config", "--dry-run", "--cfg", "--debug", "--html", "--predictions"]
    known += ["--gpus", "--memory", "--efficiency", "--engine", "--bound"]
    name = option.partition("=")[0].replace("_", "-")
    if name in known:  # Another command has it.
        return ConfigError(
            f"is not an option of {words[0]}",
            key=option,
            remedy=f"megatron-vlm {words[0]} --help lists its options",
        )
    completions = [each for each in known if len(name) > 3 and each.startswith(name)]
    completions = ["--config"] if name == "-c" else completions
    if near := completions or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return ConfigError("is not an option", key=option, remedy=f"did you mean {near[0]}?")
    after = words[list(words).index(option) + 1 :][:1]
    value = after[0] if after and re.match(r"[^-+~]|-[0-9.]", after[0]) else None
    return option_error(option, None if value and "=" in value else value)


def check_command(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a command that does not exist, with the one that was most likely meant."""
    if words and not words[0].startswith("-") and words[0] not in known:
        remedy = _command_hint(words[0], known)
        raise ConfigError("is not a command", key=show_value(words[0]), remedy=remedy)


def _command_hint(word: str, known: Sequence[str]) -> str:
    if hint := _HINTS.get(word.lower()):
        return hint
    if "=" in word:
        return f"did you mean `megatron-vlm train {word}`?"
    if near := difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6):
        return f"did you mean {near[0]}?"
    return f"the commands are {', '.join(known)}"
