"""The sizes of rows and micro-batches, which is all that the planner knows of data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.config.schema import Config, TrainConfig
from megatron_vlm.data.batches.balance import Limits, plan_batch
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.data.batches.dataset import Order
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample import RecordDropped, Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.untrusted import home_path

_MOST_ROWS = 256  # of a step that is planned


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a micro-batch."""

    rows: int
    tokens: int  # of its longest row
    supervised: int
    patches: int
    largest_image: int  # in patches
    patch_pairs: int = 0  # within frames, summed over all of them

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.tokens

    def patches_of_rank(self, tp: int, shared: bool) -> int:
        """Of the TP rank that has most, where the images are shared out, or each has all."""
        ranks = tp if shared else 1
        return max(-(-self.patches // ranks), self.largest_image if ranks > 1 else 0)

    @staticmethod
    def of(rows: Sequence["BatchSizes"]) -> "BatchSizes":
        """Of rows that go together."""
        return BatchSizes(
            rows=sum(row.rows for row in rows),
            tokens=max(row.tokens for row in rows),
            supervised=sum(row.supervised for row in rows),
            patches=sum(row.patches for row in rows),
            largest_image=max(row.largest_image for row in rows),
            patch_pairs=sum(row.patch_pairs for row in rows),
        )


Step = list[list[BatchSizes]]  # the micro-batches of each replica


@dataclass(frozen=True)
class RowSample:
    """Rows that stand for a data set, each as a micro-batch of its own, and where they are from."""

    rows: tuple[BatchSizes, ...]
    origin: str

    def steps(self, train: TrainConfig, sizes: ModelSizes, dp: int) -> list[Step]:
        """Steps that use every row at least once, planned as the run plans them. Where a step has
        more rows than these, some of its replicas stand for all."""
        wanted, replicas = train.global_batch_size, dp
        if wanted > (most := max(_MOST_ROWS, len(self.rows))):
            replicas = max(1, dp * most // wanted)
            wanted = max(replicas, wanted * replicas // dp)
        count = max(1, len(self.rows) // wanted)
        work, limits = WorkModel.of(sizes), Limits.of(train)
        found = []
        for step in range(count):
            places = range(step * wanted, (step + 1) * wanted)
            rows = [self.rows[place % len(self.rows)] for place in places]
            costs = [
                work.row_size(row.tokens, row.supervised, row.patches, row.patch_pairs)
                for row in rows
            ]
            plan = plan_batch(costs, replicas, limits)
            share = [[BatchSizes.of([rows[r] for r in group]) for group in g] for g in plan]
            found.append(share)
        return found

    @property
    def tokens(self) -> float:
        """The mean row's."""
        return sum(row.tokens for row in self.rows) / len(self.rows)


def heaviest_share(steps: Sequence[Step]) -> list[BatchSizes]:
    """The micro-batches of the replica with most tokens: sooner or later its largest are under way
    together."""
    shares = [share for step in steps for share in step]
    return max(shares, key=lambda share: sum(batch.padded_tokens for batch in share))


def assumed_mix(sizes: ModelSizes, max_tokens: int) -> RowSample:
    """Where there is no data: two rows of three have one picture of a megapixel, the others are
    text; a third of the text is trained."""
    pixels_of_patch = math.prod((16, 16))
    patches = 2**20 // pixels_of_patch
    seen = patches // sizes.vision.merge**2
    text, alone = 512, 1024
    picture = BatchSizes(
        1, min(max_tokens, seen + text), text // 3, patches, patches, patch_pairs=patches**2
    )
    plain = BatchSizes(1, min(max_tokens, alone), alone // 3, 0, 0)
    origin = (
        f"assumed, two of three with a picture of 1024 x 1024 and {text} tokens of text, one of "
        f"{alone} tokens of text; a third of the text is trained"
    )
    return RowSample((picture, picture, plain) * 32, origin)


# What rows of data.train are like, from a few hundred of its records.

_RECORDS = 256


def mix_of(cfg: Config, sizes: ModelSizes) -> RowSample:
    """Records of data.train evenly spaced over its first epoch; assumed rows where there is none,
    or a stream, of which nobody knows what comes."""
    specs = cfg.data.train
    if not specs or any(spec.streaming for spec in specs):
        mix = assumed_mix(sizes, cfg.data.max_tokens)
        return mix if not specs else RowSample(mix.rows, f"data.train streams; {mix.origin}")
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
            except (RecordDropped, DataError):  # the run itself says which, and whether it matters
                continue

    rows = tuple(map(sizes_of_sample, samples()))
    if not rows:
        raise DataError(
            f": none of the {len(places)} records that were sampled can be used",
            key="data.train",
            remedy="megatron-vlm inspect shows why",
        )
    return RowSample(rows, f"{len(rows):,} of {sum(lengths):,} records of data.train")


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
