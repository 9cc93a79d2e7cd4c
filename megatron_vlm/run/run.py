"""State of a training run on one rank, opened in order and closed in order; at its start the layout
that parallel=auto and parallel.layers_per_stage=auto mean, and the overview that rank 0 prints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.config.command_checks import needs_held_out_rewards
from megatron_vlm.config.objectives import reference_of
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import extra_head
from megatron_vlm.data.batches.dataset import StreamSet
from megatron_vlm.data.batches.loader import StepBatch
from megatron_vlm.distributed.agreement import Signals, Stopped, Vote, fail_together
from megatron_vlm.distributed.collectives import broadcast_json, gather_json, host_group
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.process import PREEMPTED, rank_of_process
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import CheckpointError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.model_card import versions
from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.printable import size_text
from megatron_vlm.lora.targets import serving_remark
from megatron_vlm.planner.auto_layout import needs_planning, plan_layout, plan_run, with_layout_of
from megatron_vlm.planner.row_sizes import mix_of
from megatron_vlm.report.metrics_lines import STOPPED, Examples, has_usage_line
from megatron_vlm.report.run import write_report
from megatron_vlm.report.run_overview import (
    RunFacts,
    StageReport,
    layout_table,
    run_overview,
    stage_reports,
)
from megatron_vlm.run.checkpointing import CheckpointManager, Exporter
from megatron_vlm.run.evaluation.evaluate import Evaluator, write_predictions
from megatron_vlm.run.evaluation.held_out_sets import EvalSet, list_held_out
from megatron_vlm.run.log import RunLog
from megatron_vlm.run.out_of_memory import explain_out_of_memory
from megatron_vlm.run.progress import DefaultInterval, is_due
from megatron_vlm.run.run_folder import HELD_OUT_LIST, held_folder, saved_config
from megatron_vlm.run.throughput import Meter, NonFiniteGuard, PhaseTimes, Profiler
from megatron_vlm.run.trackers import TrackedSample
from megatron_vlm.training.data_feed import Feeder
from megatron_vlm.training.frozen_inputs import frozen_inputs
from megatron_vlm.training.lr_schedule import describe_run_length, total_steps
from megatron_vlm.training.rank_model import PATIENCE
from megatron_vlm.training.reference import with_reference
from megatron_vlm.training.run_objective import objective_of
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

_PLANNED = ("parallel", "model", "train")  # groups that have keys which the planner chooses


def resolve_layout(cfg: Config, watchdog: Watchdog) -> tuple[Config, str]:
    """Return the configuration with the layout, equal on all ranks, and on rank 0 a sentence about
    it. If it must be decided, this is a collective."""
    if not needs_planning(cfg):
        return cfg, ""
    platform, remark = pick_platform(cfg.platform), ""
    watchdog.begin_phase(0, "planning the layout", files=True)
    join_world(platform, PATIENCE * cfg.launch.timeout_minutes)
    planned = cfg
    with fail_together(DataError):
        if dist.get_rank() == 0:
            planned, remark = _decide(cfg, platform)
    values: Any = {name: asdict(getattr(planned, name)) for name in _PLANNED}
    values = broadcast_json(values, 0)
    values["parallel"]["auto"] = tuple(values["parallel"]["auto"])
    cfg = replace(cfg, **{name: replace(getattr(cfg, name), **values[name]) for name in _PLANNED})
    return cfg, remark


def _decide(cfg: Config, platform: Platform) -> tuple[Config, str]:
    """Return the layout with which the run began, if it resumes, or else the best one."""
    sizes = read_sizes(cfg.model.path, cfg.data.add_tokens, extra_head(cfg))
    world = dist.get_world_size()
    before = _resumed_config(cfg) if cfg.parallel.auto else None
    if before and (kept := with_layout_of(cfg, before, world, sizes.text.num_layers)):
        degrees = f"TP {kept.parallel.tp}, PP {kept.parallel.pp}, EP {kept.parallel.ep}"
        return kept, f"parallel=auto keeps the layout of the checkpoint: {degrees}"
    return plan_layout(cfg, sizes, world, platform, mix_of(cfg, sizes))


def _resumed_config(cfg: Config) -> Config | None:
    """Return the configuration of the checkpoint from which this run will probably resume."""
    resume = cfg.checkpoint.resume
    if resume == "never":
        return None
    own = sorted((Path(cfg.run) / "checkpoints").glob("step-*[0-9]"))
    folders = own if resume == "auto" else [Path(resume)]
    return saved_config(folders[-1]) if folders else None


def describe_start(
    worker: MegatronWorker,
    feeder: Feeder,
    held_out: Sequence[EvalSet],
    stages: Sequence[StageReport],
    length: str,
    prompts_only: bool,
) -> str:
    """Return the overview of a run on rank 0. `length`: its samples and steps, as a sentence."""
    data = feeder.data
    assert data is not None, "rank 0 loads data"
    plan = plan_run(worker.layout, data, prompts_only)
    sets, platform = [(each.name, each.samples) for each in held_out], worker.platform
    owner = "a GPU" if platform.is_cuda else "this machine"
    memory = f"{size_text(platform.memory_total())} in {owner}"
    facts = RunFacts(plan, length, data, feeder.remarks, sets, stages, memory, prompts_only)
    return run_overview(facts)


def length_of(cfg: Config, samples: int | None, total: int, done: int) -> str:
    """Describe the length of a run. Raise a ConfigError if a new one would end in its warm-up."""
    if not done:
        return describe_run_length(cfg, samples, total)
    return f"{done:,} of {total:,} steps are done already"


class Run:
    """A training run on one rank. Open it with `with Run.open(cfg, watchdog) as run`."""

    def __init__(
        self,
        cfg: Config,
        watchdog: Watchdog,
        signals: Signals,
        opened: ExitStack,
        prompts_only: bool,
    ):
        """Open the model and the data, and read what an earlier run has done; `opened` closes them.
        With `prompts_only` the data are prompts, for the caller in `feeder.data`."""
        opened.callback(signals.restore)
        self.phase_times = PhaseTimes()
        claim = None
        if rank_of_process() == 0:  # The lock comes before anything that takes long.
            claim = opened.enter_context(held_folder(cfg))
        cfg, planned = resolve_layout(cfg, watchdog)
        self.cfg, self.watchdog, self.signals = cfg, watchdog, signals
        self.worker = worker = MegatronWorker(cfg, watchdog=watchdog)
        grid, platform, sizes = worker.grid, worker.platform, worker.source.sizes
        self.feeder = Feeder(cfg, sizes, grid, platform.device, watchdog, prompts_only)
        self.objective = objective_of(worker, cfg)
        is_idle = prompts_only and cfg.rl.eval_scores == "reward"
        may_ask = prompts_only and needs_held_out_rewards(cfg)
        self.evaluator = Evaluator(worker, cfg, self.objective, is_idle, may_ask)
        opened.callback(self.evaluator.close)
        self.rate_held_out: Callable[[], dict[str, dict[str, float]]] | None = None
        self.total_steps = total_steps(cfg.train, self.feeder.length, prompts_only)
        self.begin_phase(0, "resuming", files=True)
        frozen = {}
        with fail_together(CheckpointError):
            if grid.rank == 0:
                frozen = frozen_inputs(worker, prompts_only)
        self.saver = CheckpointManager(cfg, worker, self.feeder.fingerprint, frozen, claim)
        self.saver.find()
        if reference_of(cfg) == "keep":  # Before a resume the weights are the initial ones.
            self._keep_reference()
            self.begin_phase(0, "resuming", files=True)
        self.progress = self.saver.resume()
        self.resumed_step = self.progress.step  # 0 for a new run
        self.position_before = self.progress.position  # before the last step
        length = length_of(cfg, self.feeder.length, self.total_steps, self.resumed_step)
        if not prompts_only:
            self.feeder.start(self.progress.position)
        self.log = RunLog(cfg, grid.rank == 0, self.total_steps, self.resumed_step)
        opened.callback(self.log.close)
        self.profiler = Profiler(cfg, grid.rank, platform)
        opened.callback(self.profiler.close)
        self.meter, self.guard = Meter(platform), NonFiniteGuard(cfg)
        self.interval, self.is_interval_over = DefaultInterval(), False
        self.reports = stage_reports(cfg, worker.dims, worker.table)
        if self.log.speaks:
            self._announce(length, prompts_only)
        self.remarks = [planned, serving_remark(cfg, worker.adapted), *self.saver.remarks]

    @staticmethod
    @contextmanager
    def open(
        cfg: Config, watchdog: Watchdog, signals: Signals | None = None, prompts_only: bool = False
    ) -> Iterator["Run"]:
        """Open a run that is always closed again. Without an error, all ranks end together."""
        with ExitStack() as opened:
            yield Run(cfg, watchdog, signals or Signals(), opened, prompts_only)
        dist.barrier(group=host_group())

    def _keep_reference(self) -> None:
        """Compute the reference log-probs of all data, or read them from the cache."""
        cfg, data = self.cfg, self.feeder.data
        assert not isinstance(data, StreamSet), "checked with the configuration"
        samples = self.total_steps * cfg.train.global_batch_size
        self.feeder.data = with_reference(self.worker, cfg, data, "data.train", samples)
        self.evaluator.keep_reference()

    def to_the_end(self, do_step: Callable[[int], None]) -> int:
        """Do every remaining step and what is due after it. Return the exit status."""
        self.signals.can_save = True
        with explain_out_of_memory(self.worker):
            try:
                for step in range(self.progress.step, self.total_steps):
                    if self._stops_early():
                        break
                    do_step(step)
                    self.is_interval_over = self.interval.is_over(step + 1)
                    # Before the save, so that a checkpoint knows the best.
                    if self.progress.step == self.total_steps or self._is_due(self.cfg.eval.every):
                        self.evaluate()
                    self.save_if_due()
                    if self.is_interval_over:
                        self.interval.restart()
            except Stopped:
                self.stop_on_signal()
                return PREEMPTED
            return self.finish()

    def _stops_early(self) -> bool:
        """Return whether train.early_stopping ends the run here, and log it."""
        cfg, progress = self.cfg, self.progress
        if not progress.has_waited(cfg):
            return False
        best = "none was finite"
        if progress.best is not None:
            best = f"best {progress.best:.4g} at step {progress.best_step}"
        self.log.event(
            progress.step,
            f"stopped early at step {progress.step} of {self.total_steps}: {cfg.checkpoint.best} "
            f"has not improved in {progress.waited} evaluations; {best}",
        )
        return True

    def _announce(self, length: str, prompts_only: bool) -> None:
        worker, reports, sets = self.worker, self.reports, self.evaluator.sets
        where = f"{worker.platform.name}, {worker.chunks[0].config.params_dtype}"
        self.log.say(layout_table(self.cfg, where, reports))
        self.log.say(describe_start(worker, self.feeder, sets, reports, length, prompts_only))

    def begin(self) -> None:
        """Write what the folder has from the start of the run on. Until then, a start that is
        refused leaves the folder as it was."""
        worker, dims, reports = self.worker, self.worker.dims, self.reports
        if self.saver.claim is not None:
            self.saver.claim.begin(self.cfg)
        self.log.start(
            step=self.progress.step,
            platform=worker.platform.name,
            device=worker.platform.device_name(),
            world=dims.world_size,
            layout={"tp": dims.tp, "pp": dims.pp, "dp": dims.dp},
            parameters=sum(report.total.total() for report in reports),
            trainable=sum(report.trainable.total() for report in reports),
            model=self.cfg.model.path,
            samples=self.feeder.length,
            total_steps=self.total_steps,
            versions=versions(),
            dropped=self.feeder.remarks.dropped,
            wrong=self.feeder.remarks.wrong,
        )
        if self.log.speaks and (text := list_held_out(self.evaluator.sets)):
            write_text(Path(self.cfg.run) / HELD_OUT_LIST, text)
        for remarks in (self.feeder.remarks, *(each.remarks for each in self.evaluator.sets)):
            for line in remarks.lines:
                self.log.event(self.progress.step, line)
        for remark in filter(None, self.remarks):
            self.log.event(self.resumed_step, remark)

    def begin_phase(self, step: int, phase: str, files: bool = False) -> None:
        """Report the step and the phase to the watchdog and to the clock of phases."""
        self.phase_times.begin(phase)
        self.watchdog.begin_phase(step, phase, files)

    def next_batch(self) -> StepBatch:
        """Return the next step's data. All ranks continue together or stop together."""
        return self.feeder.batches.next(Vote.OK if self.signals.received is None else Vote.STOP)

    def record(
        self, step: int, batch: StepBatch, metrics: StepMetrics, norm: float, lr: float
    ) -> None:
        """Log the figures of a finished step and advance the progress."""
        before, done = self.progress, step + 1
        tokens = None if before.tokens is None else before.tokens + metrics.num_tokens
        self.position_before = before.position
        self.progress = replace(before, step=done, position=batch.after, tokens=tokens)
        figures = self.meter.read(done, batch.after.epoch, metrics, lr, norm, batch.figures)
        self.log.step(figures)
        if has_usage_line(done, self.total_steps):
            platform = self.worker.platform
            memory = gather_json(round(platform.memory_peak() / 2**30, 3))
            self.log.usage(done, memory, self.phase_times.take())
        if (warning := self.guard.check(done, metrics, norm)) is not None:
            self.log.event(done, warning)

    def _is_due(self, every: int | str | None) -> bool:
        now = self.progress
        samples, is_over = self.feeder.length, self.is_interval_over
        return is_due(every, now.step, self.position_before, now.position, samples, is_over)

    def evaluate(self) -> None:
        """Score every held-out set. The result may be the best so far."""
        step = self.progress.step
        self.begin_phase(step, "evaluation")
        rewards = {} if self.rate_held_out is None else self.rate_held_out()
        for place, done in enumerate(self.evaluator.evaluate()):
            own = rewards.pop(done.name, {"seconds": 0.0})
            seconds = own["seconds"] + done.scores["seconds"]
            done = replace(done, scores={**own, **done.scores, "seconds": seconds})
            self._record_scores(done.name, done.scores)
            for remark in done.remarks:
                self.log.event(step, remark)
            self.log.show(step, done.name, list(map(TrackedSample.from_example, done.examples)))
            if done.predictions:
                write_predictions(Path(self.cfg.run) / "predictions", done, step=step)
                if place == 0:
                    Examples(done.name, step, tuple(done.examples)).write(Path(self.cfg.run))
        for name, scores in rewards.items():  # sets whose loss is not measured
            self._record_scores(name, scores)
        self.meter.skip()

    def _record_scores(self, name: str, scores: dict[str, float]) -> None:
        step = self.progress.step
        self.log.evaluation(step, name, scores)
        self.progress = self.progress.with_scores(name, scores)
        self.progress = self.progress.with_patience(self.cfg, name, scores)
        self.progress = self.progress.with_best(self.cfg.checkpoint, name, scores)

    def save_if_due(self) -> None:
        """Complete the checkpoint in progress, if it is written, and start one if that is due."""
        self.begin_phase(self.progress.step, "checkpoint", files=True)
        self.saver.poll()
        if self._is_due(self.cfg.checkpoint.every) or self.progress.best_step == self.progress.step:
            self.saver.save(self.progress)
            self.meter.skip()

    def stop_on_signal(self) -> None:
        """Save after a signal, and log how to resume."""
        self.begin_phase(self.progress.step, "checkpoint", files=True)
        self.saver.save(self.progress)
        self.saver.finish()
        resume = self.cfg.checkpoint.resume
        how = "" if resume == "auto" else f" with checkpoint.resume=auto instead of {resume}"
        step = self.progress.step
        self.log.event(step, f"{STOPPED} {step} steps; start again{how} to resume")

    def finish(self) -> int:
        """Save the last checkpoint and export the weights. Return the exit status."""
        step = self.progress.step
        if step == self.resumed_step:
            beyond = f", more than the {self.total_steps} asked for" * (step > self.total_steps)
            self.log.event(step, f"nothing was left to train: {step} steps are done{beyond}")
        self.begin_phase(step, "checkpoint", files=True)
        self.saver.save(self.progress)
        self.saver.finish()
        exporter = Exporter(self.cfg, self.worker, self.saver, self.log, self.begin_phase)
        exporter.export(self.progress)
        if text := self.feeder.faults():
            self.log.say(text)
        if self.cfg.log.report and self.log.speaks:
            self.log.say(f"report: {write_report(Path(self.cfg.run))}")
        return exporter.push(step, self.signals)
