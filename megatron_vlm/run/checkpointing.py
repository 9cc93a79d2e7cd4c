"""Checkpoints of a run: when they are written, which are kept, and from which the run resumes."""

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
from megatron_vlm.checkpoint.tensor_pieces import outside_file
from megatron_vlm.config.schema import CheckpointConfig, Config
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.distributed.agreement import all_reduce_max, fail_together
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.export_folder import ExportMark
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.run.resolve_model import changed_since
from megatron_vlm.run.run_folder import RunLock
from megatron_vlm.training.data_fingerprint import Fingerprint
from megatron_vlm.training.frozen_inputs import FrozenInput, changed_inputs, inputs_from_json
from megatron_vlm.training.worker import MegatronWorker

# Progress of a run, which a checkpoint stores in addition to tensors.


@dataclass(frozen=True)
class Progress:
    """The steps that are done, and the position where the data continues."""

    step: int = 0
    position: Position = field(default_factory=Position)
    data: Fingerprint = field(default_factory=Fingerprint)
    best_of: str | None = None  # the score in `best`: checkpoint.best
    best: float | None = None
    best_step: int | None = None
    tokens: int | None = 0  # trained tokens; None if the run began in a version without this
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # by set, last evaluation
    scored_step: int | None = None
    waited: int = 0  # evaluations since the last one that train.early_stopping counts as better
    waited_from: float | None = None  # the score of that one
    frozen: dict[str, FrozenInput] = field(default_factory=dict)  # by key

    def with_best(
        self, checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]
    ) -> "Progress":
        """Return the progress with these scores of a set, if they are the best so far by
        checkpoint.best."""
        value = _deciding(checkpoint, name, scores)
        if value is None or not math.isfinite(value):
            return self
        known = self.best if self.best_of == checkpoint.best else None
        if not _is_better(checkpoint, value, known):
            return self
        return replace(self, best_of=checkpoint.best, best=value, best_step=self.step)

    def with_patience(self, cfg: Config, name: str, scores: Mapping[str, float]) -> "Progress":
        """Return the progress after these scores of a set, as train.early_stopping counts. Call it
        before `with_best`, which notes by which score the progress counts."""
        value = _deciding(cfg.checkpoint, name, scores)
        if value is None:
            return self
        known = self.waited_from if self.best_of == cfg.checkpoint.best else None
        delta = cfg.train.early_stopping_delta
        if math.isfinite(value) and _is_better(cfg.checkpoint, value, known, delta):
            return replace(self, waited=0, waited_from=value)
        return replace(self, waited=self.waited + 1)

    def has_waited(self, cfg: Config) -> bool:
        """Return whether train.early_stopping ends the run here."""
        patience = cfg.train.early_stopping
        is_counted = self.best_of in (None, cfg.checkpoint.best)
        return patience is not None and is_counted and self.waited >= patience

    def with_scores(self, name: str, scores: Mapping[str, float]) -> "Progress":
        """Return the progress with these scores of a set. Scores of an earlier step are dropped."""
        other_scores = self.scores if self.scored_step == self.step else {}
        set_scores = {key: value for key, value in scores.items() if key != "seconds"}
        return replace(self, scores={**other_scores, name: set_scores}, scored_step=self.step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Progress":
        known = {"tokens": None, **saved, "position": Position(**saved["position"])}
        known |= {"data": Fingerprint.from_json(saved["data"]), "frozen": inputs_from_json(saved)}
        return Progress(**known)


def _deciding(checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]) -> float | None:
    """Return the score that checkpoint.best names; None if it is of another set, nan if this set
    lacks it."""
    set_name, _, score = (checkpoint.best or "").rpartition("/")
    return scores.get(score, math.nan) if set_name == name else None


def _is_better(
    checkpoint: CheckpointConfig, value: float, known: float | None, delta: float = 0.0
) -> bool:
    """Return whether a value of the score is better than the known one by more than `delta`."""
    if known is None:
        return True
    lower_is_better = (checkpoint.best or "").endswith("/loss")
    return (known - value if lower_is_better else value - known) > delta


