"""When a run's checkpoints are written, which are kept, and from which it resumes."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_vlm.checkpoint import store
from megatron_vlm.checkpoint.state import PendingSave, find_latest, load, save
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.agree import agree
from megatron_vlm.distributed.process import restarts
from megatron_vlm.errors import CheckpointError
from megatron_vlm.run.progress import Progress
from megatron_vlm.worker import MegatronWorker


class Saver:
    """The checkpoints in cfg.run/checkpoints."""

    def __init__(self, cfg: Config, worker: MegatronWorker, data: str):
        self.cfg, self.worker, self.data = cfg, worker, data
        self.folder = Path(cfg.run) / "checkpoints"
        self.pending: PendingSave | None = None
        self.best_step: int | None = None
        self.saved_step = -1

    def resume(self) -> tuple[Progress, str | None]:
        """Resume as checkpoint.resume says: the progress, and the checkpoint it came from. A
        collective."""
        # After a failure a run resumes from its own checkpoints, however it was started. Under
        # torchrun each machine counts its own restarts.
        device = self.worker.platform.device
        again = agree(int(restarts() > 0), device)
        asked = "auto" if again else self.cfg.checkpoint.resume
        origin = find_latest(self.folder, device) if asked == "auto" else Path(asked)
        if asked == "never":
            self._check_unused()
        if asked == "never" or origin is None:
            return Progress(data=self.data), None
        progress = Progress.from_json(load(self.worker, origin, verified=asked == "auto"))
        if progress.data != self.data:
            raise CheckpointError(
                f"{origin} was trained on other data, or with other rules for it: its place in "
                "the order of samples means nothing here; give the same data.*, or start a new run "
                f"from its weights: megatron-vlm export {origin} DIR, model.path=DIR"
            )
        self.best_step, self.saved_step = progress.best_step, progress.step
        return progress, str(origin)

    def _check_unused(self) -> None:
        """Checkpoints of two runs in one folder could not be told apart."""
        if any(self.folder.glob("step-*")):
            raise CheckpointError(
                f"{self.folder} has checkpoints of an earlier run, and checkpoint.resume=never "
                "starts a new one: give another run=FOLDER, or checkpoint.resume=auto to resume"
            )

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint, unless this step has one. A collective."""
        if progress.step == self.saved_step:
            return
        self.finish()
        target = store.step_folder(self.folder, progress.step)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        progress = replace(progress, data=self.data)
        async_save = self.cfg.checkpoint.async_save
        self.pending = save(self.worker, target, progress.to_json(), async_save)
        self.saved_step, self.best_step = progress.step, progress.best_step
        self.poll()

    def poll(self) -> None:
        """Complete the checkpoint that was begun, if every rank is done writing. A collective."""
        if self.pending is not None and self.pending.finish(blocking=False):
            self._completed()

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is complete. A collective."""
        if self.pending is not None:
            self.pending.finish()
            self._completed()

    def _completed(self) -> None:
        self.pending = None
        if dist.get_rank() == 0:
            keep = self.cfg.checkpoint
            store.keep(self.folder, keep.keep_last, keep.keep_every, self.best_step)
