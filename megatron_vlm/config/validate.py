"""Checks that need nothing but the configuration: they run before anything heavy is imported."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from megatron_vlm.config.lora import check_lora, learns
from megatron_vlm.config.ranges import check_ranges
from megatron_vlm.config.schema import Config, DataConfig, Role, TrainScope, get, key_types
from megatron_vlm.errors import ConfigError

# What apply_chat_template takes for itself.
TEMPLATE_ARGUMENTS = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "tokenize")
    + ("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length")
    + ("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")
    + ("sanitize_control_tokens",)  # from transformers 5.23 on
)


WARMUP_REMEDY = (
    "give optim.warmup_steps=0 optim.warmup_ratio=0.03, a part of all steps, or train for longer"
)
MOST_NEW_TOKENS = 10_000  # of data.add_tokens


def check_values(cfg: Config) -> None:
    """Refuse values that cannot work, alone or together."""
    for key, kind in key_types().items():
        if get_origin(kind) is Literal and get(cfg, key) not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise ConfigError(f"{key}={get(cfg, key)!r} is not one of {choices}")
    _check_layers(cfg.parallel.layers_per_stage, cfg.parallel.virtual_stages)
    check_ranges(cfg)
    check_lora(cfg)
    _check_lists(cfg)
    _check_sources(cfg.data)
    _check_together(cfg)


def check_candidates(names: Sequence[str]) -> None:
    """Refuse answers that cannot be ranked against each other."""
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"eval.candidates has {len(names)} entries, {len(set(names))} of them different; "
            "give at least 2, each once"
        )


def require(cfg: Config, key: str) -> None:
    """Refuse a command that needs data.train or data.eval where it is not set."""
    if not get(cfg, key):
        raise ConfigError(f"{key} is not set; give it as {key}=FILE")


def check_training(cfg: Config) -> None:
    """Refuse to train without data, without a number of steps, or without the set that decides
    which checkpoint is the best."""
    require(cfg, "data.train")
    if cfg.train.steps is None and any(spec.streaming for spec in cfg.data.train):
        raise ConfigError("data.train is a stream and has no length; set train.steps")
    best, names = cfg.checkpoint.best, [held_out.name for held_out in cfg.data.eval]
    if best is not None and (wanted := best.rpartition("/")[0]) not in names:
        raise ConfigError(
            f"checkpoint.best={best}: data.eval has no set {wanted!r}; "
            f"it has {', '.join(names) or 'none'}"
        )


def processes_for(cfg: Config, gpus: int) -> int:
    """launch.processes; by default one for each GPU, on the CPU as few as the layout needs."""
    least = cfg.parallel.tp * cfg.parallel.pp
    count = cfg.launch.processes or gpus or least
    if count % least:
        raise ConfigError(
            f"launch.processes={count} is not a multiple of parallel.tp x parallel.pp = {least}; "
            "change one of them"
        )
    return count


def _check_layers(given: Any, virtual_stages: int) -> None:
    listed = isinstance(given, list) and all(type(count) is int for count in given)
    if not (listed or given in (None, "auto")):
        raise ConfigError(
            f"parallel.layers_per_stage={given!r}: give auto, or a list with one whole number for "
            "each stage, such as [0,12,12,12]"
        )
    if given == "auto" and virtual_stages > 1:
        raise ConfigError(
            "parallel.layers_per_stage=auto chooses the layers of stages, not of the chunks that "
            f"parallel.virtual_stages={virtual_stages} makes of them; give a list, or null"
        )


def _check_lists(cfg: Config) -> None:
    chosen, scopes, roles = cfg.data.train_on, get_args(TrainScope), get_args(Role)
    listed = isinstance(chosen, list | tuple) and chosen and set(chosen) <= set(roles)
    if chosen not in scopes and not listed:
        raise ConfigError(
            f"data.train_on={chosen!r}: choose one of {', '.join(scopes)}, or a list of "
            f"roles from {', '.join(roles)}"
        )
    if not all(isinstance(name, str) and name for name in cfg.data.ignore_keys):
        raise ConfigError(
            f"data.ignore_keys={list(cfg.data.ignore_keys)}: give names of keys, such as [id,score]"
        )
    _check_new_tokens(cfg)
    given = cfg.data.template_kwargs
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"data.template_kwargs={given!r}: give variables with their values, such as "
            "{enable_thinking: false}"
        )
    if taken := sorted(TEMPLATE_ARGUMENTS & set(given)):
        raise ConfigError(
            f"data.template_kwargs: {taken[0]} is not for you to set: it is decided by the record "
            "or by what is asked; give variables of the checkpoint's own template"
        )
    candidates = cfg.eval.candidates
    if isinstance(candidates, list | tuple):
        check_candidates(candidates)
    elif not isinstance(candidates, str | None):
        raise ConfigError(f"eval.candidates={candidates!r}: give a list, or a text file")


def _check_new_tokens(cfg: Config) -> None:
    names = cfg.data.add_tokens
    if len(names) > MOST_NEW_TOKENS:
        raise ConfigError(
            f"data.add_tokens has {len(names)} entries, and {MOST_NEW_TOKENS} is the most: give "
            "fewer, or a checkpoint whose tokenizer was trained for such texts"
        )
    for name in names:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ConfigError(
                f"data.add_tokens has {name!r}: give texts of printable characters, in quotes, "
                'such as ["<point>","</point>"]'
            )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"data.add_tokens has {twice[0]!r} more than once; give each once")
    if names and not learns(cfg, "language"):
        why = "lora.train without language" if cfg.lora.rank else "model.freeze_language=true"
        raise ConfigError(
            f"data.add_tokens: with {why} the new tokens would never be learnt; change one of them"
        )


def _check_sources(data: DataConfig) -> None:
    for held_out in data.eval:
        if held_out.source.streaming:
            raise ConfigError(
                f"data.eval: {held_out.source.path} streams, and an evaluation needs its size"
            )
    if len({spec.streaming for spec in data.train}) > 1:
        raise ConfigError(
            "data.train: some sources stream and some do not; let all of them stream, or none"
        )
    roots = {spec.image_root or data.image_root or "." for spec in data.train if spec.streaming}
    if len(roots) > 1:
        raise ConfigError(
            f"data.train: streams share one image_root, and these have {', '.join(sorted(roots))}"
        )


def _check_together(cfg: Config) -> None:
    data, train, profile = cfg.data, cfg.train, cfg.log.profile_steps
    for part in ("{}_pixels", "video_{}_frames", "video_{}_pixels"):
        names = part.format("min"), part.format("max")
        least, most = (getattr(data, name) for name in names)
        if least and most and least > most:
            raise ConfigError(f"data.{names[0]}={least} is above data.{names[1]}={most}")
    if train.steps is not None and cfg.optim.warmup_steps > train.steps:
        raise ConfigError(
            f"optim.warmup_steps={cfg.optim.warmup_steps} is above train.steps={train.steps}: the "
            f"learning rate would never be reached; {WARMUP_REMEDY}"
        )
    if profile is not None and (len(profile) != 2 or not 0 <= profile[0] < profile[1]):
        raise ConfigError(f"log.profile_steps={profile}: give [first, last), e.g. [10,12]")
    if cfg.checkpoint.best is not None:
        _check_best(cfg.checkpoint.best, cfg)
    if cfg.checkpoint.push is not None and not cfg.checkpoint.export:
        raise ConfigError(
            f"checkpoint.push={cfg.checkpoint.push} uploads the export, and "
            "checkpoint.export=false writes none; change one of them"
        )


def _check_best(best: str, cfg: Config) -> None:
    measured = {"loss": True, "token_accuracy": True, "exact_match": cfg.eval.generate}
    measured["ranking"] = cfg.eval.candidates is not None
    name, _, score = best.rpartition("/")
    if not name or not measured.get(score):
        raise ConfigError(
            f"checkpoint.best={best!r}: give SET/SCORE with a score that is measured: "
            f"{', '.join(score for score, is_on in measured.items() if is_on)}; exact_match needs "
            "eval.generate=true, ranking needs eval.candidates"
        )
