"""Log-probs of answers under the reference model, which is the model before the first step, or one
that has scored the data before.

`keep` computes them once for all of data.train and stores them, unless a folder has them;
`adapters_off` and `model` compute them for each batch.

Shapes: R rows of a micro-batch.
"""

import hashlib
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from megatron_vlm.config.objectives import reference_folder, reference_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.micro_batch import ROW_REFERENCE, MicroBatch
from megatron_vlm.data.batches.order import order_of_all
from megatron_vlm.data.scores.score_file import checksum_of
from megatron_vlm.data.tokens.index import CHUNK, index_key
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.distributed.collectives import broadcast_json
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import DataError
from megatron_vlm.io.atomic import replaced_file
from megatron_vlm.io.untrusted import UntrustedFile, home_path
from megatron_vlm.training.data_feed import SharedBatches, open_together
from megatron_vlm.training.frozen_models import FrozenModels
from megatron_vlm.training.row_scores import values_by_place
from megatron_vlm.training.worker import MegatronWorker

_log = logging.getLogger("megatron_vlm.data")

_ANSWERS = 2  # rows of one sample
_NAME = "log_probs"  # tensor of a file of the cache
_VERSION = 2  # version of these files


def row_log_probs(worker: MegatronWorker, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the supervised log-prob of each row [R] of each batch, in float64. A collective."""
    scored = values_by_place(batches, worker.forward(batches))
    return [
        torch.tensor([float(scored[p].double().sum()) for p in batch.rows], dtype=torch.float64)
        for batch in batches
    ]


class ReferenceModel:
    """The reference model of a run, if its objective has one. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.models, self.how = FrozenModels(worker), reference_of(cfg)

    def added_to(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with the log-probs of their rows."""
        if self.how is None:
            return list(batches)
        if self.how == "keep":
            assert all(ROW_REFERENCE in (batch.row_values or {}) for batch in batches if batch.rows)
            return list(batches)
        with self.models.reference(self.how == "adapters_off") as model:
            scored = row_log_probs(model, batches)
        return [
            batch.with_row_values(**{ROW_REFERENCE: log_probs})
            for batch, log_probs in zip(batches, scored, strict=True)
        ]


def with_reference(
    worker: MegatronWorker, cfg: Config, data: DataSet | None, name: str, samples: int | None
) -> DataSet | None:
    """Return the data with the log-probs of their rows under the worker's current weights, from the
    cache or computed now: of the first `samples` in the data's order, or of all. Only ranks that
    load have the data. A collective."""
    if reference_folder(cfg) is not None:
        return data  # with_scores has read them
    grid, device = worker.grid, worker.platform.device

    def opening() -> tuple[tuple[np.ndarray, Path | None], list[int]]:
        assert data is not None
        handles_N2 = _handles(data, samples)
        path = _path(worker, cfg, data, handles_N2) if grid.rank == 0 else None
        return (handles_N2, path), [len(handles_N2), *map(len, data.indexes)]

    opened, (count, *lengths) = open_together(
        f"the reference of {name}", grid, opening, worker.watchdog
    )
    handles, path = (None, None) if opened is None else opened
    stored = None
    if path is not None and data is not None and handles is not None:
        stored = _read(path, _has_value(data, handles))
    is_known = broadcast_json(stored is not None if grid.rank == 0 else None, 0)
    if is_known:
        table = torch.zeros(sum(lengths), _ANSWERS, dtype=torch.float64, device=device)
        if stored is not None:
            table.copy_(torch.from_numpy(stored))
        dist.broadcast(table, 0)
    else:
        worker.watchdog.begin_phase(0, f"reference log-probs of {name}")
        if grid.rank == 0:
            print_to_user(f"computing the reference log-probs of {count:,} samples of {name}, once")
        table = _compute(worker, cfg, data, handles, count, lengths)
    log_probs = table.cpu().numpy()
    if path is not None and not is_known:
        _write(path, log_probs)
    tables = tuple(np.split(log_probs, np.cumsum(lengths)[:-1]))
    return None if data is None else replace(data, reference_log_probs=tables)


@dataclass(frozen=True)
class _Listed:
    """The order of listed samples, in place of that of the data."""

    handles_N2: np.ndarray

    def epoch(self, number: int) -> np.ndarray:
        assert number == 0
        return self.handles_N2


def _handles(data: DataSet, samples: int | None) -> np.ndarray:
    """Return the first samples of the data's order, or each sample once if a run takes them all."""
    if samples is not None and samples < len(data.order):
        return data.order.epoch(0)[:samples]
    if len(data.order) < sum(map(len, data.indexes)):  # an evaluation of some of them
        return data.order.epoch(0)
    return order_of_all([*map(len, data.indexes)]).epoch(0)


def _compute(
    worker: MegatronWorker,
    cfg: Config,
    data: DataSet | None,
    handles_N2: np.ndarray | None,
    count: int,
    lengths: Sequence[int],
) -> Tensor:
    """Return the log-probs [samples, rows] of the listed samples, and nan for all others."""
    grid, device, size = worker.grid, worker.platform.device, cfg.train.global_batch_size
    loader = None
    if data is not None and handles_N2 is not None:
        listed = replace(data, order=_Listed(handles_N2))  # type: ignore[arg-type]
        replica, limits = Replica(grid.dp.rank, grid.dp.size), Limits.from_config(cfg.train)
        loader = Loader(listed, cfg.data, size, limits, replica, epochs=1)
    batches = SharedBatches(loader, grid, device)
    values = torch.zeros(2, count, _ANSWERS, dtype=torch.float64)  # log-probs, and 1 for each
    for start in range(0, count, size):
        micro_batches = batches.next().micro_batches
        for batch, log_probs in zip(
            micro_batches, row_log_probs(worker, micro_batches), strict=True
        ):
            for (sample, row), value in zip(batch.rows, log_probs.tolist(), strict=True):
                values[:, start + sample, row] = torch.tensor([value, 1.0])
        worker.watchdog.alive()
    values = values.to(device)
    dist.all_reduce(values, group=grid.dp.group)
    table = torch.full((sum(lengths), _ANSWERS), math.nan, dtype=torch.float64, device=device)
    if data is not None and handles_N2 is not None:
        rows_N = torch.from_numpy(_numbers(data, handles_N2)).to(device)
        table[rows_N] = torch.where(values[1] > 0, values[0], math.nan)
    return table


# The cache. Only rank 0 reads and writes it.


def _path(
    worker: MegatronWorker, cfg: Config, data: DataSet, handles_N2: np.ndarray
) -> Path | None:
    """Return the file of the cache, whose name depends on all that the log-probs depend on. Return
    None without a cache, and where not all of that is known: for a continued adapter, and for
    pictures on the network."""
    if cfg.data.cache_dir is None or cfg.lora.path is not None:
        return None
    hasher = hashlib.blake2b(worker.base_digest.encode(), digest_size=16)
    form = [_VERSION, str(worker.chunks[0].config.params_dtype), cfg.lora.base]
    hasher.update(repr(form).encode())
    handles_N2 = handles_N2[np.lexsort(handles_N2.T)]
    hasher.update(handles_N2.tobytes())
    for source, reader, index in zip(data.sources, data.readers, data.indexes, strict=True):
        hasher.update(index_key(source, reader, cfg.data).encode() + index.records.tobytes())
    has_media = np.concatenate([index.images + index.videos > 0 for index in data.indexes])
    with_media = handles_N2[has_media[_numbers(data, handles_N2)]].tolist()
    chunks = [with_media[start : start + CHUNK] for start in range(0, len(with_media), CHUNK)]
    workers = cfg.data.num_workers if len(chunks) > 2 * cfg.data.num_workers else 0
    for facts in map_in_processes(_MediaFacts(data), chunks, workers, 2):
        if facts is None:
            return None
        hasher.update(repr(facts).encode())
        worker.watchdog.busy()
    return home_path(cfg.data.cache_dir) / "reference" / f"{hasher.hexdigest()}.safetensors"


@dataclass(frozen=True)
class _MediaFacts:
    """Sizes and times of change of the files with the pictures and videos of samples; None if they
    are not known. Their names are in the records."""

    data: DataSet

    def __getitem__(self, handles: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
        facts = []
        for source, sample in handles:
            where = self.data.where((source, sample))
            try:
                raw = self.data.raw((source, sample))
                found = map(os.stat, self.data.readers[source].media_files(raw, where))
                facts += [(each.st_size, each.st_ctime_ns) for each in found]
            except (DataError, OSError):
                return None
        return facts


def _numbers(data: DataSet, handles_N2: np.ndarray) -> np.ndarray:
    """Return the numbers of samples, counted over all sources."""
    starts = np.cumsum([0, *map(len, data.indexes)])
    numbers: np.ndarray = starts[handles_N2[:, 0]] + handles_N2[:, 1]
    return numbers


def _has_value(data: DataSet, handles_N2: np.ndarray) -> np.ndarray:
    """Return of each row of all samples whether it is listed, and so has a log-prob."""
    rows = np.concatenate([index.rows for index in data.indexes])
    is_listed = np.zeros(len(rows), dtype=bool)
    is_listed[_numbers(data, handles_N2)] = True
    has_value: np.ndarray = is_listed[:, None] & (np.arange(_ANSWERS) < rows[:, None])
    return has_value


def _read(path: Path, has_value: np.ndarray) -> np.ndarray | None:
    """Read the log-probs of all rows. Return None if there are none, or if they are damaged."""
    if not os.path.lexists(path):
        return None
    outside = UntrustedFile(str(path), remedy="they are computed again")
    try:
        outside.regular_path()
        with outside.wrap_errors("the stored log-probs are damaged"), safe_open(path, "np") as file:
            table: np.ndarray = file.get_tensor(_NAME)
            if file.metadata()["checksum"] != str(checksum_of([table])):
                raise ValueError("their checksum is another than when they were written")
            if table.dtype != np.float64 or table.shape != has_value.shape:
                raise ValueError(f"they are {table.dtype} of shape {table.shape}")
            if not np.array_equal((table <= 0) & np.isfinite(table), has_value):
                raise ValueError("some are no log-probs")
    except DataError as error:
        _log.warning("%s", error)
        return None
    return table


def _write(path: Path, table: np.ndarray) -> None:
    """Write the log-probs of all rows. A cache that cannot be written is not an error."""
    with suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as new:
            save_file({_NAME: table}, new, {"checksum": str(checksum_of([table]))})
