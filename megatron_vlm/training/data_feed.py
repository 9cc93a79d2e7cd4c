"""Batches on every rank, for training and evaluation alike."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from megatron_vlm.config.objectives import needs_mismatched, records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, open_data, with_scores
from megatron_vlm.data.batches.loader import BatchFigures, Loader, Replica, StepBatch
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.batches.stream_set import StreamSet
from megatron_vlm.distributed.agreement import Vote, fail_together
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.printable import show_count
from megatron_vlm.training.broadcast import share_batch, share_json
from megatron_vlm.training.data_fingerprint import Fingerprint, fingerprint

T = TypeVar("T")
Known = TypeVar("Known")
_ELSEWHERE = "another rank could not load its data; see its message"


class SharedBatches:
    """Batches of a loader on every rank. Only one rank of a replica has the loader."""

    def __init__(self, loader: Loader | None, grid: RankGroups, device: torch.device):
        self.grid, self.device = grid, device
        self.batches = None if loader is None else iter(loader)

    def next(self, vote: Vote = Vote.OK) -> StepBatch:
        """Return the next batch. A vote or an error of one rank applies to all. A collective."""
        loaded: Any = None
        with fail_together(DataError, _ELSEWHERE, vote, catches=DataError):
            if self.batches is not None:
                batch = next(self.batches)
                count = len(batch.micro_batches)
                facts = (asdict(batch.after), asdict(batch.figures), count)
                loaded = ([*batch.micro_batches, *batch.mismatched], facts)
        batches, (after, figures, count) = share_batch(loaded, self.grid, self.device)
        position, known = Position(**after), BatchFigures(**figures)
        return StepBatch(batches[:count], position, known, mismatched=batches[count:])


class Feeder:
    """Training batches of a run, on every rank."""

    def __init__(
        self,
        cfg: Config,
        sizes: ModelSizes,
        grid: RankGroups,
        device: torch.device,
        watchdog: Watchdog,
        prompts_only: bool = False,
    ):
        """Open data.train. With `prompts_only` the samples are prompts, which the caller takes from
        `data`, and nothing is started."""
        self.cfg, self.grid, self.device = cfg, grid, device
        self.loader: Loader | None = None

        def opening() -> tuple[DataSet | StreamSet, tuple[int | None, Any, Any]]:
            share = (grid.dp.rank, grid.dp.size)
            specs, path = cfg.data.train, cfg.model.path
            kind = "prompt" if prompts_only else records_of(cfg)
            data = open_data(specs, "data.train", cfg.data, path, sizes, share, kind=kind)
            data = with_scores(data, cfg)
            remarks = asdict(Remarks.from_data(data, "data.train", cfg.data))
            return data, (data.length, fingerprint(data, cfg).to_json(), remarks)

        self.data, (self.length, saved, remarks) = open_together(
            "data.train", grid, opening, watchdog
        )
        self.remarks = Remarks(**remarks)
        self.fingerprint = Fingerprint.from_json(saved)
        _check_same(self.fingerprint)

    def faults(self) -> str:
        """Describe in a sentence what was left out so far; empty if nothing was."""
        if self.data is None:
            return ""
        dropped, errors = self.data.faults()
        errors = [*errors, *(self.loader.errors if self.loader is not None else [])]
        rules = [
            f"{show_count(count, 'sample')} dropped: {rule}" for rule, count in dropped.items()
        ]
        if self.data.cut:
            rules.append(f"{show_count(self.data.cut, 'sample')} cut")
        if errors:
            rules.append(
                f"{show_count(len(errors), 'wrong sample')} skipped, the first: {errors[0]}"
            )
        return "; ".join(rules)

    def start(self, position: Position) -> None:
        """Load batches from this position on."""
        size, limits = self.cfg.train.global_batch_size, Limits.from_config(self.cfg.train)
        if self.data is not None:
            data = self.cfg.data
            replica = Replica(self.grid.dp.rank, self.grid.dp.size)
            self.loader = Loader(
                *(self.data, data, size, limits, replica, position),
                with_mismatched=needs_mismatched(self.cfg),
            )
        self.batches = SharedBatches(self.loader, self.grid, self.device)


def open_together(
    name: str, grid: RankGroups, opening: Callable[[], tuple[T, Known]], watchdog: Watchdog
) -> tuple[T | None, Known]:
    """Open data with `opening` on the loading ranks. Return the data, and the JSON value about it
    that all ranks need. An error on one rank is an error on all. A collective."""
    data: T | None = None
    opened: Any = None
    watchdog.begin_phase(0, f"opening {name}", files=True)
    with fail_together(DataError, _ELSEWHERE):
        if grid.leads:
            data, opened = opening()
        watchdog.begin_phase(0, f"waiting until all ranks have opened {name}")
    return data, share_json(opened, grid)


def _check_same(local: Fingerprint) -> None:
    fingerprints = [Fingerprint.from_json(item) for item in all_gather_json(local.to_json())]
    for rank, other in enumerate(fingerprints):
        differences = [*fingerprints[0].changed_order(other), *fingerprints[0].changed_rows(other)]
        if differences:
            raise DataError(
                f"differs from that of rank 0 ({'; '.join(differences)}): their files differ, or "
                "one of them could not read a record",
                place=f"rank {rank}",
                key="data.train",
                remedy="give all machines the same data.train and image_root",
            )
