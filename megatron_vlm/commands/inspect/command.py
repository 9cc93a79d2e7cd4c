"""`megatron-vlm inspect`: open the data of a configuration and report its contents."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_vlm.commands.inspect.inspection_report import inspection_report
from megatron_vlm.commands.inspect.statistics import collect_statistics
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.report.show_report import show_report
from megatron_vlm.run.resolve_model import with_model


def run_inspect(
    cfg: Config,
    html: str | None,
    samples: int,
    sample: int | None,
    ranks: int,
) -> None:
    """Print the model's view of data.train, and write it as a page if `html` is a path: the first
    `samples`, or the one with number `sample`, and figures for `ranks` replicas."""
    if samples < 0:
        raise ConfigError(key="--samples", found=samples, allowed="at least 0")
    if ranks < 1:
        raise ConfigError(key="--ranks", found=ranks, allowed="at least 1")
    if any(spec.streaming for spec in cfg.data.train):
        raise ConfigError(
            "is a stream, which has no sizes to count",
            key="data.train",
            remedy="give a file with its first records, or turn streaming off",
        )
    cfg = with_model(cfg, weights=False)
    sizes = read_sizes(cfg.model.path, cfg.data.add_tokens)
    with _no_warnings_of_the_data():
        data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, sizes)
        assert isinstance(data, DataSet)
        count = sum(map(len, data.indexes))
        if sample is not None and not 0 <= sample < count:
            problem = f": there are {count} samples"
            allowed = f"0 to {count - 1}"
            raise ConfigError(problem, key="--sample", found=sample, allowed=allowed)
        numbers = range(min(samples, count)) if sample is None else [sample]
        inspection = collect_statistics(cfg, data, numbers, ranks, pictures=html is not None)
    show_report(inspection_report(inspection), html)


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
