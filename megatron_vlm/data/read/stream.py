"""Streams: Hugging Face data sets with `streaming: true`, read window by window.

Nothing is indexed. Records are shuffled within a window, in an order that depends only on the seed,
the epoch and the window's number; a run resumes at the start of its window and skips the records
that it had already taken.
"""

import copy
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.config.sources import SourceSpec
from megatron_vlm.data.read.table import table_row
from megatron_vlm.data.read.tar import join_members
from megatron_vlm.errors import ConfigError
from megatron_vlm.paths import require_file, require_files_in

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".zst": "json", ".gz": "json"}
_BUILDERS |= {".tar": "webdataset", ".arrow": "arrow"}


@dataclass(frozen=True)
class StreamRecord:
    """A record as it was read, and where the stream is after it."""

    table: Any  # of one row, in Arrow format
    where: str
    state: dict[str, Any]

    def raw(self) -> Any:
        """The record as plain values."""
        raw = table_row(self.table, self.where)
        if "__key__" in raw:  # a WebDataset sample
            raw = join_members({k: v for k, v in raw.items() if k[:2] != "__"}, self.where)
        return raw


@dataclass(frozen=True)
class Stream:
    """One stream, or several mixed by their weights."""

    dataset: Any  # of `datasets`, in Arrow format
    name: str
    root: str  # where its images lie
    window: int  # records that are shuffled together
    seed: int
    shuffle: bool

    def records(self, epoch: int, state: dict[str, Any] | None) -> Iterator[StreamRecord]:
        """The records of an epoch, from its start or from the state that a record carries."""
        state = state or {"window": 0, "used": 0, "state": None}
        window, used, read = state["window"], state["used"], state["state"]
        # A data set remembers how far it was read, even across calls of `iter`.
        dataset = copy.deepcopy(self.dataset)
        if read is not None:
            dataset.load_state_dict(read)
        records = iter(dataset)
        while tables := list(itertools.islice(records, self.window)):
            generator = np.random.default_rng([self.seed, epoch, window])
            order = generator.permutation(len(tables)) if self.shuffle else np.arange(len(tables))
            for count, index in enumerate(order.tolist()):
                if count >= used:
                    where = f"{self.name}: record {window * self.window + index}"
                    after = {"window": window, "used": count + 1, "state": read}
                    yield StreamRecord(tables[index], where, after)
            # A copy: the data set keeps changing its own.
            window, used, read = window + 1, 0, copy.deepcopy(dataset.state_dict())


def open_stream(specs: Sequence[SourceSpec], cfg: DataConfig, train: bool) -> Stream:
    """The streams of these specs, mixed by weight until each has been read to its end."""
    import datasets

    streams = [_open(spec) for spec in specs]
    mixed = streams[0]
    if len(streams) > 1:
        total = sum(spec.weight for spec in specs)
        mixed = datasets.interleave_datasets(
            streams,
            probabilities=[spec.weight / total for spec in specs],
            seed=cfg.seed,
            stopping_strategy="all_exhausted_without_replacement",
        )
    root = specs[0].image_root or cfg.image_root or os.getcwd()  # validate.py: they share one
    # Arrow's own values: `datasets` would decode images, and without our limits.
    dataset, name = mixed.with_format("arrow"), " + ".join(spec.path for spec in specs)
    return Stream(dataset, name, root, cfg.shuffle_window, cfg.seed, train and cfg.shuffle)


def _open(spec: SourceSpec) -> Any:
    import datasets

    paths = sorted(glob.glob(os.path.expanduser(spec.path), recursive=True))
    builder, options = spec.path, {}
    for path in paths:
        require_files_in(path) if os.path.isdir(path) else require_file(path)
    if paths and not Path(paths[0]).is_dir():
        suffix = Path(paths[0]).suffix
        if suffix not in _BUILDERS:
            raise ConfigError(f"{spec.path} cannot be streamed; give {', '.join(_BUILDERS)}")
        builder, options = _BUILDERS[suffix], {"data_files": {spec.split: paths}}
    try:
        subset = None if options else spec.subset
        return datasets.load_dataset(builder, subset, split=spec.split, streaming=True, **options)
    except Exception as error:  # connection, missing data set, missing split, bad files
        raise ConfigError(f"{spec.path}: `datasets` cannot stream it: {error}") from error