class CheckpointManager:
    """The checkpoints in cfg.run/checkpoints. Only rank 0 has a `claim` on that folder, and the
    `frozen` inputs of the run."""

    def __init__(
        self,
        cfg: Config,
        worker: MegatronWorker,
        data: Fingerprint,
        frozen: dict[str, FrozenInput],
        claim: RunLock | None,
    ):
        self.cfg, self.worker, self.data, self.claim = cfg, worker, data, claim
        self.frozen = frozen
        self.folder = Path(cfg.run) / "checkpoints"
        self.origin: Path | None = None  # the checkpoint to resume from
        self.is_verified = False
        self.pending: PendingSave | None = None
        self.best_step: int | None = None
        self.saved_step = -1
        self.head: Manifest | None = None  # on rank 0: the checkpoint that training continues from
        self.newest: Path | None = None  # the checkpoint of the current weights
        self.turned_to: Path | None = None  # a checkpoint whose weights are not loaded yet
        self.remarks: list[str] = []  # on rank 0: notes about the resume

    def find(self) -> None:
        """Find the checkpoint that checkpoint.resume means. Its frozen inputs are compared here, if
        it is known to be undamaged: the run may use its own for hours before it resumes. A
        collective."""
        setting, device = self.cfg.checkpoint.resume, self.worker.platform.device
        origin, verified = None if setting in ("auto", "never") else Path(setting), False
        # After a failure a job resumes from the checkpoints that it has written, however it was
        # started. Under torchrun each machine counts its own restarts.
        is_restarted = bool(all_reduce_max(int(restarts() > 0), device))
        if setting == "auto" or is_restarted:
            after = self.claim.last_serial if self.claim and setting != "auto" else -1
            latest = find_latest_on_all_ranks(self.folder, device, after)
            origin, verified = latest or origin, latest is not None
        elif setting == "never":
            self._check_unused()
        self.origin, self.is_verified = origin, verified
        with fail_together(device, CheckpointError):
            if origin is not None and verified and self.frozen:
                progress = outside_file(origin / "state.json").json()["progress"].value
                changed_inputs(origin, inputs_from_json(progress), self.frozen)

    def resume(self) -> Progress:
        """Resume from the checkpoint that was found. A collective."""
        origin, device = self.origin, self.worker.platform.device
        if origin is None:
            if dist.get_rank() == 0 and any(retention.other_lines(self.folder, None)):
                self.remarks.append(f"no checkpoint in {self.folder} can be used: starting anew")
            return Progress(data=self.data)
        progress = Progress.from_json(load(self.worker, origin, self.is_verified))
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
        with fail_together(device, CheckpointError):
            others = changed_inputs(origin, progress.frozen, self.frozen)
        self.saved_step = progress.step
        if dist.get_rank() == 0:
            self._go_on_from(origin)
            changed = list(dict.fromkeys([*changed, *others]))
            self.remarks += [f"resumed with {change}" for change in changed]
            self.remarks += changed_since(origin, self.cfg, changed)
        progress = self._with_own_best(progress)
        self.best_step = progress.best_step
        return progress

    def _with_own_best(self, progress: Progress) -> Progress:
        """Return the progress without its best score if the best checkpoint is to be exported at
        the end, and is not one of this run's."""
        if progress.best_step is None or self.cfg.checkpoint.export_from != "best":
            return progress
        folder = retention.step_folder(self.folder, progress.best_step)
        is_missing = self.head is not None and not retention.is_in_line(folder, self.head)
        if not all_reduce_max(int(is_missing), self.worker.platform.device):
            return progress
        if dist.get_rank() == 0:
            self.remarks.append(
                f"the best checkpoint so far, of step {progress.best_step}, is not in "
                f"{self.folder} and could not be exported: the best is sought anew"
            )
        return replace(progress, best=None, best_step=None)

    def _go_on_from(self, origin: Path) -> None:
        self.head, self.newest = read_manifest(origin), origin
        self.remarks.append(f"resumed from {origin}")
        others = [folder.name for folder in retention.other_lines(self.folder, self.head)]
        if others:
            self.remarks.append(
                f"{', '.join(others)} in {self.folder}: of another line than {origin.name}, or "
                "damaged; kept, but not used from here on"
            )

    def _check_unused(self) -> None:
        """Refuse to start a new run next to the checkpoints of an earlier one, which is probably a
        mistake."""
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
        content = replace(progress, data=self.data, frozen=self.frozen).to_json()
        async_save, run = self.cfg.checkpoint.async_save, self.claim.run if self.claim else None
        self.pending = save(self.worker, target, content, async_save, run, self.head)
        self.saved_step, self.best_step = progress.step, progress.best_step
        self.poll()

    def poll(self) -> None:
        """Complete the checkpoint in progress if every rank has finished writing. A collective."""
        if self.pending is not None and self.pending.finish(blocking=False):
            self._record_completed(self.pending)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. A collective."""
        if self.pending is not None:
            self.pending.finish()
            self._record_completed(self.pending)

    def turn_to(self, step: int) -> None:
        """Take the checkpoint of an earlier step for what follows the end of training."""
        self.turned_to = folder = retention.step_folder(self.folder, step)
        self.saved_step = step
        if dist.get_rank() == 0:
            self.head, self.newest = read_manifest(folder), folder

    def load_turned_to(self) -> None:
        """Load the weights of the checkpoint that was turned to, unless they are loaded. A
        collective."""
        if self.turned_to is not None:
            load(self.worker, self.turned_to)
            self.turned_to = None

    def export_mark(self) -> ExportMark | None:
        """Return the mark of an export of the current weights, on rank 0."""
        if self.head is None or self.newest is None:
            return None
        return mark_of(self.newest, self.head, self.saved_step)

    def training(self) -> TrainingSummary | None:
        """Return the training summary for the model card of an export, on rank 0."""
        return None if self.newest is None else training_of(self.newest)

    def _record_completed(self, saved: PendingSave) -> None:
        self.pending = None
        if saved.manifest is not None:  # on rank 0
            self.head, self.newest, rules = saved.manifest, saved.folder, self.cfg.checkpoint
            retention.prune(
                self.folder, self.head, rules.keep_last, rules.keep_every, self.best_step
            )
