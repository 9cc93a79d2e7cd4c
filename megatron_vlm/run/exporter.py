"""Export of a run's weights after its last step, and the upload of the export."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported
from megatron_vlm.distributed.agreement import Signals, all_reduce_max
from megatron_vlm.distributed.process import PREEMPTED
from megatron_vlm.hf.export_folder import changed_file, read_export_mark
from megatron_vlm.hf.push import Upload
from megatron_vlm.lora.peft_config import is_kind
from megatron_vlm.run.checkpointing import CheckpointManager
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.progress import Progress
from megatron_vlm.run.run_folder import export_folders
from megatron_vlm.training.worker import MegatronWorker


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
        if all_reduce_max(int(is_current), self.worker.platform.device):
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
        """Upload the export, if checkpoint.push is set, and return the exit status. One thread of
        rank 0 uploads while all ranks wait together in short collectives, so that they notice a
        signal."""
        repo = self.cfg.checkpoint.push
        if repo is None:
            return 0
        self.begin_phase(step, "upload")
        upload = Upload(Path(self.cfg.run) / "export", repo) if self.log.speaks else None
        ending = 0
        while not ending:
            status = upload.wait() if upload is not None else 0
            ending = all_reduce_max(
                status if signals.received is None else PREEMPTED, self.worker.platform.device
            )
            self.worker.watchdog.alive()
        if upload is not None:
            self.log.event(step, upload.said or f"stopped by a signal; {upload.again}")
        return 0 if ending == Upload.DONE else ending
