"""The learning rate of a step: a pure function, so that checkpoints need not save it."""

import math

from megatron_vlm.config.schema import OptimConfig


def lr_at(optim: OptimConfig, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: warm-up, then optim.schedule down to
    optim.min_lr_ratio."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    left = max(1, total - optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / left)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * _shape(optim, done))


def _shape(optim: OptimConfig, done: float) -> float:
    """From 1 down to 0 while `done` goes from 0 to 1."""
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "wsd":  # warm up, stay, decay
        return min(1.0, (1 - done) / optim.decay_ratio) if optim.decay_ratio else 1.0
    return 1.0
