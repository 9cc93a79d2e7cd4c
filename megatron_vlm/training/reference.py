"""Log-probs of answers under the reference model, which is the model before the first step, or one
that has scored the data before.

`keep` computes them once for all of data.train and stores them, unless data.reference has them;
`adapters_off` and `model` compute them for each batch.

Shapes: R rows of a micro-batch.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from megatron_vlm.config.objectives import reference_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.collate import MAX_ROWS
from megatron_vlm.data.batches.dataset import DataSet, order_of_all
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.index import index_key
from megatron_vlm.distributed.collectives import broadcast_json
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.io.atomic import replaced_file
from megatron_vlm.io.untrusted import home_path
from megatron_vlm.lora.layers import LowRank
from megatron_vlm.training.broadcast import share_json
from megatron_vlm.training.data_feed import SharedBatches
from megatron_vlm.training.pipeline import values_by_place
from megatron_vlm.training.worker import MegatronWorker

_ANSWERS = 2  # rows of one sample


def row_log_probs(worker: MegatronWorker, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the log-prob of the supervised tokens of each row [R], in float64, for each
    micro-batch. A collective."""
    scored = values_by_place(batches, worker.forward(batches))
    return [
        torch.tensor([float(scored[p].double().sum()) for p in batch.rows], dtype=torch.float64)
        for batch in batches
    ]


class ReferenceModel:
    """The reference model of a run, if its objective has one. Its methods are collectives."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg, self.how = worker, cfg, reference_of(cfg)

    @cached_property
    def model(self) -> MegatronWorker:
        """The initial model in the same processes, loaded at first use."""
        return MegatronWorker(self.cfg, training=False, watchdog=self.worker.watchdog)

    def added_to(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with the log-probs of their rows."""
        if self.how is None:
            return list(batches)
        if self.how == "keep":
            assert all(batch.reference_R is not None or not batch.rows for batch in batches)
            return list(batches)
        off = self.how == "adapters_off"
        with without_adapters(self.worker) if off else nullcontext():
            scored = row_log_probs(self.worker if off else self.model, batches)
        return [
            replace(batch, reference_R=log_probs) if batch.rows else batch
            for batch, log_probs in zip(batches, scored, strict=True)
        ]


@contextmanager
def without_adapters(worker: MegatronWorker) -> Iterator[None]:
    """Switch off all adapters: their second matrices are zero inside the context."""
    worker.gather.finish()
    matrices = [
        module.B
        for chunk in worker.chunks
        for module in chunk.modules()
        if isinstance(module, LowRank)
    ]
    saved = [matrix.detach().clone() for matrix in matrices]
    try:
        with torch.no_grad():
            for matrix in matrices:
                matrix.zero_()
        yield
    finally:
        with torch.no_grad():
            for matrix, values in zip(matrices, saved, strict=True):
                matrix.copy_(values)


def with_reference(
    worker: MegatronWorker, cfg: Config, data: DataSet | None, name: str, samples: int | None
) -> DataSet | None:
    """Return the data with the log-probs of their rows under the worker's current weights, from the
    cache or computed now: of the first `samples` in the data's order, or of all. Only ranks that
    load have the data. A collective."""
    if cfg.data.reference is not None:
        return data  # open_data has read them
    grid, device = worker.grid, worker.platform.device
    handles, key, counts = None, "", None
    if data is not None:
        handles = _handles(data, samples)
        key, counts = _key(worker, cfg, data, handles), [len(handles), *map(len, data.indexes)]
    count, *lengths = share_json(counts, grid, device)
    path = _path(cfg, key) if grid.rank == 0 else None
    tables = _read(path, lengths) if path is not None else None
    is_known = broadcast_json(tables is not None if grid.rank == 0 else None, 0, None, device)
    if is_known:
        nothing = np.zeros((sum(lengths), _ANSWERS))
        table = torch.from_numpy(nothing if tables is None else np.concatenate(tables)).to(device)
        dist.broadcast(table, 0)
    else:
        worker.watchdog.begin_phase(0, f"reference log-probs of {name}")
        if grid.rank == 0:
            print_to_user(f"computing the reference log-probs of {count:,} samples of {name}, once")
        table = _compute(worker, cfg, data, handles, count, lengths)
    tables = np.split(table.cpu().numpy(), np.cumsum(lengths)[:-1])
    if path is not None and not is_known:
        _write(path, tables)
    return None if data is None else replace(data, reference_log_probs=tuple(tables))


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
            for place, value in zip(batch.rows, log_probs.tolist(), strict=True):
                sample, row = divmod(place, MAX_ROWS)
                values[:, start + sample, row] = torch.tensor([value, 1.0])
        worker.watchdog.alive()
    values = values.to(device)
    dist.all_reduce(values, group=grid.dp.group)
    table = torch.full((sum(lengths), _ANSWERS), math.nan, dtype=torch.float64, device=device)
    if handles_N2 is not None:
        starts = np.cumsum([0, *lengths[:-1]])
        rows_N = torch.from_numpy(starts[handles_N2[:, 0]] + handles_N2[:, 1]).to(device)
        table[rows_N] = torch.where(values[1] > 0, values[0], math.nan)
    return table


def _key(worker: MegatronWorker, cfg: Config, data: DataSet, handles_N2: np.ndarray) -> str:
    """Return a digest of everything that the log-probs depend on."""
    hasher = hashlib.blake2b(worker.base_digest.encode(), digest_size=16)
    form = [cfg.lora.path, str(worker.chunks[0].config.params_dtype)]
    # Without codes, the key is that of earlier versions.
    hasher.update(repr(form + ([cfg.lora.base] if cfg.lora.base else [])).encode())
    hasher.update(handles_N2[np.lexsort(handles_N2.T)].tobytes())
    for source, reader, index in zip(data.sources, data.readers, data.indexes, strict=True):
        hasher.update(index_key(source, reader, cfg.data).encode() + index.records.tobytes())
    return hasher.hexdigest()


def _path(cfg: Config, key: str) -> Path | None:
    """Return the file of the cache; None without a cache, or for a continued adapter, whose
    contents the key does not know."""
    if cfg.data.cache_dir is None or cfg.lora.path is not None:
        return None
    return home_path(cfg.data.cache_dir) / "reference" / f"{key}.safetensors"


def _read(path: Path, lengths: Sequence[int]) -> list[np.ndarray] | None:
    """Read the tables of all sources, or return None if there are none or they are damaged."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    tables = [tensors.get(str(number)) for number in range(len(lengths))]
    shapes = [None if table is None else table.shape for table in tables]
    if shapes != [(length, _ANSWERS) for length in lengths]:
        return None
    return [table for table in tables if table is not None]


def _write(path: Path, tables: Sequence[np.ndarray]) -> None:
    """Write the tables of all sources. A cache that cannot be written is not an error."""
    with suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as new:
            save_file({str(number): table.copy() for number, table in enumerate(tables)}, new)
