"""Checks of what a run measures, when, and what follows from the scores."""

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import NoneType

from megatron_vlm.config.data_sources import HELD_OUT
from megatron_vlm.config.schema import Config, RlConfig, check_of
from megatron_vlm.errors import ConfigError

# The interval of eval.every=null and checkpoint.every=null: what comes first of the two.
DEFAULT_MINUTES, DEFAULT_STEPS = 30, 500
_EPOCHS = re.compile(r"(\d{1,9}(?:\.\d{1,20})?(?:e-\d{1,2})?) epochs?")

# The scores that each built-in metric of generated answers has.
BUILT_IN_METRICS = {
    "exact_match": ("exact_match",),
    "anls": ("anls",),
    "relaxed_accuracy": ("relaxed_accuracy",),
    "iou": ("iou", "iou_accuracy"),
}


def epochs_between(every: object) -> Fraction | None:
    """Return the number of epochs of an interval such as "0.5 epochs". Return None for steps, and
    for text without a meaning. A fraction is exact: 0.1 is a tenth, which no float is."""
    match = _EPOCHS.fullmatch(every) if isinstance(every, str) else None
    return Fraction(match[1]) or None if match else None


def epochs_text(epochs: float) -> str:
    """Return an interval of so many epochs as eval.every and checkpoint.every have it."""
    return "1 epoch" if epochs == 1 else f"{str(epochs).removesuffix('.0')} epochs"


def answer_metrics(cfg: Config) -> tuple[str, ...]:
    """Return the metrics of generated answers; none if no answers are generated."""
    exact = ("exact_match",) if cfg.eval.generate else ()
    return tuple(dict.fromkeys((*exact, *cfg.eval.metrics)))


def is_user_metric(metric: str) -> bool:
    """Return whether an entry of eval.metrics names a user's function."""
    return ":" in metric


def metric_name(metric: str) -> str:
    """Return the name of a metric's score: its own name, or that of the user's function."""
    return metric.rpartition(":")[2]


def held_out_names(cfg: Config) -> list[str]:
    """Return the names of the evaluation sets."""
    is_split = cfg.data.split is not None and not cfg.data.eval
    return [HELD_OUT] if is_split else [held_out.name for held_out in cfg.data.eval]


def loss_scores(cfg: Config) -> list[str]:
    """Return the scores of a set that need no generated answers."""
    if cfg.train.objective == "reward":
        return ["loss", "reward_accuracy", "rewards_margin"]
    if cfg.train.objective not in ("embed", "rerank"):
        return ["loss", "token_accuracy"]
    ks = cfg.eval.recall_at
    return ["loss", "accuracy", *(f"{name}@{k}" for name in ("recall", "ndcg") for k in ks)]


@check_of
def check_evaluation(cfg: Config) -> Iterator[ConfigError]:
    """Refuse settings of evaluations and checkpoints that contradict each other."""
    for group in ("eval", "checkpoint"):
        every = getattr(cfg, group).every
        if type(every) not in (int, NoneType) and epochs_between(every) is None:
            yield ConfigError(
                key=f"{group}.every",
                allowed='a number of steps, or of epochs above 0, such as "0.5 epochs"',
            )
    split = cfg.data.split
    if split is not None and split >= 1 and split != int(split):
        yield ConfigError(key="data.split", allowed="a share below 1, or a whole number of records")
    _check_metrics(cfg.eval.metrics)
    if cfg.eval.blind and cfg.train.objective not in ("sft", "distill"):
        yield ConfigError(
            f"compares answers with and without their pictures, and train.objective="
            f"{cfg.train.objective} compares whole examples",
            key="eval.blind",
            remedy="leave it out",
        )
    if cfg.checkpoint.best is not None:
        yield from _best_errors(cfg.checkpoint.best, cfg)
    yield from _best_use_errors(cfg)


@check_of
def check_measuring(cfg: Config) -> Iterator[ConfigError]:
    """Refuse to train where the data cannot give what is to be measured."""
    yield from _split_errors(cfg)
    for metric in filter(is_user_metric, cfg.eval.metrics):
        where = metric.rpartition(":")[0]
        if where.endswith(".py") and not Path(where).expanduser().is_file():
            raise ConfigError(f": there is no file {where}", key="eval.metrics", found=metric)
    for group in ("eval", "checkpoint"):
        every = getattr(cfg, group).every
        if cfg.data.is_stream and epochs_between(every) is not None:
            yield ConfigError(
                ": data.train is a stream, whose epochs have no known length",
                key=f"{group}.every",
                remedy=f"count steps: {group}.every=N",
            )
    best, names = cfg.checkpoint.best, held_out_names(cfg)
    if best is not None and (set_name := best.rpartition("/")[0]) not in names:
        yield ConfigError(
            f": data.eval has no set {set_name!r}",
            key="checkpoint.best",
            remedy=f"it has {', '.join(names) or 'none'}",
        )
    if cfg.train.early_stopping and not cfg.eval.every:
        yield ConfigError(
            "counts evaluations, which must come at fixed steps",
            key="train.early_stopping",
            remedy='set eval.every, such as eval.every="0.5 epochs"',
        )


