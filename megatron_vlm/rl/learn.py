"""Learning from samples: `torchrun ... -m megatron_vlm.rl.learn key=value ...` runs it on every
rank. Answers are drawn, rewards say which are better, and those become likelier.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_vlm.config import load_config
from megatron_vlm.config.arguments import add_overrides, configured, parse
from megatron_vlm.config.rl import check_rl
from megatron_vlm.config.schema import Config
from megatron_vlm.config.validate import check_training
from megatron_vlm.distributed.process import PREEMPTED, rank_of_process, run_process
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.early import check_run
from megatron_vlm.hf.push import check_push
from megatron_vlm.run.model import with_model
from megatron_vlm.run.sinks import check_installed
from megatron_vlm.step.schedule import lr_at

if TYPE_CHECKING:
    from megatron_vlm.distributed.agree import Signals
    from megatron_vlm.rl.school import School


def learn(cfg: Config, signals: "Signals | None" = None) -> int:
    """Learn to the last step; the exit status of this rank. `signals`: as for `train`."""
    with Watchdog.over(rank_of_process(), cfg.launch.timeout_minutes) as watchdog:
        from megatron_vlm.distributed.agree import Stopped
        from megatron_vlm.rl.school import School
        from megatron_vlm.run.run import Run

        with Run.open(cfg, watchdog, signals, asks=True) as run, School.open(run) as school:
            try:
                for step in range(run.progress.step, run.total_steps):
                    learn_step(school, step)
                    run.evaluate_if_due()
                    run.save_if_due()
            except Stopped:
                run.stop_early()
                return PREEMPTED
            return run.finish()


def learn_step(school: "School", step: int) -> None:
    """Samples, gradients, weights, figures."""
    run, learner = school.run, school.learner
    run.profiler.at(step)
    run.at(step, "samples")
    lesson, after = school.lesson(step)
    rows = learner.mine(lesson)
    run.at(step, "scoring")
    values = learner.values(lesson, rows)
    metrics = []
    for update in lesson.updates:
        run.at(step, "forward and backward")
        metrics.append(learner.gradients(update, rows, values))
        run.at(step, "optimizer")
        applied = run.worker.optim_step(lr_at(run.cfg.optim, step, run.total_steps))
    school.renew(step + 1)
    school.record(step, lesson, after, metrics, applied, learner.apart(rows, values))


def run_rl(arguments: Sequence[str], signals: "Signals | None" = None) -> int:
    """Compose the configuration and learn, on one rank; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_vlm.rl.learn")
    add_overrides(parser)
    args = parse(parser, arguments)
    cfg = load_config(args.overrides, configured(args)[0])
    check_training(cfg)
    check_rl(cfg)
    check_installed(cfg)
    check_run(cfg)
    if cfg.checkpoint.push is not None and rank_of_process() == 0:
        check_push(cfg.checkpoint.push)
    return learn(with_model(cfg), signals)


if __name__ == "__main__":
    sys.exit(run_process(run_rl, sys.argv[1:]))
