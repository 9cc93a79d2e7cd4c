"""The learning rate of a step as a pure function, so that checkpoints need not save it."""

import math
from fractions import Fraction

from megatron_vlm.config.checks import WARMUP_REMEDY
from megatron_vlm.config.schema import Config, OptimConfig, TrainConfig
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.printable import show_count


def total_steps(train: TrainConfig, samples: int | None, prompts_only: bool = False) -> int:
    """Return train.steps, or the number of steps in train.epochs. A stream has no number of
    samples, and needs train.steps. The last batch of an epoch may be short, except for prompts,
    whose batches cross epochs."""
    if train.steps is not None:
        return train.steps
    assert samples is not None, "checks.py: a stream has train.steps"
    epochs, size = Fraction(str(train.epochs)), train.global_batch_size  # 1.1 is no exact float
    whole = 0 if prompts_only else math.floor(epochs)
    rest = math.ceil((epochs - whole) * samples / size)
    return max(1, whole * math.ceil(samples / size) + rest)


def epochs_in(steps: int, samples: int, batch_size: int, prompts_only: bool) -> float:
    """Return the number of epochs in so many steps. Only batches of prompts cross epochs."""
    whole, rest = (0, steps) if prompts_only else divmod(steps, math.ceil(samples / batch_size))
    return whole + rest * batch_size / samples


def warmup_of(optim: OptimConfig, total: int) -> int:
    """Return the number of warm-up steps among `total`. A ratio is rounded up, and leaves at least
    one step."""
    part = math.ceil(round((optim.warmup_ratio or 0.0) * total, 6))
    return optim.warmup_steps or min(part, total - 1)


def describe_run_length(cfg: Config, samples: int | None, total: int) -> str:
    """Describe the length of a run of `total` steps in a line. Raise a ConfigError if the run would
    end before it reaches lr."""
    train, warmup = cfg.train, warmup_of(cfg.optim, total)
    data = "a stream" if samples is None else show_count(samples, "sample")
    if warmup >= total:
        epochs = "" if train.steps is not None else f", train.epochs={train.epochs:g}"
        raise ConfigError(
            f"leaves none of the {total} steps ({data}, train.global_batch_size="
            f"{train.global_batch_size}{epochs}): the learning rate would never be reached",
            key="optim.warmup_steps",
            found=warmup,
            remedy=WARMUP_REMEDY,
        )
    steps = f"{total:,} step{'s' * (total > 1)} of {train.global_batch_size:,}"
    return f"{data}, {steps}, {warmup:,} of them warm-up"


def lr_at(optim: OptimConfig, step: int, total: int) -> float:
    """Return the learning rate of step `step` (from 0) of `total`: warm-up, then optim.schedule
    down to optim.min_lr_ratio."""
    warmup = warmup_of(optim, total)
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    decay_steps = max(1, total - warmup)
    done = min(1.0, (step - warmup) / decay_steps)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * _shape(optim, done))


def _shape(optim: OptimConfig, done: float) -> float:
    """Return the factor of the schedule, from 1 down to 0 while `done` goes from 0 to 1."""
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "wsd":  # warm up, stay, decay
        return min(1.0, (1 - done) / optim.decay_ratio) if optim.decay_ratio else 1.0
    return 1.0
