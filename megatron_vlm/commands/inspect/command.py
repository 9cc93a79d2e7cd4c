"""`megatron-vlm inspect`: open the data of a configuration and report its contents."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from megatron_vlm.commands.inspect.inspection_report import (
    collect_statistics,
    inspection_report,
    no_sample_report,
    only_decodable,
)
from megatron_vlm.config.objectives import records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import extra_head
from megatron_vlm.data.batches.dataset import DataSet, NoSampleError, open_data
from megatron_vlm.data.tokens.index import unknown_keys_error
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.report.terminal import show_report
from megatron_vlm.run.run_folder import with_model

_IN_TERMINAL = 3
_ON_PAGE = 50


def run_inspect(
    cfg: Config,
    html: str | None,
    samples: int | None,
    sample: int | None,
    ranks: int,
    decode: bool = False,
) -> None:
    """Print the model's view of data.train, and write it as a page if `html` is a path: the first
    `samples`, or the one with number `sample`, and figures for `ranks` replicas. All wrong records
    are listed before they are an error; with `decode`, also those that cannot be decoded."""
    if samples is not None and samples < 0:
        raise ConfigError(key="--samples", found=samples, allowed="at least 0")
    if ranks < 1:
        raise ConfigError(key="--ranks", found=ranks, allowed="at least 1")
    if cfg.data.is_stream:
        raise ConfigError(
            "is a stream, which has no sizes to count",
            key="data.train",
            remedy="give a file with its first records, or turn streaming off",
        )
    cfg = with_model(cfg, weights=False)
    sizes = read_sizes(cfg.model.path, cfg.data.add_tokens, extra_head(cfg))
    with _no_warnings_of_the_data():
        rules = cfg.data
        if not cfg.data.max_errors:  # they are an error after all of them were listed
            rules = replace(cfg.data, max_errors=sys.maxsize)
        try:
            specs, kind = cfg.data.train, records_of(cfg)
            data = open_data(specs, "data.train", rules, cfg.model.path, sizes, kind=kind)
            assert isinstance(data, DataSet)
            if decode:
                with Console(stderr=True).status("decoding all pictures and videos"):
                    data = only_decodable(data, rules)
        except NoSampleError as error:
            assert error.data is not None
            dropped, errors = error.data.faults()
            show_report(no_sample_report(dropped, errors), html)
            if errors and rules is not cfg.data:
                raise _wrong_records_error(error.data) from error
            raise
        count = sum(map(len, data.indexes))
        if sample is not None and not 0 <= sample < count:
            raise ConfigError(
                f": there are {count} samples",
                key="--sample",
                found=sample,
                allowed=f"0 to {count - 1}",
            )
        wanted = samples if samples is not None else _IN_TERMINAL if html is None else _ON_PAGE
        numbers = range(min(wanted, count)) if sample is None else [sample]
        in_terminal = _IN_TERMINAL if samples is None else None
        inspection = collect_statistics(cfg, data, numbers, ranks, html is not None, in_terminal)
    show_report(inspection_report(inspection), html)
    if inspection.errors and rules is not cfg.data:
        raise _wrong_records_error(data)


def _wrong_records_error(data: DataSet) -> DataError:
    """Make the error about the wrong records, with all keys for which some are refused."""
    about_keys = (
        unknown_keys_error(source, reader)
        for source, reader in zip(data.sources, data.readers, strict=True)
    )
    first = next((error for error in about_keys if error is not None), None)
    count, total = len(data.faults()[1]), sum(map(len, data.sources))
    return DataError(
        f": {count:,} of {total:,} records {'is' if count == 1 else 'are'} wrong",
        key="data.train",
        remedy=f"mend them, or set data.max_errors={count} to train without them"
        if first is None
        else str(first),
    )


@contextmanager
def _no_warnings_of_the_data() -> Iterator[None]:
    """Suppress the warnings of the data, because the report contains them once."""
    log = logging.getLogger("megatron_vlm.data")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
