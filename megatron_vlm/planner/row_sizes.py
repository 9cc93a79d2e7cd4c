"""Sizes of rows and micro-batches, which are all that the planner knows about the data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.config.objective_configs import RecordKind
from megatron_vlm.config.objectives import records_of
from megatron_vlm.config.schema import Config, TrainConfig
from megatron_vlm.data.batches.balance import Limits, RowSize, WorkModel, plan_batch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.batches.order import Order
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample import Example, RecordDropped, Sample
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.untrusted import home_path

_MAX_ROWS = 256  # maximum rows of a step that is planned


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a micro-batch."""

    rows: int
    tokens: int  # tokens of its longest row
    supervised: int
    patches: int
    largest_image: int  # patches
    patch_pairs: int = 0  # pairs within frames, summed over all frames

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.tokens

    def planned(self, work: WorkModel) -> RowSize:
        """Return the size of the rows of a sample, all as long as the longest, for planning."""
        lengths = [self.tokens] * self.rows
        longest = self.tokens if self.rows > 1 else None
        cost = float(work.row(lengths, self.supervised, self.patches, self.patch_pairs))
        return RowSize(self.padded_tokens, cost, self.patches, 0, self.rows, longest)

    def patches_of_rank(self, tp: int, shared: bool) -> int:
        """Return the patches of the TP rank with the most. The ranks divide shared images."""
        ranks = tp if shared else 1
        return max(-(-self.patches // ranks), self.largest_image if ranks > 1 else 0)

    @staticmethod
    def from_rows(rows: Sequence["BatchSizes"]) -> "BatchSizes":
        """Return the sizes of the micro-batch of these rows."""
        return BatchSizes(
            rows=sum(row.rows for row in rows),
            tokens=max(row.tokens for row in rows),
            supervised=sum(row.supervised for row in rows),
            patches=sum(row.patches for row in rows),
            largest_image=max(row.largest_image for row in rows),
            patch_pairs=sum(row.patch_pairs for row in rows),
        )

    @staticmethod
    def from_micro_batch(batch: MicroBatch) -> "BatchSizes":
        """Return the sizes of a micro-batch on the host. Stages after the first have no patches,
        and only know whether there are any."""
        pixels = (batch.pixel_values_PC, batch.pixel_values_videos_PC)
        grids = (batch.image_grid_I3, batch.video_grid_I3)
        rows, tokens = batch.tokens_BS5.shape[:2]
        return BatchSizes(
            rows,
            tokens,
            batch.num_supervised,
            sum(len(each) for each in pixels if each is not None) or int(batch.visual),
            max((int(each.prod(-1).max()) for each in grids if each is not None), default=0),
        )


Step = list[list[BatchSizes]]  # micro-batches of each replica


@dataclass(frozen=True)
class RowSample:
    """Sample of a data set's records, each as its own micro-batch, and its origin."""

    rows: tuple[BatchSizes, ...]
    origin: str

    def steps(self, train: TrainConfig, sizes: ModelSizes, dp: int) -> list[Step]:
        """Return steps that use every row at least once, planned as the run plans them. If a step
        has more rows than the sample, some of its replicas represent all of them."""
        rows_per_step, replicas = train.global_batch_size, dp
        if rows_per_step > (max_rows := max(_MAX_ROWS, len(self.rows))):
            replicas = max(1, dp * max_rows // rows_per_step)
            rows_per_step = max(replicas, rows_per_step * replicas // dp)
        count = max(1, len(self.rows) // rows_per_step)
        work, limits = WorkModel.from_sizes(sizes), Limits.from_config(train)
        steps = []
        for step in range(count):
            places = range(step * rows_per_step, (step + 1) * rows_per_step)
            rows = [self.rows[place % len(self.rows)] for place in places]
            costs = [row.planned(work) for row in rows]
            plan = plan_batch(costs, replicas, limits)
            share = [[BatchSizes.from_rows([rows[r] for r in group]) for group in g] for g in plan]
            steps.append(share)
        return steps

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a row."""
        return sum(row.tokens for row in self.rows) / len(self.rows)


def heaviest_micro_batches(steps: Sequence[Step]) -> list[BatchSizes]:
    """Return the micro-batches of the replica with the most tokens: all may be in flight."""
    shares = [share for step in steps for share in step]
    return max(shares, key=lambda share: sum(batch.padded_tokens for batch in share))


def assumed_mix(sizes: ModelSizes, max_tokens: int) -> RowSample:
    """Return rows to assume without data. Two rows of three have one picture of a megapixel, and
    the others are text. A third of the text is trained."""
    patches = sizes.vision.megapixel
    image_tokens = patches // sizes.vision.merge**2
    text, plain_tokens = 512, 1024
    whole = min(max_tokens, image_tokens + text)
    picture = BatchSizes(1, whole, text // 3, patches, patches, patch_pairs=patches**2)
    plain = BatchSizes(1, min(max_tokens, plain_tokens), plain_tokens // 3, 0, 0)
    origin = (
        f"assumed, two of three with a picture of 1024 x 1024 and {text} tokens of text, one of "
        f"{plain_tokens} tokens of text; a third of the text is trained"
    )
    return RowSample((picture, picture, plain) * 32, origin)


# Rows of data.train are estimated from a few hundred of its records.

_RECORDS = 256


def mix_of(cfg: Config, sizes: ModelSizes) -> RowSample:
    """Return the rows of records that are evenly spaced over the first epoch of data.train. Without
    data.train, or for a stream, whose records are unknown, return assumed rows."""
    specs = cfg.data.train
    if not specs or cfg.data.is_stream:
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

    def examples(kind: RecordKind) -> Iterator[Example]:
        readers = [make_reader(encoder, cfg.data, sizes, source.root, kind) for source in sources]
        for number, record in epoch[places].tolist():
            source = sources[number]
            try:
                yield readers[number].encode_example(source[record], source.where(record))
            except (RecordDropped, DataError):  # the run reports them, and whether they matter
                continue

    # Prompts of `rl` may have no answers.
    found = [*examples(records_of(cfg))] or [*examples("prompt")]
    rows = tuple(BatchSizes.from_rows([*map(sizes_of_sample, example)]) for example in found)
    if not rows:
        raise DataError(
            f": none of the {len(places)} records that were sampled can be used",
            key="data.train",
            remedy="megatron-vlm inspect shows why",
        )
    return RowSample(rows, f"{len(rows):,} of {sum(lengths):,} records of data.train")


def sizes_of_sample(sample: Sample) -> BatchSizes:
    """Return the sizes of a sample as its own micro-batch."""
    grids = (*sample.image_grids, *sample.video_grids)
    return BatchSizes(
        rows=1,
        tokens=len(sample.ids_S),
        supervised=sample.num_supervised,
        patches=sample.num_patches,
        largest_image=max((t * h * w for t, h, w in grids), default=0),
        patch_pairs=sample.patch_pairs,
    )
