"""Saving and loading of a training run: weights, optimizer, learning rate and progress.

    rank-00003.safetensors   pieces that rank 3 wrote
    index.json               rectangles of each tensor, with the file that has each
    state.json               format, layout, steps of the optimizer, learning rate, progress
    config.yaml              resolved configuration, for readers
    rollouts.json            answers that rl has drawn ahead, if there are any
    complete.json            size and digest of each of these files

A checkpoint does not depend on the layout that wrote it; see tensor_pieces.py and rank_state.py.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.checkpoint import rank_state, run_checkpoints, state_json, tensor_pieces
from megatron_vlm.checkpoint.manifest import (
    FileRecord,
    Manifest,
    hold_for_reading,
    verify,
    write_file,
)
from megatron_vlm.config import to_yaml
from megatron_vlm.distributed.agreement import all_reduce_max, fail_together
from megatron_vlm.distributed.collectives import broadcast_json, gather_json
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.matrices import Rectangle
from megatron_vlm.io.atomic import begin, discard, partial_of
from megatron_vlm.training.worker import MegatronWorker


def save(
    worker: MegatronWorker,
    folder: Path,
    progress: dict[str, Any],
    async_save: bool = False,
    run: str | None = None,
    parent: Manifest | None = None,
    moments: bool = True,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> "PendingSave":
    """Write a checkpoint to `folder` (see `run_checkpoints.step_folder`). This is a collective.
    `progress` is plain JSON; rank 0's is stored, as are its id of the run and the parent
    checkpoint, and `texts`, the contents of more files. Without `moments` the checkpoint has only
    the weights, so a run cannot resume from it unchanged.

    With `async_save` the tensors are copied to the host, and training may continue while they are
    written. `finish` of the returned object completes the checkpoint. Only one save is pending at a
    time: an earlier one is finished first.
    """
    if worker.pending_save is not None:
        worker.pending_save.finish()
    assert worker.optimizer is not None, "made without training"
    steps = all_reduce_max(rank_state.get_step(worker.optimizer))  # a frozen stage counts none
    state = state_json.make_state(worker, progress, steps)
    own = {"state.json": json.dumps(state, indent=1) + "\n", "config.yaml": to_yaml(worker.cfg)}
    with fail_together(CheckpointError):
        if dist.get_rank() == 0:
            begin(folder, run)
    pieces = list(
        rank_state.held_pieces(worker, rank_state.local_parts(worker, moments), writing=True)
    )
    tensors = {piece.name: piece.data for piece in pieces}
    if async_save:
        tensors = {name: data.to("cpu", copy=True) for name, data in tensors.items()}
    places = [(piece.key, piece.place) for piece in pieces]
    worker.pending_save = pending = PendingSave(
        folder, rank_state.shapes_of(worker), {**texts, **own}, places, run, parent
    )
    pending.start(tensors, async_save)
    return pending


@dataclass(eq=False)
class PendingSave:
    """Checkpoint whose tensors are being written; it is complete once `finish` returns True."""

    folder: Path
    shapes: dict[str, tensor_pieces.TensorShape]
    texts: dict[str, str]
    places: list[tuple[str, Rectangle]]
    run: str | None
    parent: Manifest | None
    thread: threading.Thread | None = None
    record: FileRecord | None = None
    manifest: Manifest | None = None  # on rank 0, the manifest of the complete checkpoint
    error: Exception | None = None
    finished: bool = False

    def start(self, tensors: dict[str, Tensor], in_background: bool) -> None:
        """Write this rank's file, either in a thread, which no collective waits for, or at once."""
        if in_background:
            self.thread = threading.Thread(target=self._write, args=(tensors,), daemon=True)
            self.thread.start()
            return
        self._write(tensors)
        self.finish()

    def finish(self, blocking: bool = True) -> bool:
        """Complete the checkpoint. Return False if not blocking and some rank is still writing.
        This is a collective. Raise CheckpointError on every rank if any rank could not write."""
        if self.finished:
            return True
        is_writing = self.thread is not None and self.thread.is_alive()
        if not blocking and all_reduce_max(int(is_writing)):
            return False
        self.finished = True
        if self.thread is not None:
            self.thread.join()
        try:
            with fail_together(CheckpointError):
                if self.error is not None:
                    raise self.error
            self._complete()
        except Exception:
            if dist.get_rank() == 0:
                discard(partial_of(self.folder))
            raise
        return True

    def _write(self, tensors: dict[str, Tensor]) -> None:
        path = partial_of(self.folder) / tensor_pieces.rank_file(dist.get_rank())
        try:
            self.record = write_file(path, tensor_pieces.safetensors_chunks(tensors))
        except Exception as error:  # an error of a thread: `finish` raises it
            self.error = error

    def _complete(self) -> None:
        first = dist.get_rank() == 0
        assert self.record is not None
        written = gather_json((asdict(self.record), self.places))
        with fail_together(CheckpointError):
            if first:
                index = tensor_pieces.make_index(self.shapes, [places for _, places in written])
                texts = self.texts | {"index.json": json.dumps(index)}
                partial = partial_of(self.folder)
                records = [FileRecord(**record) for record, _ in written]
                for name, text in texts.items():
                    records.append(write_file(partial / name, [text.encode()]))
                self.manifest = run_checkpoints.commit(self.folder, records, self.run, self.parent)


