"""Checkpoints of a run: when they are written, which are kept, from which the run resumes, and the
export of the last or the best one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_vlm.checkpoint import run_checkpoints
from megatron_vlm.checkpoint.manifest import Manifest, read_manifest
from megatron_vlm.checkpoint.save_load import PendingSave, find_latest_on_all_ranks, load, save
from megatron_vlm.checkpoint.state_json import mark_of, read_state, training_of
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported
from megatron_vlm.distributed.agreement import Signals, all_reduce_max, fail_together
from megatron_vlm.distributed.collectives import host_group
from megatron_vlm.distributed.process import PREEMPTED, restarts
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.export_mark import ExportMark, changed_file, read_export_mark
from megatron_vlm.hf.hub_upload import Upload
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.lora.peft_folder import is_kind
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.progress import Progress
from megatron_vlm.run.run_folder import RunLock, changed_since, export_folders
from megatron_vlm.training.data_fingerprint import Fingerprint
from megatron_vlm.training.frozen_inputs import FrozenInput, changed_inputs, inputs_from_json
from megatron_vlm.training.worker import MegatronWorker


def check_unused(folder: Path) -> None:
    """Refuse to start a new run next to the checkpoints of an earlier one."""
    if any(folder.glob("step-*")):
        raise CheckpointError(
            f"starts a new run, and {folder} has checkpoints of an earlier one",
            key="checkpoint.resume",
            found="never",
            remedy="give another run=FOLDER, or checkpoint.resume=auto to resume",
        )


def changed_rows(origin: Path, progress: Progress, data: Fingerprint) -> list[str]:
    """Return the rules for rows that have changed since a checkpoint. Refuse data in which its
    place means nothing."""
    changed = progress.data.changed_rows(data)
    if moved := progress.data.changed_order(data):
        raise CheckpointError(
            "was trained on other data, or with other rules for it "
            f"({'; '.join([*moved, *changed])}): its place in the order of samples means "
            "nothing here",
            place=str(origin),
            remedy="give the same data.*, or start a new run from its weights: "
            f"megatron-vlm export {origin} DIR, model.path=DIR",
        )
    return changed


class CheckpointManager:
    """The checkpoints in cfg.run/checkpoints. Only rank 0 has a `claim` and the `frozen` inputs."""

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
        # On rank 0: returns the contents of more files of a checkpoint, by their names.
        self.more_texts: Callable[[], dict[str, str]] = dict

    def find(self) -> None:
        """Find the checkpoint that checkpoint.resume means. The frozen inputs of an undamaged one
        are compared here, since a run may use its own for hours before it resumes. A collective."""
        setting = self.cfg.checkpoint.resume
        origin = None if setting in ("auto", "never") else Path(setting)
        # After a failure a job resumes from the checkpoints that it has written, however it was
        # started. Under torchrun each machine counts its own restarts.
        is_restarted = bool(all_reduce_max(int(restarts() > 0)))
        if setting == "auto" or is_restarted:
            after = self.claim.last_serial if self.claim and setting != "auto" else -1
            latest = find_latest_on_all_ranks(self.folder, after)
            origin, self.is_verified = latest or origin, latest is not None
        elif setting == "never":
            check_unused(self.folder)
        self.origin = origin
        with fail_together(CheckpointError):
            if origin is not None and self.is_verified and self.frozen:
                progress = read_state(origin)["progress"].value
                changed_inputs(origin, inputs_from_json(progress), self.frozen)

    def resume(self) -> Progress:
        """Resume from the checkpoint that was found. A collective."""
        origin = self.origin
        if origin is None:
            if dist.get_rank() == 0 and any(run_checkpoints.other_lines(self.folder, None)):
                self.remarks.append(f"no checkpoint in {self.folder} can be used: starting anew")
            return Progress(data=self.data)
        progress = Progress.from_json(load(self.worker, origin, self.is_verified))
        changed = changed_rows(origin, progress, self.data)
        with fail_together(CheckpointError):
            changed += changed_inputs(origin, progress.frozen, self.frozen)
            changed = list(dict.fromkeys(changed))
            if dist.get_rank() == 0:
                self._go_on_from(origin)
                self.remarks += [f"resumed with {change}" for change in changed]
                self.remarks += changed_since(origin, self.cfg, changed)
        self.saved_step = progress.step
        progress = self._with_own_best(progress)
        self.best_step = progress.best_step
        return progress

    def _with_own_best(self, progress: Progress) -> Progress:
        """Return the progress without its best score if the best checkpoint is to be exported at
        the end, and is not one of this run's."""
        if progress.best_step is None or self.cfg.checkpoint.export_from != "best":
            return progress
        folder = run_checkpoints.step_folder(self.folder, progress.best_step)
        is_missing = self.head is not None and not run_checkpoints.is_in_line(folder, self.head)
        if not all_reduce_max(int(is_missing)):
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
        if others := [each.name for each in run_checkpoints.other_lines(self.folder, self.head)]:
            self.remarks.append(
                f"{', '.join(others)} in {self.folder}: of another line than {origin.name}, or "
                "damaged; kept, but not used from here on"
            )

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint, unless this step has one. A collective."""
        if progress.step == self.saved_step:
            return
        self.finish()
        target = run_checkpoints.step_folder(self.folder, progress.step)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier(group=host_group())
        content = asdict(replace(progress, data=self.data, frozen=self.frozen))
        async_save, run = self.cfg.checkpoint.async_save, self.claim.run if self.claim else None
        texts = self.more_texts()
        self.pending = save(self.worker, target, content, async_save, run, self.head, texts=texts)
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
        self.turned_to = folder = run_checkpoints.step_folder(self.folder, step)
        self.saved_step = step
        if dist.get_rank() == 0:
            self.head, self.newest = read_manifest(folder), folder

    def load_turned_to(self) -> None:
        """Load the checkpoint that was turned to, unless it is loaded. A collective."""
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
            self.head, self.newest = saved.manifest, saved.folder
            rules = self.cfg.checkpoint.keep_last, self.cfg.checkpoint.keep_every
            run_checkpoints.prune(self.folder, self.head, *rules, self.best_step)


@dataclass(frozen=True)
class Exporter:
    """Exporter of a run, whose last checkpoint is complete."""

    cfg: Config
    worker: MegatronWorker
    saver: CheckpointManager
    log: RunLog
    begin_phase: Callable[..., None]  # Run.begin_phase

    def export(self, progress: Progress) -> None:
        """Export the last or the best weights, in each form that checkpoint.export names."""
        self._choose(progress)
        for kind, target in export_folders(self.cfg).items():
            self._export(kind, target, progress.step)
        if not self.cfg.checkpoint.export:
            target = Path(self.cfg.run) / "export"
            mark = read_export_mark(target)
            if mark is not None and not self._is_current(target):
                self.log.say(f"{target} still holds step {mark.step}: checkpoint.export=false")

    def _choose(self, progress: Progress) -> None:
        """Turn to the best checkpoint, if the export is to be of that one."""
        key = self.cfg.checkpoint.best
        if self.cfg.checkpoint.export_from == "last":
            if key is not None and progress.best_of == key and progress.best_step != progress.step:
                self.log.say(
                    f"the export is of the last step, and {key} was best at step "
                    f"{progress.best_step}: checkpoint.export_from=best exports that one"
                )
            return
        if progress.best_step is None or progress.best_of != key:
            text = f"no evaluation had a finite {key}, so the export is of the last step"
            self.log.event(progress.step, text)
        elif progress.best_step != progress.step:
            self.saver.turn_to(progress.best_step)

    def _export(self, kind: Exported, target: Path, step: int) -> None:
        """Export the weights, unless the same export is already there and unchanged."""
        is_current = self.log.speaks and self._is_current(target) and is_kind(kind, target)
        if is_current and (name := changed_file(target)) is not None:
            self.log.say(f"{target / name} has changed since it was written: exporting again")
            is_current = False
        if all_reduce_max(int(is_current)):
            self.log.say(f"{target} already holds step {self.saver.saved_step}")
            return
        self.begin_phase(step, "export", files=True)
        self.saver.load_turned_to()
        mark, done = self.saver.export_mark(), self.saver.training()
        self.worker.export_hf(str(target), mark, done, kind)
        best = ", the best," * (self.saver.saved_step != step)
        self.log.say(f"exported step {self.saver.saved_step}{best} to {target}")

    def _is_current(self, target: Path) -> bool:
        mark = read_export_mark(target)
        return mark is not None and mark == self.saver.export_mark()

    def push(self, step: int, signals: Signals) -> int:
        """Upload the export if checkpoint.push is set, and return the exit status. One thread
        uploads while all ranks meet in short collectives, so that they notice a signal."""
        repo = self.cfg.checkpoint.push
        if repo is None:
            return 0
        self.begin_phase(step, "upload")
        upload = Upload(Path(self.cfg.run) / "export", repo) if self.log.speaks else None
        ending = 0
        while not ending:
            status = upload.wait() if upload is not None else 0
            status = status if signals.received is None else PREEMPTED
            ending = all_reduce_max(status)
            self.worker.watchdog.alive()
        if upload is not None:
            self.log.event(step, upload.said or f"stopped by a signal; {upload.again}")
        return 0 if ending == Upload.DONE else ending
