"""An inspection as a report: samples as the model sees them, then figures of the whole set, with
faults, padding and balance. Sizes come from the index alone: nothing is decoded for them."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.data.batches import balance
from megatron_vlm.data.batches.data_warnings import unused_key_warnings
from megatron_vlm.data.batches.dataset import DataSet, Handle, NoSampleError
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.tokens.sample_views import ShownSample, ShownTurn, TextPiece, View
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.report import sections

_MAX_PIXELS = 2**26  # bytes of all pictures of a page, before they are compressed
MAX_STEPS = 500  # steps to measure, because planning a whole large epoch would take minutes


@dataclass(frozen=True)
class Column:
    """Measure of all samples."""

    name: str
    values: np.ndarray

    @property
    def summary(self) -> tuple[float, ...]:
        """The figures that SUMMARY names."""
        low, median, p95, high = np.percentile(self.values, (0, 50, 95, 100)).tolist()
        return (int(self.values.sum()), low, median, float(self.values.mean()), p95, high)


SUMMARY = ("total", "min", "median", "mean", "p95", "max")
SOURCE_COUNTS = ("records", "samples", "dropped", "wrong", "per epoch")
Source = tuple[str, float, tuple[int, ...]]  # name, weight, and the figures of SOURCE_COUNTS


@dataclass(frozen=True)
class BatchingMethod:
    """A method of forming micro-batches, measured over all measured steps."""

    name: str
    padding: float  # share of padding among all positions
    imbalance: float  # cost of the busiest rank over that of the mean rank, mean over steps
    worst: float  # imbalance of the worst step
    micro_batches: float  # micro-batches of a step, mean


@dataclass(frozen=True)
class Batching:
    """The global batches of the first epoch."""

    ranks: int
    batch_size: int
    limits: balance.Limits
    steps: int
    measured: int  # number of these steps that were measured
    ways: tuple[BatchingMethod, ...]

    @property
    def caption(self) -> str:
        """The measured steps and their settings, in a sentence."""
        rows, tokens = self.limits.rows, self.limits.tokens
        size = f"train.micro_batch_size={rows}"
        if tokens is not None:
            size = f"train.micro_batch_tokens={tokens}"
        steps = f"{self.steps:,} steps" if self.steps > 1 else "the one step"
        if self.measured < self.steps:
            steps = f"the first {self.measured:,} of {self.steps:,} steps"
        return (
            f"Over {steps} of the first epoch: train.global_batch_size={self.batch_size}, {size}, "
            f"{self.ranks:,} data parallel rank{'s' if self.ranks > 1 else ''}. "
            "Busiest rank: its cost over the mean rank's."
        )


@dataclass(frozen=True)
class Inspection:
    """Content of the report."""

    settings: tuple[tuple[str, str], ...]
    num_samples: int
    shown: tuple[ShownSample, ...]
    sources: tuple[Source, ...]
    columns: tuple[Column, ...]
    dropped: tuple[tuple[str, str], ...]  # place and rule
    errors: tuple[str, ...]
    unused_keys: str  # the keys that the data ignores, in a sentence; or empty
    batching: Batching
    num_wanted: int  # samples to show
    in_terminal: int  # how many of them a terminal shows

    @property
    def rules(self) -> list[tuple[str, int, str]]:
        """The rules that dropped records, with their counts, largest first, and first places."""
        counts = Counter(rule for _, rule in self.dropped)
        first = {rule: where for where, rule in reversed(self.dropped)}
        return [(rule, count, first[rule]) for rule, count in counts.most_common()]


def collect_statistics(
    cfg: Config,
    data: DataSet,
    numbers: Sequence[int],
    ranks: int,
    pictures: bool,
    in_terminal: int | None = None,
) -> Inspection:
    """Collect the statistics of a data set, and show the samples with these numbers. A terminal
    shows `in_terminal` of them, or all."""
    faults = [index.faults for index in data.indexes]
    titles = {"supervised": "trained tokens"}
    columns = tuple(
        Column(titles.get(name, name), np.concatenate([getattr(i, name) for i in data.indexes]))
        for name in ("tokens", "supervised", "images", "videos", "patches")
    )
    return Inspection(
        _settings(cfg),
        sum(map(len, data.indexes)),
        tuple(_shown(data, numbers, pictures)),
        tuple(_sources(data)),
        columns,
        tuple(entry for fault in faults for entry in fault.dropped),
        tuple(message for fault in faults for message in fault.errors),
        next(unused_key_warnings("data.train", data, cfg.data), ""),
        measure_batching(cfg, data, ranks),
        len(numbers),
        len(numbers) if in_terminal is None else in_terminal,
    )


def _shown(data: DataSet, numbers: Sequence[int], pictures: bool) -> Iterator[ShownSample]:
    """Yield the samples with these numbers, until their pictures would make the page too large."""
    pixels = 0
    for number in numbers:
        if pixels > _MAX_PIXELS:
            return
        shown = data.show(data.handle(number), pictures, number)
        pieces = (piece for turn in shown.turns for piece in turn.pieces)
        views = (piece.view for piece in pieces if piece.view is not None)
        pixels += sum(picture.size for view in views for picture in view.pictures)
        yield shown


def column_figure(value: float) -> str:
    """Format a number with at most one decimal, such as 1,234 or 12.5."""
    return f"{value:,.1f}".removesuffix(".0")


def _settings(cfg: Config) -> tuple[tuple[str, str], ...]:
    names = ["train_on", "max_tokens", "max_images", "truncation", "min_pixels", "max_pixels"]
    given = {f"data.{name}": getattr(cfg.data, name) for name in names}
    given |= {f"data.video.{name}": value for name, value in asdict(cfg.data.video).items()}
    shown = ((key, str(value)) for key, value in given.items() if value)
    return (("model.path", cfg.model.path), *shown)


def _sources(data: DataSet) -> Iterator[Source]:
    parts = zip(data.sources, data.indexes, data.order.weights, data.order.counts, strict=True)
    for source, index, weight, per_epoch in parts:
        lost = (len(index.faults.dropped), len(index.faults.errors))
        yield source.name, weight, (len(source), len(index), *lost, per_epoch)


def measure_batching(cfg: Config, data: DataSet, ranks: int) -> Batching:
    """Measure padding and balance over the steps of the first epoch, once as the loader plans them,
    and once in plain order with the same number of rows in each micro-batch."""
    batch_size = cfg.train.global_batch_size
    limits = balance.Limits.from_config(cfg.train)
    epoch = itertools.islice(data.epoch(Position()), MAX_STEPS * batch_size)
    sizes = [size for _, size, _ in epoch]
    steps = [sizes[start : start + batch_size] for start in range(0, len(sizes), batch_size)]
    planned, naive = [], []
    for sizes in steps:
        planned.append(balance.measure(balance.plan_batch(sizes, ranks, limits), sizes))
        rows = limits.rows
        if limits.tokens is not None:
            rows = max(1, round(len(sizes) / planned[-1].micro_batches))
        naive.append(balance.measure(balance.naive_plan(sizes, ranks, rows), sizes))
    ways = (_way("as planned", planned, steps), _way("in plain order", naive, steps))
    total = math.ceil(len(data.order) / batch_size)
    return Batching(ranks, batch_size, limits, total, len(steps), ways)


def _way(
    name: str, measured: Sequence[balance.Balance], steps: Sequence[Sequence[balance.RowSize]]
) -> BatchingMethod:
    """Summarize all steps: padding over all positions, and means of the other figures."""
    real = [sum(size.tokens for size in sizes) for sizes in steps]
    positions = sum(n / (1 - step.padding) for n, step in zip(real, measured, strict=True))
    imbalances = [step.imbalance for step in measured]
    return BatchingMethod(
        name,
        1 - sum(real) / positions,
        sum(imbalances) / len(steps),
        max(imbalances),
        sum(step.micro_batches for step in measured) / len(steps),
    )


@dataclass(frozen=True)
class _DecodeErrors:
    """The error of each sample that cannot be decoded, found in worker processes."""

    data: DataSet

    def __getitem__(self, handle: Handle) -> tuple[Handle, str | None]:
        try:
            self.data.rows(handle)
        except DataError as error:
            return handle, str(error)
        return handle, None


def only_decodable(data: DataSet, cfg: DataConfig) -> DataSet:
    """Decode every sample that has pictures or videos. Return the data without those that fail;
    their errors are among its faults."""
    handles = [
        (source, sample)
        for source, index in enumerate(data.indexes)
        for sample in np.flatnonzero(index.patches).tolist()
    ]
    tried = map_in_processes(_DecodeErrors(data), handles, cfg.num_workers, cfg.prefetch)
    errors = {handle: error for handle, error in tried if error is not None}
    indexes = []
    for source, index in enumerate(data.indexes):
        wrong = [sample for place, sample in errors if place == source]
        keeps = np.ones(len(index), dtype=bool)
        keeps[wrong] = False
        part = index.only(keeps)
        messages = (errors[source, sample] for sample in wrong)
        part.faults = replace(index.faults, errors=(*index.faults.errors, *messages))
        indexes.append(part)
    order = replace(data.order, lengths=tuple(map(len, indexes)))
    data = replace(data, indexes=tuple(indexes), order=order, reference_log_probs=None)
    check_errors(data.faults()[1], cfg)
    if not len(order):
        raise NoSampleError(
            f": none of the {len(handles):,} samples can be decoded", data=data, key="data.train"
        )
    return data


_TITLE = "What the model sees"
_AT_ONCE = 5


def inspection_report(inspection: Inspection) -> sections.Report:
    """Return the whole report."""
    settings = ", ".join(f"{key}={value}" for key, value in inspection.settings)
    totals = {column.name: column.summary[0] for column in inspection.columns}
    figures = [
        (column_figure(inspection.num_samples), "samples"),
        (column_figure(totals["tokens"]), "tokens"),
        (f"{totals['trained tokens'] / totals['tokens']:.1%}", "trained"),
        *(
            (column_figure(totals[name]), name)
            for name in ("images", "videos")
            if totals[name] or (name == "images" and not totals["videos"])
        ),
        (column_figure(len(inspection.dropped)), "dropped"),
        (column_figure(len(inspection.errors)), "wrong"),
    ]
    parts = [*_samples(inspection), *_figures(inspection), *_left_out(inspection)]
    return sections.Report(_TITLE, _TITLE, [settings], [sections.Tiles(figures)], parts)


def _samples(inspection: Inspection) -> Iterator[sections.Section]:
    yield sections.Heading("Samples", "Samples")
    legend: list[str | sections.Styled | sections.Marked] = [
        *(sections.Marked(["trained"]), ": the loss is taken on these tokens; "),
        *(sections.Styled("x0.5", "weight"), " with this weight, if it is not 1; "),
        *(sections.Styled("<|token|>", "special"), ": special tokens. "),
        "Pictures are as the model gets them; point at one on the page to see its tokens.",
    ]
    yield sections.Said(legend, "quiet")
    cards = [_sample(shown, inspection.num_samples) for shown in inspection.shown]
    if len(cards) < inspection.num_wanted:
        text = (
            f"Their pictures are large: {len(cards)} of {inspection.num_wanted} samples are here."
        )
        yield sections.Note(text, "quiet")
    yield sections.CardPages(cards, (), _AT_ONCE, inspection.in_terminal, is_wide=True)


def _sample(shown: ShownSample, total: int) -> sections.Card:
    problem = [] if shown.problem is None else [sections.Note(shown.problem, "alarm")]
    parts = [sections.Note(shown.figures, "quiet"), *problem, *map(_turn, shown.turns)]
    return sections.Card(f"Sample {shown.number} of {total:,}", shown.where, parts)


def _turn(turn: ShownTurn) -> sections.Labelled:
    """Return role and text, and below the text the pictures whose placeholders are in it."""
    pieces: list[str | sections.Styled | sections.Marked] = []
    runs = itertools.groupby(turn.pieces, lambda piece: (piece.trained, piece.mark))
    for (trained, weight), run in runs:
        pieces += [sections.Styled(weight, "weight")] if weight else []
        pieces += [sections.Marked([*map(_piece, run)])] if trained else map(_piece, run)
    views = [_view(piece.view) for piece in turn.pieces if piece.view]
    return sections.Labelled(
        turn.role,
        [sections.Said(pieces), sections.SideBySide(views)] if views else [sections.Said(pieces)],
    )


def _piece(piece: TextPiece) -> str | sections.Styled:
    if piece.view is not None:
        return sections.Styled(piece.text, "view")
    return sections.Styled(piece.text, "special") if piece.special else piece.text


def _view(view: View) -> sections.OutlinedPictures:
    """Return an image, or the frames of a temporal patch; a cell of the grid is one token."""
    merge = math.isqrt(view.height * view.width // view.num_tokens)
    words = [view.label, view.name]
    if view.pictures:
        height, width = view.pictures[0].shape[:2]
        words.insert(1, f"{width} x {height}")
    cell = (merge / view.width, merge / view.height)
    return sections.OutlinedPictures(
        view.label, " \u00b7 ".join(words), view.pictures, cell, view.outlines
    )


def _figures(inspection: Inspection) -> Iterator[sections.Section]:
    yield sections.Heading("Sizes of samples", "Sizes")
    # A set without images has no histogram of them, nor one without videos.
    media = ("images", "videos")
    charted = [
        column
        for column in inspection.columns
        if column.name != "patches" and (column.name not in media or column.values.any())
    ]
    yield sections.SideBySide([sections.Bars(column.name, column.values) for column in charted])
    rows = [(column.name, *map(column_figure, column.summary)) for column in inspection.columns]
    yield sections.Table((f"of {inspection.num_samples:,} samples", *SUMMARY), rows)
    yield sections.Heading("Sources", "Sources")
    sources = inspection.sources
    rows = [(name, f"{weight:g}", *map(column_figure, counts)) for name, weight, counts in sources]
    yield sections.Table(("source", "weight", *SOURCE_COUNTS), rows)
    yield sections.Heading("Micro-batches", "Micro-batches")
    header = ("rows taken", "padding", "busiest rank", "in its worst step", "micro-batches a step")
    rows = []
    for way in inspection.batching.ways:
        loads = (f"{way.imbalance:.3f}x", f"{way.worst:.3f}x")
        rows.append((way.name, f"{way.padding:.1%}", *loads, column_figure(way.micro_batches)))
    yield sections.Table(header, rows, inspection.batching.caption)


def no_sample_report(dropped: Mapping[str, int], errors: Sequence[str]) -> sections.Report:
    """Return the report of a set without a sample: what each rule dropped, and wrong records."""
    figures = [
        (column_figure(0), "samples"),
        (column_figure(sum(dropped.values())), "dropped"),
        (column_figure(len(errors)), "wrong"),
    ]
    parts: list[sections.Section] = []
    if dropped:
        rows = [(rule, column_figure(count)) for rule, count in dropped.items()]
        parts.append(sections.Table(("dropped by rule", "records"), rows))
    parts += _wrong(errors)
    return sections.Report(_TITLE, _TITLE, [], [sections.Tiles(figures)], parts)


def _left_out(inspection: Inspection) -> Iterator[sections.Section]:
    """Yield what was dropped, passed over or refused; nothing if all was taken."""
    if not (inspection.dropped or inspection.errors or inspection.unused_keys):
        return
    yield sections.Heading("Left out", "Left out")
    if inspection.dropped:
        rows = [(rule, column_figure(count), where) for rule, count, where in inspection.rules]
        yield sections.Table(("dropped by rule", "records", "the first"), rows)
    if inspection.unused_keys:
        yield sections.Note(inspection.unused_keys)
    yield from _wrong(inspection.errors)


def _wrong(errors: Sequence[str]) -> Iterator[sections.Section]:
    if errors:
        yield sections.Listing(f"Wrong records: {len(errors):,}", errors, "alarm")
