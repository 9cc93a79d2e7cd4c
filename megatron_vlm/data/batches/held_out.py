"""Samples that data.split holds out of data.train for evaluation.

The choice depends on data.seed and on the content of the records alone. It is the same at each
layout, after a resume and in another order of the files, and records with the same content are on
the same side.
"""

from collections.abc import Sequence

import numpy as np

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.tokens.index import Index
from megatron_vlm.errors import DataError


def choose_held_out(indexes: Sequence[Index], cfg: DataConfig) -> list[np.ndarray]:
    """Return for each index which of its samples are held out."""
    assert cfg.split is not None
    parts = [_draw(index.digests, cfg.seed) for index in indexes]
    drawn = np.sort(np.concatenate(parts))
    if not len(drawn):
        return parts  # the caller reports that there are no samples
    wanted = cfg.split if cfg.split >= 1 else max(1, round(cfg.split * len(drawn)))
    count = min(int(wanted), len(drawn))
    last = drawn[count - 1]  # samples with the content of this one come along
    if last == drawn[-1]:
        raise DataError(
            f"leaves no record of the {len(drawn):,} to train on",
            key="data.split",
            found=cfg.split,
            remedy="hold out fewer, or name held-out records in data.eval",
        )
    return [part <= last for part in parts]


def _draw(digests: np.ndarray, seed: int) -> np.ndarray:
    """Return a random number for each digest and this seed, by the mixer of SplitMix64."""
    mixed = digests.view(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
