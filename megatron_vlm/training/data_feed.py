"""Batches on every rank, for training and evaluation alike, from the rank of a replica that loads
them. The other ranks get only the parts that they need.

Tokens, targets and positions go to every rank of the replica, together with grids and the values
and weights of the loss: to its host, in one message for a step. Pixels, still as bytes, and the
other inputs of their patches go only to the tensor parallel ranks of stage 0, from device to
device.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.config.objectives import needs_mismatched, records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, StreamSet, open_data, with_scores
from megatron_vlm.data.batches.loader import BatchFigures, Loader, Replica, StepBatch
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tensors.tensor_list import DTYPES, Field, dtype_name, pack, unpack
from megatron_vlm.data.tokens.row import GRID_OF
from megatron_vlm.distributed.agreement import Vote, fail_together
from megatron_vlm.distributed.collectives import all_gather_json, broadcast_bytes, broadcast_json
from megatron_vlm.distributed.device import to_device
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.io.printable import show_count
from megatron_vlm.training.data_fingerprint import Fingerprint, fingerprint

_OF_FIRST = (*GRID_OF.values(), "visual_of_O")
_ON_HOST = ("tokens_BS5", "targets_BSJ", *_OF_FIRST)
_TABLES = ("columns", "row_values")  # tensors by name, or None
_FACTS = ("lengths", "rows", "target_shapes")


def share_json(value: Any, grid: RankGroups) -> Any:
    """Send the loading rank's JSON value, or its DataError, to its replica. A collective."""
    failed = isinstance(value, DataError)
    message = {"error": str(value)} if failed else {"value": value}
    received = broadcast_json(message, grid.leader, grid.replica_hosts)
    if "error" in received:
        raise value if failed else DataError(received["error"])
    return received["value"]


def share_bytes(data: bytes | None, grid: RankGroups) -> bytes:
    """Send the bytes of the loading rank to every rank of the replica. A collective."""
    return broadcast_bytes(data, grid.leader, grid.replica_hosts)


def share_batch(
    local_batch: tuple[list[MicroBatch], Any] | None, grid: RankGroups, device: torch.device
) -> tuple[list[MicroBatch], Any]:
    """Send the loading rank's micro-batches and a JSON value to its replica. A collective."""
    if grid.replica.size == 1:
        assert local_batch is not None
        return local_batch
    packed = None if local_batch is None else _pack(*local_batch)
    fields, meta = unpack(share_bytes(packed, grid))
    received = []
    for number, frame in enumerate(meta["frames"]):
        parts: dict[str, Any] = {name: tuple(frame[name]) for name in _FACTS}
        parts["rows"] = tuple(map(tuple, frame["rows"]))
        for table in _TABLES:
            if (names := frame[table]) is not None:
                parts[table] = {name: fields[f"{number} {table} {name}"][1][0] for name in names}
        for name in _ON_HOST:
            _, tensors = fields.get(f"{number} {name}", (False, [None]))
            parts[name] = tensors[0]
        batch = None if local_batch is None else local_batch[0][number]
        if grid.first:
            for name in GRID_OF:
                local = None if batch is None else getattr(batch, name)
                parts[name] = _share_patches(frame[name], local, grid, device)
            given = {} if batch is None else batch.patch_inputs
            parts["patch_inputs"] = {
                name: _share_patches(kind, given.get(name), grid, device)
                for name, kind in frame["patch_inputs"].items()
            }
        else:
            parts |= dict.fromkeys((*_OF_FIRST, *GRID_OF))
        parts["visual"] = frame["visual"]
        received.append(MicroBatch(**parts))
    return received, meta["extra"]


def _pack(batches: Sequence[MicroBatch], extra: Any) -> bytes:
    """Pack the fields that hosts need into one message; of patches only shapes and types."""
    fields: dict[str, Field] = {}
    frames = []
    for number, batch in enumerate(batches):
        frame: dict[str, Any] = {name: list(getattr(batch, name)) for name in _FACTS}
        frame["visual"] = batch.visual
        for table in _TABLES:
            frame[table] = None if (given := getattr(batch, table)) is None else list(given)
            for name, tensor in (given or {}).items():
                fields[f"{number} {table} {name}"] = (False, [tensor])
        for name in GRID_OF:
            tensor = getattr(batch, name)
            frame[name] = None if tensor is None else _kind(tensor)
        frame["patch_inputs"] = {name: _kind(each) for name, each in batch.patch_inputs.items()}
        for name in _ON_HOST:
            if (tensor := getattr(batch, name)) is not None:
                fields[f"{number} {name}"] = (False, [tensor])
        frames.append(frame)
    return pack(fields, {"frames": frames, "extra": extra})


def _kind(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), dtype_name(tensor.dtype)


def _share_patches(
    shape_and_dtype: tuple[list[int], str] | None,
    local: Tensor | None,
    grid: RankGroups,
    device: torch.device,
) -> Tensor | None:
    """Send patches to all ranks of the first stage, which the loading rank belongs to."""
    if shape_and_dtype is None or grid.tp.size == 1:
        return local
    shape, dtype = shape_and_dtype
    if local is None:
        patches = torch.empty(shape, dtype=DTYPES[dtype], device=device)
    else:
        patches = to_device(local, device)
    dist.broadcast(patches, grid.leader, group=grid.tp.group)
    return patches


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
            return data, (data.length, asdict(fingerprint(data, cfg)), remarks)

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
        if self.data.truncated:
            rules.append(f"{show_count(self.data.truncated, 'sample')} cut")
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
    fingerprints = [Fingerprint.from_json(item) for item in all_gather_json(asdict(local))]
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
