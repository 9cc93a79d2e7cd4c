"""All that a training run holds on one rank, opened in order and closed in order."""

import importlib.metadata
from dataclasses import dataclass, field
from types import TracebackType

import torch.distributed as dist

from megatron_vlm.agree import OK, STOP, Signals
from megatron_vlm.data.processes import start_server
from megatron_vlm.data.progress import Position
from megatron_vlm.feeder import Feeder, StepData
from megatron_vlm.meter import Guard, Meter
from megatron_vlm.report import print_report, stage_reports
from megatron_vlm.run_log import RunLog
from megatron_vlm.schema import Config
from megatron_vlm.watchdog import Watchdog
from megatron_vlm.worker import MegatronWorker, StepMetrics


@dataclass
class Run:
    """Open it with `with Run.open(cfg) as run`."""

    cfg: Config
    worker: MegatronWorker
    feeder: Feeder
    log: RunLog
    watchdog: Watchdog
    signals: Signals
    meter: Meter
    guard: Guard
    first_step: int
    total_steps: int
    position: Position = field(default_factory=Position)

    @staticmethod
    def open(cfg: Config) -> "Run":
        """Model, data, and where an earlier run of this folder had come to."""
        if cfg.data.num_workers:
            start_server()  # its imports go on while the model is built
        signals = Signals()
        worker = MegatronWorker(cfg)
        rank, world = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store() if world > 1 else None
        watchdog = Watchdog(store, rank, world, 60 * cfg.launch.timeout_minutes)
        print_report(worker)
        watchdog.at(0, "opening the data")
        feeder = Feeder(worker, cfg)
        total = feeder.total_steps()
        first, position = 0, Position()
        feeder.start(position)
        log = RunLog(cfg, rank == 0, total, first)
        run = Run(
            cfg,
            worker,
            feeder,
            log,
            watchdog,
            signals,
            Meter(worker.platform),
            Guard(cfg),
            first,
            total,
            position,
        )
        run._announce()
        return run

    def _announce(self) -> None:
        dims = self.worker.dims
        reports = stage_reports(self.worker)
        self.log.start(
            step=self.first_step,
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

    def at(self, step: int, phase: str) -> None:
        """Tell the watchdog."""
        self.watchdog.at(step, phase)

    def next_batch(self) -> StepData:
        """The next step's data; all ranks go on together or stop together."""
        return self.feeder.next(STOP if self.signals.received is not None else OK)

    def record(
        self, step: int, batch: StepData, metrics: StepMetrics, norm: float, lr: float
    ) -> None:
        """Figures of a step that was done."""
        self.position = batch.after
        figures = self.meter.read(
            step, batch.after.epoch, metrics.loss, metrics.num_tokens, lr, norm, batch.figures
        )
        self.log.step(figures)
        if (warning := self.guard.check(step, metrics.loss, norm)) is not None:
            self.log.event(step, warning)

    def evaluate_and_save(self, steps_done: int) -> None:
        """What is due after so many steps."""

    def stop_early(self) -> None:
        """A signal came: save, and say how to go on."""
        self.log.event(self.first_step, "stopped by a signal")

    def finish(self) -> None:
        """After the last step."""
        dropped = self.feeder.faults()
        if dropped:
            self.log.say(dropped)

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.watchdog.stop()
        self.log.close()
        self.signals.restore()
        if kind is None:
            dist.barrier()
            dist.destroy_process_group()
