"""All that a training run holds on one rank, opened in order and closed in order."""

import importlib.metadata
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_vlm.config.schema import Config
from megatron_vlm.data.processes import start_server
from megatron_vlm.distributed.agree import Signals, Vote, job_store
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.evaluation.evaluate import Examiner, write_examples, write_predictions
from megatron_vlm.feed.feeder import Feeder, StepData
from megatron_vlm.hf.stages import layout_table, stage_reports
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.meter import Guard, Meter
from megatron_vlm.run.profiler import Profiler
from megatron_vlm.run.report import write_report
from megatron_vlm.run.saver import Saver
from megatron_vlm.worker import MegatronWorker, StepMetrics


class Run:
    """Open it with `with Run.open(cfg) as run`."""

    def __init__(self, cfg: Config, signals: Signals, opened: ExitStack):
        """Model and data, and what an earlier run of this folder has done. `opened` closes it."""
        opened.callback(signals.restore)
        if cfg.data.num_workers:
            start_server()  # it imports while the model is built
        self.cfg, self.signals = cfg, signals
        self.worker = worker = MegatronWorker(cfg)
        grid, platform = worker.grid, worker.platform
        timeout_s = 60 * cfg.launch.timeout_minutes
        self.watchdog = Watchdog(job_store(), grid.rank, grid.dims.world_size, timeout_s)
        opened.callback(self.watchdog.stop)
        self.at(0, "opening the data", patient=True)
        self.feeder = Feeder(cfg, worker.source.sizes, grid, platform.device)
        self.examiner = Examiner(worker, cfg, self.watchdog.alive)
        self.total_steps = self.feeder.total_steps()
        self.at(0, "resuming")
        self.saver = Saver(cfg, worker, self.feeder.fingerprint)
        self.progress, origin = self.saver.resume()
        self.resumed_step = self.progress.step  # 0 for a new run
        self.evaluated_step = -1
        self.feeder.start(self.progress.position)
        self.log = RunLog(cfg, grid.rank == 0, self.total_steps, self.resumed_step)
        opened.callback(self.log.close)
        self.profiler = Profiler(cfg, grid.rank, platform)
        opened.callback(self.profiler.close)
        self.meter, self.guard = Meter(platform), Guard(cfg)
        self._announce()
        if origin is not None:
            self.log.event(self.resumed_step, f"resumed from {origin}")

    @staticmethod
    @contextmanager
    def open(cfg: Config, signals: Signals | None = None) -> Iterator["Run"]:
        """A run that is closed again whatever happens; without an error, all ranks end together."""
        with ExitStack() as opened:
            yield Run(cfg, signals or Signals(), opened)
        dist.barrier()

    def _announce(self) -> None:
        worker, dims = self.worker, self.worker.dims
        reports = stage_reports(self.cfg.model, dims, worker.table)
        where = f"{worker.platform.name}, {worker.chunks[0].config.params_dtype}"
        self.log.say(layout_table(self.cfg, dims, where, reports))
        self.log.start(
            step=self.progress.step,
            platform=worker.platform.name,
            world=dims.world_size,
            layout={"tp": dims.tp, "pp": dims.pp, "dp": dims.dp},
            parameters=sum(report.total.total() for report in reports),
            trainable=sum(report.trainable.total() for report in reports),
            model=self.cfg.model.path,
            samples=self.feeder.length,
            total_steps=self.total_steps,
            versions={
                name: importlib.metadata.version(name)
                for name in ("torch", "megatron-core", "transformers", "megatron_vlm")
            },
        )

    def at(self, step: int, phase: str, patient: bool = False) -> None:
        """Tell the watchdog."""
        self.watchdog.at(step, phase, patient)

    def next_batch(self) -> StepData:
        """The next step's data; all ranks continue together or stop together."""
        return self.feeder.next(Vote.OK if self.signals.received is None else Vote.STOP)

    def record(
        self, step: int, batch: StepData, metrics: StepMetrics, norm: float, lr: float
    ) -> None:
        """Log what a finished step took and gave."""
        self.progress = replace(self.progress, step=step + 1, position=batch.after)
        figures = self.meter.read(
            step, batch.after.epoch, metrics.loss, metrics.num_tokens, lr, norm, batch.figures
        )
        self.log.step(figures)
        if (warning := self.guard.check(step, metrics.loss, norm)) is not None:
            self.log.event(step, warning)

    def evaluate_if_due(self) -> None:
        """After a step. The last one is evaluated in `finish`."""
        every = self.cfg.eval.every
        if every is not None and self.progress.step % every == 0:
            self.evaluate()

    def evaluate(self) -> None:
        """Score every held-out set, unless this step has been scored; it may be the best so far."""
        step = self.progress.step
        if self.evaluated_step == step:
            return
        self.evaluated_step = step
        self.at(step, "evaluation")
        for place, done in enumerate(self.examiner.examine()):
            self.log.evaluation(step, done.name, done.scores)
            if done.predictions:
                write_predictions(Path(self.cfg.run) / "predictions", done)
                if place == 0:
                    write_examples(Path(self.cfg.run), step, done)
            self.progress = self.progress.better(self.cfg.checkpoint, done.name, done.scores)
        self.meter.skip()

    def save_if_due(self) -> None:
        """After a step: what was being written may be complete now, and a new one may be due."""
        self.at(self.progress.step, "checkpoint")
        self.saver.poll()
        every, step = self.cfg.checkpoint.every, self.progress.step
        if (every is not None and step % every == 0) or self.progress.best_step == step:
            self.saver.save(self.progress)
            self.meter.skip()

    def stop_early(self) -> None:
        """A signal came: save, and say how to resume."""
        self.at(self.progress.step, "checkpoint")
        self.saver.save(self.progress)
        self.saver.finish()
        self.log.event(
            self.progress.step,
            f"stopped by a signal after {self.progress.step} steps; start again to resume",
        )

    def finish(self) -> None:
        """After the last step: its scores, its checkpoint, the weights for everybody else."""
        if self.resumed_step < self.progress.step or self.progress.step == 0:
            self.evaluate()
        self.at(self.progress.step, "checkpoint")
        self.saver.save(self.progress)
        self.saver.finish()
        if self.cfg.checkpoint.export:
            self._export(Path(self.cfg.run) / "export")
        if text := self.feeder.faults():
            self.log.say(text)
        if self.cfg.log.report and self.log.speaks:
            self.log.say(f"report: {write_report(Path(self.cfg.run))}")

    def _export(self, target: Path) -> None:
        self.at(self.progress.step, "export", patient=True)
        if self.progress.step == self.resumed_step and target.is_dir():
            self.log.say(f"nothing was left to train; {target} is as it was")
            return
        if dist.get_rank() == 0 and target.is_dir():  # of fewer steps
            shutil.rmtree(target)
        self.worker.export_hf(str(target))
        self.log.say(f"exported to {target}")
