"""All sources of data.train, or of one evaluation set, as one ordered set of samples."""

import atexit
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batch.batching import RowSize
from megatron_vlm.data.batch.cost import WorkModel
from megatron_vlm.data.batch.order import Order, all_of
from megatron_vlm.data.batch.position import Position
from megatron_vlm.data.batch.stream_set import StreamSet, open_stream
from megatron_vlm.data.encode.index import Index, build_index, check_errors
from megatron_vlm.data.encode.reader import Reader, make_encoder, make_reader
from megatron_vlm.data.encode.row import PlacedRow
from megatron_vlm.data.read.sources import Source, open_source, parse_specs
from megatron_vlm.errors import ConfigError, DataError

log = logging.getLogger("megatron_vlm.data")

Handle = tuple[int, int]  # (source, sample)


@dataclass(frozen=True)
class DataSet:
    """All sources of data.train, or of one evaluation set, indexed."""

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    indexes: tuple[Index, ...]
    order: Order
    work: WorkModel

    def size(self, source: int, sample: int) -> RowSize:
        index = self.indexes[source]
        tokens, patches = int(index.tokens[sample]), int(index.patches[sample])
        cost = self.work.row(
            tokens, int(index.supervised[sample]), patches, int(index.patch_pairs[sample])
        )
        return RowSize(tokens, float(cost), patches, int(index.images[sample]))

    def epoch(self, start: Position) -> Iterator[tuple[Handle, RowSize, Position]]:
        """The samples from a position to the end of its epoch, each with the position after it."""
        order = self.order.epoch(start.epoch)
        for taken in range(start.taken, len(order)):
            handle = (int(order[taken, 0]), int(order[taken, 1]))
            yield handle, self.size(*handle), Position(start.epoch, taken + 1)

    def row(self, handle: Handle) -> PlacedRow:
        """The sample with its pixels, from the source."""
        source, sample = handle
        index = self.indexes[source]
        record = int(index.records[sample])
        where = self.sources[source].where(record)
        raw = self.sources[source][record]
        return self.readers[source].row(raw, where, index[sample])

    def faults(self) -> tuple[Counter[str], list[str]]:
        """Dropped samples by rule, and the errors of wrong ones, over all sources."""
        faults = [index.faults for index in self.indexes]
        dropped = Counter(rule for fault in faults for _, rule in fault.dropped)
        return dropped, [error for fault in faults for error in fault.errors]


def open_data(
    value: Any,
    key: str,
    cfg: DataConfig,
    model_path: str,
    hf_config: PretrainedConfig,
    share: tuple[int, int] = (0, 1),
    train: bool = True,
) -> DataSet | StreamSet:
    """Open and index every source of `data.train` or `data.eval`; streams are only opened.
    `share`: this process of so many that index together."""
    encoder = make_encoder(model_path, cfg)
    cache = None if cfg.cache_dir is None else Path(cfg.cache_dir).expanduser()
    specs = parse_specs(value, key)
    if any(spec.streaming for spec in specs):
        if not all(spec.streaming for spec in specs):
            raise ConfigError(f"{key}: some sources stream and some do not; let all or none stream")
        return open_stream(specs, encoder, cfg, hf_config, train)
    sources = tuple(open_source(spec, cfg.image_root, cache) for spec in specs)
    readers = tuple(make_reader(encoder, cfg, hf_config, source.root) for source in sources)
    scratch = Path(tempfile.mkdtemp(prefix="megatron_vlm-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    indexes = tuple(
        build_index(source, reader, cfg, scratch, share)
        for source, reader in zip(sources, readers, strict=True)
    )
    lengths = tuple(len(index) for index in indexes)
    order = all_of(lengths)
    if train:
        order = Order(lengths, tuple(spec.weight for spec in specs), cfg.seed, cfg.shuffle)
    data = DataSet(sources, readers, indexes, order, WorkModel.of(hf_config))
    for index in indexes:
        for where, rule in index.faults.dropped:
            log.info("dropped %s: %s", where, rule)
        for error in index.faults.errors:
            log.warning("skipped %s", error)
    check_errors(data.faults()[1], cfg)
    if not len(order):
        dropped, errors = data.faults()
        raise DataError(
            f"{key}: no sample is left: {sum(dropped.values())} dropped {dict(dropped)}, "
            f"{len(errors)} wrong"
        )
    return data
