"""The batches of a run on every rank, and the agreement of all ranks to go on, stop or fail."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batch.batching import Limits
from megatron_vlm.data.batch.dataset import DataSet, open_data
from megatron_vlm.data.batch.loader import BatchFigures, Loader, StepBatch
from megatron_vlm.data.batch.micro_batch import MicroBatch
from megatron_vlm.data.batch.position import Position
from megatron_vlm.data.batch.stream_set import StreamSet
from megatron_vlm.distributed.agree import FAILED, OK, STOP, agree, meet
from megatron_vlm.errors import ConfigError, DataError, MegatronVLMError
from megatron_vlm.feed.share import is_loader, my_replica, share_batch, share_object
from megatron_vlm.worker import MegatronWorker

Data = TypeVar("Data")
Known = TypeVar("Known")


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal asked to save and stop; every rank agreed."""


@dataclass(frozen=True)
class StepData:
    """One step's micro-batches on this rank, and what all ranks know of the global batch."""

    micro_batches: list[MicroBatch]
    after: Position
    figures: BatchFigures


class Feeder:
    """The batches of a run, on every rank: one rank of a replica loads, the others receive."""

    def __init__(self, worker: MegatronWorker, cfg: Config):
        self.worker, self.cfg = worker, cfg
        self.device = worker.platform.device
        self.replica = my_replica()
        self.data, known = open_together("data.train", self.device, self._open)
        self.length, self.print = known
        _check_same(self.print)
        self.loader: Loader | None = None
        self.batches: Iterator[StepBatch] | None = None

    def _open(self) -> tuple[DataSet | StreamSet, tuple[int | None, str]]:
        cfg, share = self.cfg, (self.replica.rank, self.replica.count)
        hf_config = self.worker.source.config
        data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, hf_config, share)
        length = len(data.order) if isinstance(data, DataSet) else None
        return data, (length, fingerprint(data))

    def total_steps(self) -> int:
        """From train.steps, or from train.epochs and the size of the data."""
        train = self.cfg.train
        if train.steps is not None:
            return train.steps
        if self.length is None:
            raise ConfigError("data.train streams and has no length: set train.steps")
        return max(1, math.ceil(train.epochs * self.length / train.global_batch_size))

    def faults(self) -> str:
        """What was left out so far, in a sentence; nothing where nothing was."""
        if self.data is None:
            return ""
        dropped, errors = self.data.faults()
        errors = [*errors, *(self.loader.errors if self.loader is not None else [])]
        rules = [f"{count} samples dropped: {rule}" for rule, count in dropped.items()]
        wrong = [f"{len(errors)} wrong samples skipped, the first: {errors[0]}"] if errors else []
        return "; ".join([*rules, *wrong])

    def start(self, position: Position) -> None:
        """Load from here on."""
        train = self.cfg.train
        limits = Limits.of(train)
        if self.data is not None:
            self.loader = Loader(
                self.data, self.cfg.data, train.global_batch_size, limits, self.replica, position
            )
            self.batches = iter(self.loader)

    def next(self, word: int) -> StepData:
        """The next step's data. `word`: what this rank has to say to all others (see agree.py).
        Stopped or an error on one rank is Stopped or an error on all."""
        mine: Any = None
        if self.batches is not None:
            try:
                batch = next(self.batches)
                mine = (batch.micro_batches, (batch.after, batch.figures))
            except DataError as error:
                mine = error
        together(self.device, isinstance(mine, DataError), mine, word)
        micro_batches, (after, figures) = share_batch(mine, self.device)
        return StepData(micro_batches, after, figures)


def open_together(
    name: str, device: Any, opening: Callable[[], tuple[Data, Known]]
) -> tuple[Data | None, Known]:
    """What `opening` opens, on the loading ranks, and what all ranks are to know of it. The error
    of one is an error on all, however long the others take. A collective."""
    data: Data | None = None
    opened: Any = None
    if is_loader():
        try:
            data, opened = opening()
        except MegatronVLMError as error:
            opened = DataError(str(error))
    meet(name)
    together(device, isinstance(opened, DataError), opened)
    return data, share_object(opened, device)


def together(device: Any, failed: bool, mine: Any, word: int = OK) -> None:
    """Go on together, stop together, or fail together. A collective."""
    said = agree(FAILED if failed else word, device)
    if failed:
        raise mine
    if said == FAILED:
        raise DataError("another rank could not load its data; see its message")
    if said == STOP:
        raise Stopped


def fingerprint(data: DataSet | StreamSet) -> str:
    """Of what the order of samples depends on: equal on all replicas, and after a resume."""
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(data, DataSet):
        hasher.update(repr(data.order).encode())
        for source, index in zip(data.sources, data.indexes, strict=True):
            hasher.update(source.digest.encode() + index.records.tobytes())
            hasher.update(index.tokens.tobytes())
    else:
        hasher.update(data.name.encode())
    return hasher.hexdigest()


def _check_same(mine: str) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise DataError(
                f"rank {rank} sees other data than rank 0: their files differ, or one of them "
                "could not read a record; all machines need the same data.train and image_root"
            )
