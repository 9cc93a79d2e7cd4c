"""Reinforcement learning: `torchrun ... -m megatron_vlm.rl key=value ...` runs it on every rank.
Answers are sampled, rewards score them, and training makes the better ones more likely.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_vlm.config.command_checks import check_rl
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import PREEMPTED, print_stopped_early, rank_of_process
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.report.metrics_lines import has_usage_line
from megatron_vlm.train import compose_config
from megatron_vlm.training.lr_schedule import lr_at

if TYPE_CHECKING:
    from megatron_vlm.distributed.agreement import Signals
    from megatron_vlm.rl.trainer import RlTrainer


def learn(cfg: Config, signals: "Signals | None" = None) -> int:
    """Train to the last step, and return the exit status of this rank. `signals`: as for
    `train`."""
    with Watchdog.watch_rank(rank_of_process(), cfg.launch.timeout_minutes, cfg.run) as watchdog:
        from megatron_vlm.config.command_checks import needs_held_out_rewards
        from megatron_vlm.distributed.agreement import Stopped
        from megatron_vlm.rl.trainer import RlTrainer
        from megatron_vlm.run.run import Run

        with Run.open(cfg, watchdog, signals, prompts_only=True) as run:
            try:
                with RlTrainer.open(run) as trainer:
                    run.begin()
                    if run.progress.step == 0 and needs_held_out_rewards(cfg):
                        run.evaluate()  # what the model gets before it learns
                    return run.to_the_end(partial(learn_step, trainer))
            except Stopped:  # Ray has sent a signal to one rank, and all agreed
                print_stopped_early()
                return PREEMPTED


def learn_step(trainer: "RlTrainer", step: int) -> None:
    """Run a step: sample, compute the gradients, update the weights, and record the metrics.
    `step` steps were done before it."""
    from megatron_vlm.rl.seen import measure_seen, weigh

    run, updater = trainer.run, trainer.updater
    run.profiler.begin_step(step + 1)
    run.begin_phase(step + 1, "samples")
    batch, after = trainer.train_batch(step)
    rows = updater.local_rows(batch)
    run.begin_phase(step + 1, "scoring")
    values = updater.values(batch, rows)
    is_shown = has_usage_line(step + 1, run.total_steps)
    scores = measure_seen(updater, batch, rows, values, step, is_shown)
    values = weigh(run.cfg, batch, rows, values, scores)
    metrics = []
    for update in batch.updates:
        run.begin_phase(step + 1, "forward and backward")
        metrics.append(updater.gradients(update, rows, values))
        run.begin_phase(step + 1, "optimizer")
        applied = run.worker.optim_step(lr_at(run.cfg.optim, step, run.total_steps))
    trainer.renew(step + 1)
    gap, teacher_kls = updater.log_prob_gap(rows, values), updater.teacher_kls(rows, values)
    trainer.record(step, batch, after, metrics, applied, gap, teacher_kls, scores)


def run_rl(arguments: Sequence[str], signals: "Signals | None" = None) -> int:
    """Compose the configuration, train on this rank, and return its exit status."""

    def check(cfg: Config) -> None:
        check_rl(cfg)
        check_engine(cfg, "rl")

    return learn(compose_config("megatron_vlm.rl", arguments, check), signals)
