"""The training loop: `torchrun ... -m megatron_vlm.train key=value ...` runs it on every rank.

Nothing heavy is imported before the configuration has been checked.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_vlm.config import load_config
from megatron_vlm.config.arguments import rank_arguments
from megatron_vlm.config.command_checks import check_train, check_used
from megatron_vlm.config.schema import Config
from megatron_vlm.data.worker_processes import start_server
from megatron_vlm.distributed.dims import loads_data
from megatron_vlm.distributed.process import rank_of_process, run_process, world_of_process
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.hf.hub_upload import check_push
from megatron_vlm.run import python_api
from megatron_vlm.run.run_folder import check_unnamed, with_model
from megatron_vlm.run.trackers import check_trackers
from megatron_vlm.training.lr_schedule import lr_at
from megatron_vlm.training.preflight import check_run

if TYPE_CHECKING:
    from megatron_vlm.distributed.agreement import Signals
    from megatron_vlm.run.run import Run


def train(cfg: Config, signals: "Signals | None" = None) -> int:
    """Train to the last step, and return the exit status of this rank. `signals` is for a caller
    that stops the run by other means than signals of the operating system."""
    place = rank_of_process(), world_of_process()
    with Watchdog.watch_rank(place[0], cfg.launch.timeout_minutes, cfg.run) as watchdog:
        if cfg.data.num_workers and not cfg.parallel.auto and loads_data(cfg.parallel, *place):
            start_server()  # it imports while this process imports, too
        from megatron_vlm.run.run import Run

        with Run.open(cfg, watchdog, signals) as run:
            run.begin()
            return run.to_the_end(partial(train_step, run))


def train_step(run: "Run", step: int) -> None:
    """Run one step: data, gradients, weights, metrics. `step` steps were done before it."""
    worker = run.worker
    run.profiler.begin_step(step + 1)
    run.begin_phase(step + 1, "data")
    batch = run.next_batch()
    run.begin_phase(step + 1, "forward and backward")
    metrics = run.objective.forward_backward(batch)
    run.begin_phase(step + 1, "optimizer")
    norm, lr = worker.optim_step(lr_at(run.cfg.optim, step, run.total_steps))
    run.record(step, batch, metrics, norm, lr)


def run_train(arguments: Sequence[str], signals: "Signals | None" = None) -> int:
    """Compose the configuration, train on one rank, and return its exit status."""
    return train(compose_config("megatron_vlm.train", arguments), signals)


def compose_config(
    module: str, arguments: Sequence[str], check: Callable[[Config], None] = check_train
) -> Config:
    """Return the checked configuration of a rank that runs this module."""
    args, file = rank_arguments(arguments, prog=f"python -m {module}")
    cfg = load_config(args.overrides, file)
    check(cfg)
    check_used(cfg, module.rpartition(".")[2], args.overrides, file)
    check_trackers(cfg)
    check_run(cfg)
    saved = check_unnamed(cfg, args.overrides, file)
    if cfg.checkpoint.push is not None and rank_of_process() == 0:
        check_push(cfg.checkpoint.push)
    return with_model(cfg, saved=saved)


class _TrainModule(ModuleType):
    """Module that can be called as the function `megatron_vlm.train`, whose name it takes once
    it is imported."""

    def __call__(self, *settings: str, **keys: Any) -> Path:
        """Train as `megatron-vlm train` does."""
        return python_api.train(*settings, **keys)


if __name__ == "__main__":
    sys.exit(run_process(run_train, sys.argv[1:]))
sys.modules[__name__].__class__ = _TrainModule
