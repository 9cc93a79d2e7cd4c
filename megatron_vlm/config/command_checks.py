"""Checks of `megatron-vlm train`, `rl` and `serve`, in addition to every configuration's: what they
need, and keys that a user gave and that have no effect in a command or with the other settings."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_vlm.config.checks import check_training, require
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.evaluation_checks import (
    has_agents,
    has_rewards,
    held_out_names,
    reward_model_of,
)
from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.optimizer_spec import optimizer_spec
from megatron_vlm.config.schema import (
    AGENT_URLS,
    NAMED,
    OWN,
    Config,
    LoraConfig,
    RlConfig,
    ServeConfig,
    check_of,
    get,
)
from megatron_vlm.config.trainable import learns
from megatron_vlm.errors import ConfigError, gather_errors


@check_of
def check_train(cfg: Config) -> Iterator[ConfigError]:
    """Refuse to train without what a run needs, or with a teacher that nothing would read."""
    check_training(cfg)
    if cfg.teacher.path is not None and cfg.train.objective != "distill":
        yield ConfigError(
            f"has no effect with train.objective={cfg.train.objective}",
            key="teacher.path",
            remedy="give train.objective=distill",
        )


@check_of
def check_rl(cfg: Config) -> Iterator[ConfigError]:
    """Refuse settings from which nothing could be learnt, or that contradict each other."""
    check_training(cfg)
    yield from _objective_errors(cfg, "megatron-vlm rl learns from rewards")
    rl = cfg.rl
    if cfg.model.mtp == "train" and cfg.lora.rank:
        yield ConfigError(
            ": engines get adapters, which have no place for the MTP head",
            key="model.mtp",
            remedy="leave it out, or set lora.rank=0",
        )
    yield from _reward_errors(cfg)
    yield from _agent_errors(cfg)
    if (folder := reward_model_of(rl)) is not None:
        yield from _reward_model_errors(rl, folder)
    names = () if folder is not None else ("rl.reward",)
    for key in (*names, "rl.environment", "teacher.view"):
        yield from _target_errors(key, get(cfg, key))
    if cfg.data.is_stream:
        raise ConfigError(
            "is a stream, and prompts are read by their number, so that a run can resume",
            key="data.train",
            remedy="save it as a file, and give that",
        )
    if rl.samples < 2 and needs_comparison(cfg):
        yield ConfigError(
            ": an answer is compared with the others to its prompt",
            key="rl.samples",
            allowed="at least 2",
        )
    if rl.temperature == 0:
        raise ConfigError(
            ": all answers to a prompt would be the same, and none better than another",
            key="rl.temperature",
            found=0,
            allowed="more than 0",
        )
    if rl.loss == "importance_sampling" and (rl.clip_low or rl.clip_high):
        yield ConfigError(
            f"clips nothing, and rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}",
            key="rl.loss",
            remedy="leave them out, or choose rl.loss=ppo",
        )
    yield from _sampler_errors(cfg)
    yield from _seen_errors(cfg)
    if rl.updates > cfg.train.global_batch_size:
        yield ConfigError(
            f"exceeds train.global_batch_size={cfg.train.global_batch_size}: each update needs at "
            "least one prompt",
            key="rl.updates",
        )


def _objective_errors(cfg: Config, why: str) -> Iterator[ConfigError]:
    """Refuse other objectives of training for a command that has none."""
    if cfg.train.objective != "sft":
        yield ConfigError(
            f": {why}", key="train.objective", allowed="sft", remedy="leave train.objective out"
        )


def _reward_errors(cfg: Config) -> Iterator[ConfigError]:
    rl = cfg.rl
    judges = [each for each in (rl.reward or rl.agent, rl.environment) if each is not None]
    is_neither = not judges
    if len(judges) == 2 or (is_neither and cfg.teacher.path is None):
        raise ConfigError(
            f"is {'not ' * is_neither}set, and {'neither' if is_neither else 'so'} is "
            "rl.environment",
            key="rl.agent" if rl.agent is not None and rl.reward is None else "rl.reward",
            remedy="give one of them, as FILE.py:NAME: a function of a record and an answer, or "
            "the class of an episode; or rl.agent, the command of a program that asks the model by "
            "itself; a run that learns from teacher.path needs none",
        )
    if rl.advantage == "none" and cfg.teacher.path is None:
        yield ConfigError(
            "only reports the rewards, and without teacher.path nothing else is learnt from",
            key="rl.advantage",
            remedy="give rl.advantage=grpo, or teacher.path=CHECKPOINT",
        )
    if rl.dynamic_sampling and not needs_comparison(cfg):
        yield ConfigError(
            "replaces prompts whose answers all got the same reward, and no reward is learnt from",
            key="rl.dynamic_sampling",
            remedy="set rl.dynamic_sampling=false",
        )
    if is_neither and rl.eval_scores == "reward":
        yield ConfigError(
            "needs a reward, and none of rl.reward, rl.environment and rl.agent is set",
            key="rl.eval_scores",
            remedy="give rl.eval_scores=loss, or a reward; with rl.advantage=none it is only "
            "reported",
        )


def _agent_errors(cfg: Config) -> Iterator[ConfigError]:
    """Refuse an address that no server has, and a command that cannot be started."""
    if has_agents(cfg.rl) and cfg.teacher.view is not None:
        yield ConfigError(
            "shows a teacher another prompt, and an agent makes its prompts by itself",
            key="teacher.view",
            remedy="leave it out",
        )
    if (agent := cfg.rl.agent) is None:
        return
    scheme, is_url, _ = agent.partition("://")
    wrong = ""
    try:
        if is_url and scheme.isalpha():
            url = urlsplit(agent)
            is_address = agent.startswith(AGENT_URLS) and url.hostname and url.port != 0
            wrong = "" if is_address else "is not an address of HTTP"
        else:
            program = next(iter(shlex.split(agent)), "")
            wrong = "" if shutil.which(program) else f": there is no program {program!r}"
    except ValueError as error:  # an open quote, or a port that is none
        wrong = f"cannot be read: {error}"
    if wrong:
        yield ConfigError(
            wrong,
            key="rl.agent",
            found=agent,
            remedy='give a command, such as "python agent.py", or the address of a server, such as '
            "http://127.0.0.1:9000/run",
        )


def _reward_model_errors(rl: RlConfig, folder: str) -> Iterator[ConfigError]:
    if not (Path(folder).expanduser() / "config.json").is_file():
        yield ConfigError(
            f": there is no model in {folder}",
            key="rl.reward",
            remedy="give model:FOLDER, an export of a run with train.objective=reward",
        )
    if rl.agent is not None:
        yield ConfigError(
            ": a reward model scores single answers, and rl.agent is set",
            key="rl.reward",
            remedy="give a function, or let the agent post its reward",
        )


def needs_comparison(cfg: Config) -> bool:
    """Return whether the answers to a prompt are compared with each other by their rewards."""
    return has_rewards(cfg) and cfg.rl.advantage != "none"


def needs_held_out_rewards(cfg: Config) -> bool:
    """Return whether the held-out sets are answered and rewarded."""
    return bool(cfg.data.eval) and cfg.rl.eval_scores != "loss" and has_rewards(cfg)


def _target_errors(key: str, value: str | None) -> Iterator[ConfigError]:
    if value is None or (key == "rl.environment" and value.startswith(NAMED)):
        return
    where, colon, name = value.rpartition(":")
    if not colon or not name.isidentifier():
        yield ConfigError(key=key, allowed="FILE.py:NAME or MODULE:NAME")
    if where.endswith(".py") and not Path(where).is_file():
        yield ConfigError(f": there is no file {where}", key=key)


def _sampler_errors(cfg: Config) -> Iterator[ConfigError]:
    if cfg.engine.name == OWN and cfg.rl.off_policy_steps:
        yield ConfigError(
            "draws samples while a step trains, and with engine.name=own the same processes would "
            "do both",
            key="rl.off_policy_steps",
            remedy="give engine.name=vllm, or 0",
        )
    mask = cfg.rl.mask_weight
    if mask is not None and not (len(mask) == 2 and mask[0] < 1 < mask[1]):
        allowed = "[low, high] with low below 1 and high above 1, such as [0.5,5]"
        yield ConfigError(key="rl.mask_weight", allowed=allowed)
    if mask is not None and cfg.engine.name == OWN:
        yield ConfigError(
            "masks tokens by their importance weights, which only the tokens of engines have",
            key="rl.mask_weight",
            remedy="give engine.name=vllm, or leave it out",
        )
    if cfg.rl.interrupt and not cfg.rl.off_policy_steps:
        yield ConfigError(
            "interrupts nothing: with rl.off_policy_steps=0 all answers have ended when the "
            "weights change",
            key="rl.interrupt",
            remedy="give rl.off_policy_steps=1 or more, or leave it out",
        )


def _seen_errors(cfg: Config) -> Iterator[ConfigError]:
    rl, teacher = cfg.rl, cfg.teacher
    if rl.seen == "vppo" and (teacher.path is not None or not needs_comparison(cfg)):
        yield ConfigError(
            "weighs the advantages of rewards, and here "
            + ("teacher.path adds others" if teacher.path is not None else "none are learnt from"),
            key="rl.seen",
            remedy="give rl.seen=va_opd with a teacher, or rl.seen=report",
        )
    if rl.seen != "va_opd":
        return
    if teacher.path is None or teacher.engine != OWN:
        yield ConfigError(
            "scores hidden pictures by a teacher that the ranks run, and "
            + ("teacher.path is not set" if teacher.path is None else "this one is in engines"),
            key="rl.seen",
            remedy="give teacher.path=CHECKPOINT without teacher.engine, or rl.seen=report",
        )
    learns_rewards = needs_comparison(cfg)
    if learns_rewards or rl.aggregate != "tokens":
        key, value = ("advantage", "none") if learns_rewards else ("aggregate", "tokens")
        yield ConfigError(
            ": rl.seen=va_opd has its own weights, those of the loss of a teacher alone",
            key=f"rl.{key}",
            remedy=f"give rl.{key}={value}",
        )


# Checks of `megatron-vlm serve`, before it starts anything.

# Models in memory, by kind, unless serve.loaded says otherwise. Snapshots are those for sampling.
LOADED = {"adapters": 8, "full_models": 1, "snapshots": 8, "full_snapshots": 1}


def loaded_counts(serve: ServeConfig) -> dict[str, int]:
    """Return how many models of each kind a service has in memory."""
    if not isinstance(serve.loaded, dict):
        raise ConfigError(key="serve.loaded", found=serve.loaded, allowed="{KIND: NUMBER}")
    for name, count in serve.loaded.items():
        key, least = f"serve.loaded.{name}", 0 if name == "full_models" else 1
        if name not in LOADED:
            raise ConfigError("is not a kind of models", key=key, allowed=tuple(LOADED))
        if type(count) is not int or count < least:
            raise ConfigError(key=key, found=count, allowed=f"a whole number from {least}")
    return LOADED | serve.loaded


@check_of
def check_serve(cfg: Config) -> Iterator[ConfigError]:
    """Refuse settings that a service cannot have, or that it would ignore."""
    serve = cfg.serve
    yield from _objective_errors(cfg, "clients choose the losses of their models")
    for name, default in vars(LoraConfig()).items():
        if getattr(cfg.lora, name) != default:
            yield ConfigError(
                ": clients choose the adapters of their models",
                key=f"lora.{name}",
                remedy="leave it out, and see serve.lora_alpha and serve.max_rank",
            )
    if cfg.model.mtp != "carry":
        yield ConfigError(
            ": clients choose the losses of their models", key="model.mtp", allowed="carry"
        )
    if not optimizer_spec(cfg.optim).step_settings:
        yield ConfigError(
            ": clients send settings of AdamW with each step, and it has others as well",
            key="optim.name",
            remedy="leave it out",
        )
    for name in ("train", "eval"):
        if getattr(cfg.data, name):
            raise ConfigError(
                "is set, and clients send the data", key=f"data.{name}", remedy="leave it out"
            )
    if serve.keys is not None and not Path(serve.keys).is_file():
        yield ConfigError(
            ": there is no such file",
            key="serve.keys",
            remedy=f"make it with megatron-vlm serve --add-client NAME {serve.keys}",
        )
    loaded_counts(serve)
    require(cfg, "model.path")


# Groups that a command does not read, or refuses.
UNREAD_GROUPS = {
    "train": ("rl", "serve", "engine"),
    "rl": ("serve",),
    "serve": ("lora", "eval", "checkpoint", "log", "rl"),
}
# Groups of lora.targets that have no layer of a part. A pattern may have layers of any part.
_ELSEWHERE = {
    "vision": {"attention", "mlp", "head", "merger"},
    "merger": {"attention", "mlp", "head", "vision_attention", "vision_mlp"},
}


def check_used(
    cfg: Config, command: str, overrides: Sequence[str], file: ConfigFile | None
) -> str | None:
    """Refuse keys of the command line that have no effect. Return a remark on a file's keys,
    which may serve several commands. A value such as false or null is no mistake: it switches off,
    and data.eval=null does so for all evaluations."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides if word[0] != "~")
    in_file = () if file is None or file.is_complete else file.values
    refused: list[ConfigError] = []
    remarks: dict[str, list[str]] = {}
    for unused, why in _unused(cfg, command, "data.eval" in given):
        for key in dict.fromkeys((*given, *in_file)):
            if not f"{key}.".startswith(f"{unused}.") or not get(cfg, key):
                continue
            if key in given:
                problem, remedy = f"has no effect {why}", "change that, or leave it out"
                refused.append(ConfigError(problem, key=key, found=given[key], remedy=remedy))
            else:
                remarks.setdefault(why, []).append(key)
    if refused:
        raise gather_errors(refused)
    texts = [f"{', '.join(keys)} {why}" for why, keys in remarks.items()]
    return f"{file.name} has keys without effect: {'; '.join(texts)}" if file and texts else None


