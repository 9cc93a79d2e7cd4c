"""Records that data.split holds out of data.train for evaluation.

The choice depends on data.seed and on the content of the records alone. It is the same at each
layout, after a resume and in another order of the files, and records with the same content are on
the same side.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.records.keys import METADATA
from megatron_vlm.data.sources.source import Source
from megatron_vlm.errors import DataError


def choose_held_out(sources: Sequence[Source], cfg: DataConfig) -> list[np.ndarray]:
    """Return for each source which of its records are held out. All records are read for it."""
    assert cfg.split is not None
    parts = [
        np.array([_digest(source, number, cfg) for number in range(len(source))], dtype=np.uint64)
        for source in sources
    ]
    digests = np.sort(np.concatenate(parts))
    wanted = cfg.split if cfg.split >= 1 else max(1, round(cfg.split * len(digests)))
    count = min(int(wanted), len(digests))
    last = digests[count - 1]  # records with the content of this one come along
    if last == digests[-1]:
        raise DataError(
            f"leaves no record of the {len(digests):,} to train on",
            key="data.split",
            found=cfg.split,
            remedy="hold out fewer, or name held-out records in data.eval",
        )
    return [part <= last for part in parts]


def _digest(source: Source, number: int, cfg: DataConfig) -> int:
    """Return a number by which records are drawn, such as a random one for each content."""
    try:
        raw = source[number]
    except DataError:  # The index reports it or raises it.
        raw = {"wrong": source.where(number)}
    if isinstance(raw, dict):
        names = METADATA | set(cfg.ignore_keys)  # two names of one record are no difference
        raw = {key: value for key, value in raw.items() if key not in names} or raw
    text = json.dumps(_plain(raw), sort_keys=True)
    digest = hashlib.blake2b(f"{cfg.seed} {text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _plain(value: Any) -> Any:
    """Return a value of a record as JSON has it, with digests in place of pictures."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, PIL.Image.Image):
        value = repr((value.mode, value.size)).encode() + value.tobytes()
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value if isinstance(value, bool | int | float | str | None) else str(value)
