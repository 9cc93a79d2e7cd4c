"""Command that runs the service on every rank: `torchrun ... -m megatron_vlm.serve key=value ...`.

Rank 0 answers clients, and all ranks compute. The configuration is checked before any heavy import.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vlm.config import load_config
from megatron_vlm.config.arguments import rank_arguments
from megatron_vlm.config.command_checks import check_serve
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import (
    FAILED,
    PREEMPTED,
    print_stopped_early,
    print_to_user,
    rank_of_process,
)
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.run.run_folder import RunLock, held_folder, saved_config, with_model
from megatron_vlm.training.preflight import check_run
from megatron_vlm.version import __version__

if TYPE_CHECKING:
    from megatron_vlm.distributed.agreement import Signals
    from megatron_vlm.serve.served_models import ModelCommands


def serve_on_rank(cfg: Config, signals: "Signals | None" = None) -> int:
    """Serve until a signal arrives, and return the exit status of this rank."""
    with Watchdog.watch_rank(rank_of_process(), cfg.launch.timeout_minutes, cfg.run) as watchdog:
        from megatron_vlm.controller.rank_worker import BrokenError
        from megatron_vlm.distributed.agreement import Signals
        from megatron_vlm.serve.served_models import ModelCommands, Models

        signals = signals or Signals()
        with ExitStack() as opened:
            opened.callback(signals.restore)
            claim = None
            if rank_of_process() == 0:  # before the slow steps
                claim = opened.enter_context(held_folder(cfg))
            commands = ModelCommands(Models(cfg, watchdog), signals)
            signals.can_save = True
            try:
                if claim is not None:
                    _lead(cfg, commands, claim, opened)
                else:
                    commands.follow()
            except BrokenError as error:  # not an error of the user: a restart helps
                print_to_user(f"rank {rank_of_process()}: {error}")
                return FAILED
    return PREEMPTED


def _lead(cfg: Config, commands: "ModelCommands", claim: RunLock, opened: ExitStack) -> None:
    """Run the service on rank 0 until a signal arrives."""
    from megatron_vlm.distributed.agreement import Stopped
    from megatron_vlm.serve.startup import open_service

    try:
        service, server, address = open_service(cfg, commands, opened)
    except Stopped:  # a signal while the engines load
        print_stopped_early()
        commands.end()
        return
    claim.begin(cfg)
    dims = commands.models.base.dims
    print_to_user(
        f"{__version__} serves {cfg.model.path} at {address} (tp={dims.tp} pp={dims.pp} "
        f"dp={dims.dp}). Clients set TINKER_BASE_URL={address}"
    )
    try:
        service.run()
    except Stopped:
        print_to_user(
            "stopping: what is in memory is kept, and what waits is done when it starts again"
        )
        server.stop()
        service.close()
        commands.end()


def run_serve(arguments: Sequence[str], signals: "Signals | None" = None) -> int:
    """Compose the configuration, serve on this rank, and return its exit status."""
    args, file = rank_arguments(arguments, prog="python -m megatron_vlm.serve")
    cfg = load_config(args.overrides, file)
    check_serve(cfg)
    check_engine(cfg, "serve")
    check_run(cfg)
    return serve_on_rank(with_model(cfg, saved=saved_config(Path(cfg.run))), signals)
