"""Keys that a user gave and that have no effect: in a command, or with the other settings."""

from collections.abc import Iterator, Sequence

from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.evaluation_checks import has_agents, held_out_names, reward_model_of
from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config, get
from megatron_vlm.config.trainable import learns
from megatron_vlm.errors import ConfigError, gather_errors

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