def _unused(cfg: Config, command: str, decides: bool) -> Iterator[tuple[str, str]]:
    """Yield keys and groups without effect, and why. `decides`: the user gave data.eval."""
    yield from ((group, f"in megatron-vlm {command}") for group in UNREAD_GROUPS[command])
    train, optim, objective = cfg.train, cfg.optim, f"with train.objective={cfg.train.objective}"
    is_unmeasured = not held_out_names(cfg) and not decides
    has_no_agent = not has_agents(cfg.rl)
    rules = [
        (is_unmeasured, "eval", "without data.eval or data.split"),
        (is_unmeasured, "rl.eval_scores", "without data.eval"),
        (is_unmeasured, "rl.eval_temperature", "without data.eval"),
        (train.steps, "train.epochs", f"with train.steps={train.steps}"),
        (optim.warmup_steps, "optim.warmup_ratio", f"with optim.warmup_steps={optim.warmup_steps}"),
        (optim.schedule != "wsd", "optim.decay_ratio", f"with optim.schedule={optim.schedule}"),
        (not cfg.data.is_stream, "data.shuffle_window", "without a stream in data.train"),
        (spec_of(cfg).records not in ("pair", "label"), "preference", objective),
        (train.objective != "reward", "reward", objective),
        (reward_model_of(cfg.rl), "rl.failed_reward", f"with rl.reward={cfg.rl.reward}"),
        (train.objective != "embed", "embed", objective),
        (train.objective != "rerank", "rerank", objective),
        (has_no_agent, "rl.agent_timeout", "without rl.agent"),
        (has_no_agent, "rl.max_concurrent", "without rl.agent"),
        (cfg.teacher.path is None, "distill", "without teacher.path"),
        (cfg.launch.backend != "ray", "launch.ray_address", "with launch.backend=local"),
        (cfg.launch.backend != "ray", "launch.cpus_per_rank", "with launch.backend=local"),
    ]
    for part, title in (("vision", "vision tower"), ("merger", "projectors")):
        is_adapted = cfg.lora.rank and not set(cfg.lora.targets) <= _ELSEWHERE[part]
        is_frozen = not learns(cfg, part) and not is_adapted
        rules.append((is_frozen, f"optim.{part}_lr", f"where no weights of the {title} learn"))
    yield from ((key, why) for applies, key, why in rules if applies and command != "serve")
