"""The tables of an inspection, for the terminal and the page: header, rows, caption."""

from collections.abc import Sequence

from megatron_vlm.commands.inspect.statistics import (
    SOURCE_COUNTS,
    SUMMARY,
    Inspection,
    column_figure,
)

TableContent = tuple[tuple[str, ...], Sequence[tuple[str, ...]], str]


def source_table(inspection: Inspection) -> TableContent:
    """Return the counts of the records of each source: kept, dropped and wrong ones."""
    sources = inspection.sources
    rows = [(name, f"{weight:g}", *map(column_figure, counts)) for name, weight, counts in sources]
    return ("source", "weight", *SOURCE_COUNTS), rows, ""


def size_table(inspection: Inspection) -> TableContent:
    """Return the distribution of tokens, images and patches over the samples."""
    rows = [(column.name, *map(column_figure, column.summary)) for column in inspection.columns]
    return (f"of {inspection.num_samples:,} samples", *SUMMARY), rows, ""


def inspect_batch_table(inspection: Inspection) -> TableContent:
    """Return padding and balance of each method of batching."""
    header = ("rows taken", "padding", "busiest rank", "in its worst step", "micro-batches a step")
    rows = []
    for way in inspection.batching.ways:
        loads = (f"{way.imbalance:.3f}x", f"{way.worst:.3f}x")
        rows.append((way.name, f"{way.padding:.1%}", *loads, column_figure(way.micro_batches)))
    return header, rows, inspection.batching.caption


def dropped_table(inspection: Inspection) -> TableContent:
    """Return the rules that dropped records."""
    rows = [(rule, column_figure(count), where) for rule, count, where in inspection.rules]
    return ("dropped by rule", "records", "the first"), rows, ""
