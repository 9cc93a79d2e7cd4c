"""Sources that are read as they come: Hugging Face data sets with `streaming: true`.

Nothing is indexed, so records are encoded on the way, and shuffled within windows. A window's order
depends on seed, epoch and its number alone; a run resumes at the start of its window and passes
over what it had of it, without opening a picture.
"""

import copy
import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset
from transformers import PretrainedConfig

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batch.batching import RowSize
from megatron_vlm.data.batch.cost import WorkModel
from megatron_vlm.data.batch.position import Position
from megatron_vlm.data.encode.reader import Reader, make_reader
from megatron_vlm.data.encode.row import PlacedRow
from megatron_vlm.data.encode.sample import Dropped, Encoder, Sample
from megatron_vlm.data.processes import as_it_is, start_server
from megatron_vlm.data.read.sources import SourceSpec, table_row
from megatron_vlm.data.read.tar import join_members
from megatron_vlm.errors import ConfigError, DataError

log = logging.getLogger("megatron_vlm.data")

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".zst": "json", ".gz": "json"}
_BUILDERS |= {".tar": "webdataset", ".arrow": "arrow"}


@dataclass(frozen=True)
class Item:
    """A record on its way to the process that decodes its pixels."""

    raw: Any
    where: str
    sample: Sample


@dataclass(frozen=True)
class _Encoded:
    """What became of a record, and where the stream is after it."""

    where: str
    item: Item | None
    dropped: str | None
    error: str | None
    place: dict[str, Any]


@dataclass
class StreamSet:
    """Streams, several mixed by their weights, as the loader takes samples."""

    dataset: Any  # of `datasets`, in Arrow format
    name: str
    reader: Reader
    cfg: DataConfig
    work: WorkModel
    shuffle: bool
    dropped: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def epoch(self, start: Position) -> Iterator[tuple[Item, RowSize, Position]]:
        """The samples from a position to the end of its epoch, each with the position after it."""
        taken = start.taken
        for encoded in self._encoded(start):
            if encoded.dropped is not None:
                self.dropped[encoded.dropped] += 1
                log.info("dropped %s: %s", encoded.where, encoded.dropped)
            elif encoded.error is not None:
                if self.cfg.on_error == "raise":
                    raise DataError(encoded.error)
                self.errors.append(encoded.error)
                log.warning("skipped %s", encoded.error)
            else:
                assert encoded.item is not None
                taken += 1
                after = Position(start.epoch, taken, encoded.place)
                yield encoded.item, self._size(encoded.item.sample), after
        if not taken:
            raise DataError(
                f"{self.name}: no sample is left: {sum(self.dropped.values())} dropped "
                f"{dict(self.dropped)}, {len(self.errors)} wrong"
            )

    def row(self, handle: Item) -> PlacedRow:
        """The sample with its pixels."""
        return self.reader.row(handle.raw, handle.where, handle.sample)

    def faults(self) -> tuple[Counter[str], list[str]]:
        """Dropped samples by rule and errors, so far."""
        return self.dropped, self.errors

    def _size(self, sample: Sample) -> RowSize:
        tokens, patches = len(sample.ids_S), sample.num_patches
        cost = self.work.row(tokens, sample.num_supervised, patches, sample.patch_pairs)
        return RowSize(tokens, float(cost), patches, len(sample.image_grids))

    def _encoded(self, start: Position) -> Iterator[_Encoded]:
        """Read and encoded by a process of its own: a stream has one reader, or no order."""
        records = _Records(self.dataset, self.name, self.reader, self.cfg, self.shuffle, start)
        workers = min(self.cfg.num_workers, 1)
        if workers:
            start_server()
        return iter(
            DataLoader(
                records,
                batch_size=None,
                collate_fn=as_it_is,
                num_workers=workers,
                prefetch_factor=64 if workers else None,
                multiprocessing_context="forkserver" if workers else None,
            )
        )


@dataclass
class _Records(IterableDataset[_Encoded]):
    """The records of an epoch from a position on, encoded."""

    dataset: Any
    name: str
    reader: Reader
    cfg: DataConfig
    shuffle: bool
    start: Position

    def __iter__(self) -> Iterator[_Encoded]:
        place = self.start.stream or {"window": 0, "used": 0, "state": None}
        # A data set remembers how far it was read, even over the next `iter`.
        dataset = copy.deepcopy(self.dataset)
        if place["state"] is not None:
            dataset.load_state_dict(place["state"])
        records = iter(dataset)
        size, state, used = self.cfg.shuffle_window, place["state"], place["used"]
        for window in itertools.count(place["window"]):
            raws = list(itertools.islice(records, size))
            if not raws:
                return
            for count, index in enumerate(self._order(window, len(raws))):
                if count >= used:
                    where = f"{self.name}: record {window * size + index}"
                    place = {"window": window, "used": count + 1, "state": state}
                    yield self._encode(raws[index], where, place)
            state, used = copy.deepcopy(dataset.state_dict()), 0  # it goes on changing

    def _order(self, window: int, length: int) -> list[int]:
        if not self.shuffle:
            return list(range(length))
        generator = np.random.default_rng([self.cfg.seed, self.start.epoch, window])
        order: list[int] = generator.permutation(length).tolist()
        return order

    def _encode(self, table: Any, where: str, place: dict[str, Any]) -> _Encoded:
        try:
            raw = table_row(table)
            if "__key__" in raw:  # a WebDataset sample
                raw = join_members({k: v for k, v in raw.items() if k[:2] != "__"}, where)
            item = Item(raw, where, self.reader.encode(raw, where))
        except Dropped as rule:
            return _Encoded(where, None, str(rule), None, place)
        except DataError as error:
            return _Encoded(where, None, None, str(error), place)
        return _Encoded(where, item, None, None, place)


def open_stream(
    specs: Sequence[SourceSpec],
    encoder: Encoder,
    cfg: DataConfig,
    hf_config: PretrainedConfig,
    train: bool,
) -> StreamSet:
    """Streams mixed by weight until each has come once."""
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
    roots = {spec.image_root or cfg.image_root or os.getcwd() for spec in specs}
    if len(roots) > 1:
        raise ConfigError(
            f"streams that are mixed share one image_root; these have {sorted(roots)}"
        )
    name = " + ".join(spec.path for spec in specs)
    return StreamSet(
        # Arrow's own values: no image is decoded here, with the limits of somebody else.
        mixed.with_format("arrow"),
        name,
        make_reader(encoder, cfg, hf_config, roots.pop()),
        cfg,
        WorkModel.of(hf_config),
        shuffle=train and cfg.shuffle,
    )


def _open(spec: SourceSpec) -> Any:
    import datasets

    paths = sorted(glob.glob(os.path.expanduser(spec.path), recursive=True))
    try:
        if paths and not Path(paths[0]).is_dir():
            builder = _BUILDERS.get(Path(paths[0]).suffix)
            if builder is None:
                raise ConfigError(f"{spec.path}: cannot be streamed; known: {', '.join(_BUILDERS)}")
            files = {spec.split: paths}
            return datasets.load_dataset(
                builder, data_files=files, split=spec.split, streaming=True
            )
        return datasets.load_dataset(spec.path, spec.subset, split=spec.split, streaming=True)
    except ConfigError:
        raise
    except Exception as error:  # connection, missing data set, missing split, bad files
        raise ConfigError(f"{spec.path}: `datasets` cannot stream it: {error}") from error
