"""What rows of data.train are like, from a few hundred of its records."""

from collections.abc import Iterator

import numpy as np

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.order import Order
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample import Dropped, Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.paths import home_path
from megatron_vlm.planner.row_sizes import BatchSizes, Mix, assumed_mix

_RECORDS = 256


def mix_of(cfg: Config, sizes: ModelSizes) -> Mix:
    """Records of data.train evenly spaced over its first epoch; assumed rows where there is none,
    or a stream, of which nobody knows what comes."""
    specs = cfg.data.train
    if not specs or any(spec.streaming for spec in specs):
        mix = assumed_mix(sizes, cfg.data.max_tokens)
        return mix if not specs else Mix(mix.rows, f"data.train streams; {mix.origin}")
    cache = None if cfg.data.cache_dir is None else home_path(cfg.data.cache_dir)
    sources = [open_source(spec, cfg.data.image_root, cache) for spec in specs]
    lengths, weights = tuple(map(len, sources)), tuple(spec.weight for spec in specs)
    epoch = Order(lengths, weights, cfg.data.seed, cfg.data.shuffle).epoch(0)
    if not len(epoch):
        raise DataError("has no records", key="data.train")
    places = np.unique(np.linspace(0, len(epoch) - 1, _RECORDS).astype(int))
    encoder = make_encoder(cfg.model.path, cfg.data)
    readers = [make_reader(encoder, cfg.data, sizes, source.root) for source in sources]

    def samples() -> Iterator[Sample]:
        for number, record in epoch[places].tolist():
            source = sources[number]
            try:
                yield readers[number].encode(source[record], source.where(record))
            except (Dropped, DataError):  # the run itself says which, and whether it matters
                continue

    rows = tuple(map(sizes_of_sample, samples()))
    if not rows:
        raise DataError(
            f": none of the {len(places)} records that were sampled can be used",
            key="data.train",
            remedy="megatron-vlm inspect shows why",
        )
    return Mix(rows, f"{len(rows):,} of {sum(lengths):,} records of data.train")


def sizes_of_sample(sample: Sample) -> BatchSizes:
    """A sample as a micro-batch of its own."""
    grids = (*sample.image_grids, *sample.video_grids)
    return BatchSizes(
        rows=1,
        tokens=len(sample.ids_S),
        supervised=sample.num_supervised,
        patches=sample.num_patches,
        largest_image=max((t * h * w for t, h, w in grids), default=0),
        patch_pairs=sample.patch_pairs,
    )
