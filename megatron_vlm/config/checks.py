"""Checks that need only the configuration. They run before anything heavy is imported."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import get_args

from megatron_vlm.config.bounds import check_bounds
from megatron_vlm.config.data_sources import check_columns, check_roles
from megatron_vlm.config.evaluation_checks import check_evaluation, check_measuring
from megatron_vlm.config.objectives import check_objective, check_rewarded
from megatron_vlm.config.optimizer_spec import muon_errors
from megatron_vlm.config.schema import Config, DataConfig, Role, TrainScope, check_of, get, leaves
from megatron_vlm.config.searched_keys import check_layers
from megatron_vlm.config.teachers import check_teacher
from megatron_vlm.config.trainable import check_lora, check_mtp, learns
from megatron_vlm.errors import ConfigError
from megatron_vlm.secret_text import hide_secrets, is_secret

# apply_chat_template has these parameters itself.
TEMPLATE_ARGUMENTS = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "tokenize")
    + ("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length")
    + ("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")
    + ("sanitize_control_tokens",)  # from transformers 5.23 on
)


# Words of other trainers for checkpoint.resume.
_NO_FOLDERS = ("true", "false", "yes", "no", "none", "null", "latest", "last", "disable")
WARMUP_REMEDY = (
    "give optim.warmup_steps=0 optim.warmup_ratio=0.03, a part of all steps, or train for longer"
)
MAX_NEW_TOKENS = 10_000  # maximum length of data.add_tokens


def check_values(cfg: Config) -> None:
    """Refuse values that cannot work, alone or together."""
    _check_secrets(cfg)
    check_layers(cfg)
    check_rewarded(cfg)
    check_bounds(cfg)
    check_lora(cfg)
    check_mtp(cfg)
    _check_lists(cfg)
    _check_sources(cfg.data)
    _check_switches(cfg)
    _check_together(cfg)
    check_teacher(cfg)
    check_objective(cfg)
    check_evaluation(cfg)


def _check_secrets(cfg: Config) -> None:
    """Refuse secrets: a configuration is written to config.yaml and the report."""
    waiting = [(key, get(cfg, key)) for key in leaves()]
    while waiting:
        key, value = waiting.pop()
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, dict):
            waiting += [(f"{key}.{name}", each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, each) for each in value]
        elif value is not None and not isinstance(value, bool):
            # The colons of a prompt are punctuation.
            text = str(value).replace(": ", " ") if key == "data.system" else str(value)
            if is_secret(key) or hide_secrets(text) != text:
                raise ConfigError(
                    "holds a secret, and a run stores its configuration",
                    key=key,
                    remedy="give it as a variable of the environment",
                )


def check_candidates(names: Sequence[str]) -> None:
    """Refuse answers that cannot be ranked against each other."""
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"has {len(names)} entries, {len(set(names))} of them different",
            key="eval.candidates",
            allowed="at least 2, each once",
        )


def require(cfg: Config, key: str) -> None:
    """Refuse a command that needs data.train or data.eval where it is not set."""
    if not get(cfg, key):
        raise ConfigError("is not set", key=key, remedy=f"give it as {key}=FILE")


def check_training(cfg: Config) -> None:
    """Refuse to train without data, without a number of steps, or with measurements that cannot be
    made."""
    require(cfg, "data.train")
    if cfg.train.steps is None and cfg.data.is_stream:
        raise ConfigError(
            "is not set, and data.train is a stream, which has no length",
            key="train.steps",
            remedy="set train.steps",
        )
    check_measuring(cfg)


def processes_for(cfg: Config, gpus: int) -> int:
    """Return launch.processes. The default is one for each GPU, and on the CPU as few as the layout
    needs."""
    model_parallel = cfg.parallel.tp * cfg.parallel.pp
    count = cfg.launch.processes or gpus or model_parallel
    if count % model_parallel:
        raise ConfigError(
            f"is not a multiple of parallel.tp x parallel.pp = {model_parallel}",
            key="launch.processes",
            found=count,
            remedy="change one of them, or give parallel=auto in place of the layout",
        )
    return count


@check_of
def _check_lists(cfg: Config) -> Iterator[ConfigError]:
    chosen, scopes, roles = cfg.data.train_on, get_args(TrainScope), get_args(Role)
    listed = isinstance(chosen, list | tuple) and chosen and set(chosen) <= set(roles)
    if chosen not in scopes and not listed:
        yield ConfigError(
            key="data.train_on",
            allowed=f"one of {', '.join(scopes)}, or a list of roles from {', '.join(roles)}",
        )
    if not all(isinstance(name, str) and name for name in cfg.data.ignore_keys):
        yield ConfigError(key="data.ignore_keys", allowed="names of keys, such as [id,score]")
    _check_new_tokens(cfg)
    template_kwargs = cfg.data.template_kwargs
    if not isinstance(template_kwargs, dict) or not all(
        isinstance(name, str) for name in template_kwargs
    ):
        yield ConfigError(
            key="data.template_kwargs",
            allowed="variables with their values, such as {enable_thinking: false}",
        )
    if reserved := sorted(TEMPLATE_ARGUMENTS & set(template_kwargs)):
        raise ConfigError(
            "cannot be set: the record or the program decides it",
            key=f"data.template_kwargs.{reserved[0]}",
            allowed="variables of the checkpoint's own template",
        )
    candidates = cfg.eval.candidates
    if isinstance(candidates, list | tuple):
        check_candidates(candidates)
    elif not isinstance(candidates, str | None):
        raise ConfigError(key="eval.candidates", found=candidates, allowed="a list, or a text file")


def _check_new_tokens(cfg: Config) -> None:
    names = cfg.data.add_tokens
    if len(names) > MAX_NEW_TOKENS:
        raise ConfigError(
            f"has {len(names)} entries, and the maximum is {MAX_NEW_TOKENS}",
            key="data.add_tokens",
            allowed="fewer, or a checkpoint whose tokenizer was trained for such texts",
        )
    for place, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ConfigError(
                key=f"data.add_tokens[{place}]",
                found=name,
                allowed='texts of printable characters, in quotes, such as ["<point>","</point>"]',
            )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"has {repeated[0]!r} more than once", key="data.add_tokens", remedy="give each once"
        )
    if names and not learns(cfg, "language"):
        why = "lora.train without language" if cfg.lora.rank else "model.freeze_language=true"
        raise ConfigError(
            f": with {why} the new tokens would never be learnt",
            key="data.add_tokens",
            remedy="change one of them",
        )


def _check_sources(data: DataConfig) -> None:
    check_columns(data.columns, "data.columns")
    check_roles(data.roles, "data.roles")
    for held_out in data.eval:
        if held_out.source.streaming:
            raise ConfigError(
                "is a stream, and an evaluation needs its size",
                key="data.eval",
                found=held_out.source.path,
            )
    if len({spec.streaming for spec in data.train}) > 1:
        raise ConfigError(
            ": some sources stream and some do not",
            key="data.train",
            remedy="let all of them stream, or none",
        )
    roots = {spec.image_root or data.image_root or "." for spec in data.train if spec.streaming}
    if len(roots) > 1:
        raise ConfigError(
            f": streams share one image_root, and these have {', '.join(sorted(roots))}",
            key="data.train",
        )


def _check_switches(cfg: Config) -> None:
    """Refuse true and false for text that has a meaning of its own: a folder to resume from."""
    resume = cfg.checkpoint.resume
    if resume.lower() in _NO_FOLDERS and not Path(resume).is_dir():
        raise ConfigError(
            key="checkpoint.resume",
            found=resume.lower(),
            allowed="auto, never or a folder",
            remedy="give auto (the newest checkpoint of run, the default), never, or the folder of "
            "a checkpoint",
        )


@check_of
def _check_together(cfg: Config) -> Iterator[ConfigError]:
    """Yield errors of keys that contradict each other, if no other file has the rule: objectives.py
    for losses, trainable.py for adapters and drafts, evaluation_checks.py, teachers.py, and
    command_checks.py for what one command alone needs. Facts of a checkpoint or of the layout are
    checked where they are known: in model/constraints.py, training/preflight.py and planner/."""
    data, train, profile = cfg.data, cfg.train, cfg.log.profile_steps
    for prefix, bounds, what in (
        ("data.", data, "pixels"),
        ("data.video.", data.video, "frames"),
        ("data.video.", data.video, "pixels"),
    ):
        lower, upper = getattr(bounds, f"min_{what}"), getattr(bounds, f"max_{what}")
        if lower and upper and lower > upper:
            yield ConfigError(f"exceeds {prefix}max_{what}={upper}", key=f"{prefix}min_{what}")
    if train.steps is not None and cfg.optim.warmup_steps > train.steps:
        yield ConfigError(
            f"exceeds train.steps={train.steps}: the learning rate would never be reached",
            key="optim.warmup_steps",
            remedy=WARMUP_REMEDY,
        )
    yield from muon_errors(cfg.optim)
    if profile is not None and (len(profile) != 2 or not 0 <= profile[0] < profile[1]):
        yield ConfigError(key="log.profile_steps", allowed="[first, last), such as [10,12]")
    if cfg.checkpoint.push is not None and not cfg.checkpoint.export:
        yield ConfigError(
            "uploads the export, and checkpoint.export=false writes none",
            key="checkpoint.push",
            remedy="change one of them",
        )