def _split_errors(cfg: Config) -> Iterator[ConfigError]:
    if cfg.data.split is None:
        return
    if cfg.data.eval:
        yield ConfigError(
            "holds out a part of data.train, and data.eval is set, too",
            key="data.split",
            remedy="give one of them; data.eval=null clears that of a recipe",
        )
    if cfg.data.is_stream:
        yield ConfigError(
            ": data.train is a stream, of which no records can be set aside before it is read",
            key="data.split",
            remedy="name held-out records in data.eval",
        )


def _check_metrics(metrics: tuple[str, ...]) -> None:
    names: dict[str, str] = {}
    for metric in metrics:
        if not isinstance(metric, str):
            raise ConfigError(key="eval.metrics", found=metric, allowed="names of metrics")
        if is_user_metric(metric):
            where, _, function = metric.rpartition(":")
            if not where or not function.isidentifier():
                raise ConfigError(
                    f": {metric} does not name a function",
                    key="eval.metrics",
                    found=metric,
                    allowed="FILE.py:NAME or MODULE:NAME",
                )
        elif metric not in BUILT_IN_METRICS:
            raise ConfigError(
                f": {metric} is no metric",
                key="eval.metrics",
                found=metrics,
                allowed=f"{', '.join(BUILT_IN_METRICS)}, or FILE.py:NAME of a function of your own",
            )
        name = metric_name(metric)
        taken = names.setdefault(name, metric)
        if taken != metric or metrics.count(metric) > 1 or _is_taken(name, metric):
            raise ConfigError(
                f"has two scores with the name {name}",
                key="eval.metrics",
                found=metrics,
                remedy="give each metric once, and functions of your own other names",
            )


def _is_taken(name: str, metric: str) -> bool:
    scores = {score for built_in in BUILT_IN_METRICS.values() for score in built_in}
    fields = {"loss", "token_accuracy", "ranking", "samples", "seconds", "step", "name", "metrics"}
    fields.add("needs_picture")
    return is_user_metric(metric) and (name in scores | fields or name.startswith("blind_"))


def has_agents(rl: RlConfig) -> bool:
    """Return whether programs ask for answers at an address: agents, or the harness of an
    environment."""
    return rl.agent is not None or rl.has_harness


def reward_model_of(rl: RlConfig) -> str | None:
    """Return the folder of rl.reward=model:FOLDER; None if a function gives the rewards."""
    kind, _, folder = (rl.reward or "").partition(":")
    return folder if kind == "model" else None


def has_rewards(cfg: Config) -> bool:
    """Return whether answers get rewards. A teacher alone needs none."""
    return any(each is not None for each in (cfg.rl.reward, cfg.rl.environment, cfg.rl.agent))


def _best_errors(best: str, cfg: Config) -> Iterator[ConfigError]:
    measured = loss_scores(cfg)
    for metric in answer_metrics(cfg):
        measured += BUILT_IN_METRICS.get(metric, (metric_name(metric),))
    measured += ["ranking"] if cfg.eval.candidates is not None else []
    if has_rewards(cfg):
        measured = [] if cfg.rl.eval_scores == "reward" else measured
        measured += ["reward"] if cfg.rl.eval_scores != "loss" else []
    # A user's function may return several numbers, whose names begin with its own.
    prefixes = tuple(metric_name(m) + "_" for m in cfg.eval.metrics if is_user_metric(m))
    name, _, score = best.rpartition("/")
    if not name or not (score in measured or score.startswith(prefixes)):
        yield ConfigError(
            key="checkpoint.best",
            allowed=f"SET/SCORE with a score that is measured: {', '.join(measured)}; exact_match "
            "needs eval.generate=true, ranking needs eval.candidates, others need eval.metrics",
        )


def _best_use_errors(cfg: Config) -> Iterator[ConfigError]:
    stopping, best = cfg.train.early_stopping, cfg.checkpoint.best
    if stopping is None and cfg.train.early_stopping_delta:
        yield ConfigError(
            "has no effect without train.early_stopping",
            key="train.early_stopping_delta",
            remedy="set train.early_stopping=3, for example",
        )
    uses = ["train.early_stopping"] if stopping is not None else []
    if cfg.checkpoint.export_from == "best":
        uses.append("checkpoint.export_from")
        if not cfg.checkpoint.export:
            yield ConfigError(
                "chooses the checkpoint to export, and checkpoint.export=false exports none",
                key="checkpoint.export_from",
                remedy="change one of them",
            )
    for key in uses:
        if best is None:
            yield ConfigError(
                "needs a score that decides which checkpoint is the best",
                key=key,
                remedy="set checkpoint.best=SET/SCORE, such as checkpoint.best="
                f"{next(iter(held_out_names(cfg)), 'eval')}/loss",
            )
