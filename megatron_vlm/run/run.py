"""All that a training run holds on one rank, opened in order and closed in order."""

import importlib.metadata
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from megatron_vlm.config.schema import Config
from megatron_vlm.data.processes import start_server
from megatron_vlm.distributed.agree import OK, STOP, Signals, job_store
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.evaluation.evaluate import Examiner, write_examples, write_predictions
from megatron_vlm.feed.feeder import Feeder, StepData
from megatron_vlm.hf.stages import layout_table, stage_reports
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.meter import Guard, Meter
from megatron_vlm.run.profiler import Profiler
from megatron_vlm.run.progress import Progress
from megatron_vlm.run.report import write_report
from megatron_vlm.run.saver import Saver
from megatron_vlm.worker import MegatronWorker, StepMetrics


@dataclass
class Run:
    """Open it with `with Run.open(cfg) as run`."""

    opened: ExitStack
    cfg: Config
    worker: MegatronWorker
    feeder: Feeder
    log: RunLog
    watchdog: Watchdog
    signals: Signals
    meter: Meter
    guard: Guard
    saver: Saver
    examiner: Examiner
    profiler: Profiler
    progress: Progress
    total_steps: int
    resumed_step: int  # 0 at a start
    evaluated_step: int = -1

    @staticmethod
    def open(cfg: Config, signals: Signals | None = None) -> "Run":
        """Model, data, and where an earlier run of this folder had come to."""
        opened = ExitStack()
        try:
            return Run._open(cfg, signals or Signals(), opened)
        except BaseException:
            opened.close()
            raise

    @staticmethod
    def _open(cfg: Config, signals: Signals, opened: ExitStack) -> "Run":
        opened.callback(signals.restore)
        if cfg.data.num_workers:
            start_server()  # its imports go on while the model is built
        worker = MegatronWorker(cfg)
        rank, world = dist.get_rank(), dist.get_world_size()
        watchdog = Watchdog(job_store(), rank, world, 60 * cfg.launch.timeout_minutes)
        opened.callback(watchdog.stop)
        watchdog.at(0, "opening the data", patient=True)
        feeder = Feeder(worker, cfg)
        examiner = Examiner(worker, cfg, watchdog.alive)
        total = feeder.total_steps()
        watchdog.at(0, "resuming")
        saver = Saver(cfg, worker, feeder.print)
        progress, origin = saver.resume()
        feeder.start(progress.position)
        log = RunLog(cfg, rank == 0, total, progress.step)
        opened.callback(log.close)
        profiler = Profiler(cfg, rank, worker.platform)
        opened.callback(profiler.close)
        run = Run(
            opened,
            cfg,
            worker,
            feeder,
            log,
            watchdog,
            signals,
            Meter(worker.platform),
            Guard(cfg),
            saver,
            examiner,
            profiler,
            progress,
            total,
            progress.step,
        )
        run._announce()
        if origin is not None:
            log.event(progress.step, f"resumed from {origin}")
        return run

    def _announce(self) -> None:
        dims = self.worker.dims
        worker = self.worker
        reports = stage_reports(self.cfg, worker.source, dims, worker.table)
        where = f"{worker.platform.name}, {worker.model.config.params_dtype}"
        self.log.say(layout_table(self.cfg, dims, where, reports))
        self.log.start(
            step=self.progress.step,
            platform=self.worker.platform.name,
            world=dist.get_world_size(),
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
        """The next step's data; all ranks go on together or stop together."""
        return self.feeder.next(STOP if self.signals.received is not None else OK)

    def record(
        self, step: int, batch: StepData, metrics: StepMetrics, norm: float, lr: float
    ) -> None:
        """Figures of a step that was done."""
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
        """Every held-out set, unless this step has been; it may be the best so far."""
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
        """A signal came: save, and say how to go on."""
        self.at(self.progress.step, "checkpoint")
        self.saver.save(self.progress)
        self.saver.finish()
        self.log.event(
            self.progress.step,
            f"stopped by a signal after {self.progress.step} steps; start again to go on",
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

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.opened.close()
        if kind is None:
            dist.barrier()
