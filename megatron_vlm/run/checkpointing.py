"""When a run's checkpoints are written, which are kept, and from which it resumes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.checkpoint import retention
from megatron_vlm.checkpoint.export_checkpoint import mark_of, training_of
from megatron_vlm.checkpoint.manifest import Manifest, read_manifest
from megatron_vlm.checkpoint.save_load import PendingSave, find_latest_on_all_ranks, load, save
from megatron_vlm.config.schema import CheckpointConfig, Config
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.distributed.agreement import all_reduce_max
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.export_folder import ExportMark
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.run.config_changes import changed_since
from megatron_vlm.run.run_folder import RunLock
from megatron_vlm.training.data_fingerprint import Fingerprint
from megatron_vlm.training.worker import MegatronWorker

# How far a run has got: what a checkpoint stores besides tensors.


@dataclass(frozen=True)
class Progress:
    """Steps done, and where the data continues."""

    step: int = 0
    position: Position = field(default_factory=Position)
    data: Fingerprint = field(default_factory=Fingerprint)
    best_of: str | None = None  # the score that `best` is of: checkpoint.best
    best: float | None = None
    best_step: int | None = None
    tokens: int | None = 0  # trained ones; None where the run began in a version without this
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # of the last evaluation
    scored_step: int | None = None

    def better(
        self, checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]
    ) -> "Progress":
        """With these scores of a set, if they are the best so far by checkpoint.best."""
        wanted, _, score = (checkpoint.best or "").rpartition("/")
        if wanted != name or not math.isfinite(scores[score]):
            return self
        least = score == "loss"
        known = self.best if self.best_of == checkpoint.best else None
        if known is not None and (scores[score] >= known if least else scores[score] <= known):
            return self
        return replace(self, best_of=checkpoint.best, best=scores[score], best_step=self.step)

    def scored(self, name: str, scores: Mapping[str, float]) -> "Progress":
        """With these scores of a set; those of an earlier step go."""
        kept = self.scores if self.scored_step == self.step else {}
        mine = {key: value for key, value in scores.items() if key != "seconds"}
        return replace(self, scores={**kept, name: mine}, scored_step=self.step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Progress":
        known = {"tokens": None, **saved, "position": Position(**saved["position"])}
        return Progress(**{**known, "data": Fingerprint.from_json(saved["data"])})


class CheckpointManager:
    """The checkpoints in cfg.run/checkpoints. Rank 0 has the claim on that folder."""

    def __init__(
        self, cfg: Config, worker: MegatronWorker, data: Fingerprint, claim: RunLock | None
    ):
        self.cfg, self.worker, self.data, self.claim = cfg, worker, data, claim
        self.folder = Path(cfg.run) / "checkpoints"
        self.pending: PendingSave | None = None
        self.best_step: int | None = None
        self.saved_step = -1
        self.head: Manifest | None = None  # on rank 0: the checkpoint that training goes on from
        self.newest: Path | None = None  # the checkpoint of the present weights
        self.remarks: list[str] = []  # on rank 0: what a person should know of the resume

    def resume(self) -> Progress:
        """Resume as checkpoint.resume says. A collective."""
        asked, device = self.cfg.checkpoint.resume, self.worker.platform.device
        origin, verified = None if asked in ("auto", "never") else Path(asked), False
        # After a failure a job resumes from the checkpoints that it has written, however it was
        # started. Under torchrun each machine counts its own restarts.
        again = bool(all_reduce_max(int(restarts() > 0), device))
        if asked == "auto" or again:
            after = self.claim.last_serial if self.claim and asked != "auto" else -1
            latest = find_latest_on_all_ranks(self.folder, device, after)
            origin, verified = latest or origin, latest is not None
        elif asked == "never":
            self._check_unused()
        if origin is None:
            if dist.get_rank() == 0 and any(retention.other_lines(self.folder, None)):
                self.remarks.append(f"no checkpoint in {self.folder} can be used: starting anew")
            return Progress(data=self.data)
        progress = Progress.from_json(load(self.worker, origin, verified=verified))
        changed = progress.data.changed_rows(self.data)
        if moved := progress.data.changed_order(self.data):
            raise CheckpointError(
                "was trained on other data, or with other rules for it "
                f"({'; '.join([*moved, *changed])}): its place in the order of samples means "
                "nothing here",
                place=str(origin),
                remedy="give the same data.*, or start a new run from its weights: "
                f"megatron-vlm export {origin} DIR, model.path=DIR",
            )
        self.best_step, self.saved_step = progress.best_step, progress.step
        if dist.get_rank() == 0:
            self._go_on_from(origin)
            self.remarks += [f"resumed with {change}" for change in changed]
            self.remarks += changed_since(origin, self.cfg, changed)
        return progress

    def _go_on_from(self, origin: Path) -> None:
        self.head, self.newest = read_manifest(origin), origin
        self.remarks.append(f"resumed from {origin}")
        left = [folder.name for folder in retention.other_lines(self.folder, self.head)]
        if left:
            self.remarks.append(
                f"{', '.join(left)} in {self.folder}: of another line than {origin.name}, or "
                "damaged; kept, but not used from here on"
            )

    def _check_unused(self) -> None:
        """A new run beside the checkpoints of an earlier one is likely to be a mistake."""
        if any(self.folder.glob("step-*")):
            raise CheckpointError(
                f"starts a new run, and {self.folder} has checkpoints of an earlier one",
                key="checkpoint.resume",
                found="never",
                remedy="give another run=FOLDER, or checkpoint.resume=auto to resume",
            )

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint, unless this step has one. A collective."""
        if progress.step == self.saved_step:
            return
        self.finish()
        target = retention.step_folder(self.folder, progress.step)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        content = replace(progress, data=self.data).to_json()
        async_save, run = self.cfg.checkpoint.async_save, self.claim.run if self.claim else None
        self.pending = save(self.worker, target, content, async_save, run, self.head)
        self.saved_step, self.best_step = progress.step, progress.best_step
        self.poll()

    def poll(self) -> None:
        """Complete the checkpoint that was begun, if every rank is done writing. A collective."""
        if self.pending is not None and self.pending.finish(blocking=False):
            self._completed(self.pending)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is complete. A collective."""
        if self.pending is not None:
            self.pending.finish()
            self._completed(self.pending)

    def export_mark(self) -> ExportMark | None:
        """What an export of the present weights says of itself, on rank 0."""
        if self.head is None or self.newest is None:
            return None
        return mark_of(self.newest, self.head, self.saved_step)

    def training(self) -> TrainingSummary | None:
        """What the model card of an export says was done, on rank 0."""
        return None if self.newest is None else training_of(self.newest)

    def _completed(self, saved: PendingSave) -> None:
        self.pending = None
        if saved.manifest is not None:  # on rank 0
            self.head, self.newest, rules = saved.manifest, saved.folder, self.cfg.checkpoint
            retention.keep(
                self.folder, self.head, rules.keep_last, rules.keep_every, self.best_step
            )