def load(
    worker: MegatronWorker, folder: Path, verified: bool = False, moments: bool = True
) -> dict[str, Any]:
    """Fill the worker from a checkpoint of any layout and return its `progress`. This is a
    collective.

    The checkpoint stays in place meanwhile, even if it belongs to another run, and all ranks read
    rank 0's. Every file is verified first, unless `find_latest_on_all_ranks` has done so. Frozen
    parameters, and all parameters of a worker made without training, have no moments: those in the
    checkpoint are ignored. Without `moments` only the weights are read, and the optimizer starts
    from scratch.
    """
    folder = Path(broadcast_json(str(folder), 0))
    with hold_for_reading(folder):
        return _load(worker, folder, verified, moments)


def _load(worker: MegatronWorker, folder: Path, verified: bool, moments: bool) -> dict[str, Any]:
    if not verified:
        _verify(folder)
    with fail_together(CheckpointError):
        state = state_json.read_state(folder)
        state_json.check_state(worker.cfg, folder, state, moments and worker.optimizer is not None)
        if worker.cfg.lora.rank:
            state_json.check_base(folder, state, worker.base_digest, str(worker.source.path))
        lr, steps = state["lr"].number(0), state["optimizer_steps"].whole()
        progress = state["progress"]
        progress.object()
        reader = tensor_pieces.PieceReader(folder, tensor_pieces.read_index(folder))
        parts = rank_state.local_parts(worker, moments)
        pieces = list(rank_state.held_pieces(worker, parts, writing=False))
        keys = [piece.key for piece in pieces]
        remedy = f"resume with the configuration in its config.yaml, {state_json.OR_BEGIN}"
        reader.check(keys, rank_state.shapes_of(worker), remedy)
    state_json.keep_kernels(worker, folder, state)
    with fail_together(CheckpointError), torch.no_grad():
        for piece in pieces:
            reader.fill(piece)
            worker.watchdog.busy()
        for part in parts.values():
            part.store_moments()
        if moments:
            state_json.say_conversion(worker, folder, state)
        else:
            rank_state.clear_moments(worker)
    worker.lr, worker.steps = lr, steps
    if worker.optimizer is not None:
        rank_state.set_step(worker.optimizer, steps if moments else 0)
    return dict(progress.value)


def find_latest_on_all_ranks(checkpoints_folder: Path, after: int = -1) -> Path | None:
    """Return the checkpoint that was written last among those whose files are all unchanged; each
    rank reads its share of them. Only serials `after` this one, rank 0's, count. This is a
    collective."""
    names: list[str] = []
    with fail_together(CheckpointError):
        if dist.get_rank() == 0:
            complete = run_checkpoints.complete_checkpoints(checkpoints_folder, after)
            names = [str(folder) for folder in complete]
    for folder in map(Path, broadcast_json(names, 0)):
        try:
            _verify(folder)
        except CheckpointError as error:
            if dist.get_rank() == 0:
                run_checkpoints.skip_damaged(folder, error)
        else:
            return folder
    return None


def _verify(folder: Path) -> None:
    with fail_together(CheckpointError):
        verify(folder, slice(dist.get_rank(), None, dist.get_world_size()))
