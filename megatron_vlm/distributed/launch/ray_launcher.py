"""`launch=ray`: training or reinforcement learning, with an actor of a Ray cluster for each rank.

Ray shows the output of a rank on the driver, after the rank's name. If a rank or a node is lost,
the job starts again from its last complete checkpoint, on the remaining nodes.
"""

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray  # type: ignore
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError  # type: ignore
from ray.util.placement_group import remove_placement_group  # type: ignore

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed import ray_cluster
from megatron_vlm.distributed.launch.restart import (
    Ending,
    run_with_restarts,
    signals_sent_to,
    wait_for_ranks,
)
from megatron_vlm.distributed.process import FAILED, RESTART, STUCK, print_to_user, run_guarded
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile

Command = tuple[str, str]  # module and function that each rank runs
TRAIN = ("megatron_vlm.train", "run_train")
_SETTLE_S = 20.0  # time before a restart for the cluster to notice that a node is gone


def run_ray_job(
    cfg: Config, arguments: Sequence[str], address: str, command: Command = TRAIN
) -> int:
    """Run a command in the cluster at this address, again after a failure."""
    started = not ray.is_initialized()
    if started:
        _start_ray(address)
    try:
        return run_with_restarts(
            lambda restart: _run_once(cfg, arguments, restart, command), cfg.launch.max_restarts
        )
    finally:
        if started:
            ray.shutdown()


def _start_ray(address: str) -> None:
    """Start Ray, or raise ConfigError. Ray itself raises Exception after a time-out."""
    remedy = "see that its cluster runs, or for a new one that memory and /tmp/ray have room"
    untrusted = UntrustedFile(f"launch.ray_address={address}", ConfigError, remedy)
    dashboard = False if address == "local" else None
    with untrusted.wrap_errors("Ray does not start"):
        ray.init(address=address, log_to_driver=True, include_dashboard=dashboard)


class TrainActor(ray_cluster.RankActor):
    """Actor of one rank. It trains in one thread, and another receives the driver's signals."""

    def __init__(self, rank: int, world: int, restart: int):
        super().__init__(rank, world)
        self.signals: Any = None
        os.environ[RESTART] = str(restart)

    def run(
        self, arguments: Sequence[str], store: ray_cluster.StoreAddress, command: Command = TRAIN
    ) -> int:
        """Run the command on this rank, and return its exit status."""
        from megatron_vlm.distributed.agreement import Signals

        module, function = command
        run = getattr(importlib.import_module(module), function)
        self.use_store(store)
        self.signals = Signals()
        return run_guarded(lambda arguments: run(arguments, self.signals), arguments)

    def stop(self, number: int) -> None:
        """Save and stop after this step."""
        if self.signals is not None:
            self.signals.received = number


def _run_once(cfg: Config, arguments: Sequence[str], restart: int, command: Command) -> Ending:
    if restart:
        time.sleep(_SETTLE_S)
    resources = cfg.launch.cpus_per_rank, ray_cluster.gpus_of_rank(cfg.platform)
    world = world_size(cfg, ray_cluster.room_for(*resources), restart)
    group, options = ray_cluster.place_ranks(world, cfg.parallel.tp, *resources)
    make = ray.remote(TrainActor)
    actors: list[Any] = [
        make.options(max_concurrency=2, **own).remote(rank, world, restart)
        for rank, own in enumerate(options)
    ]

    def send(number: int) -> None:
        for actor in actors:
            actor.stop.remote(number)

    try:
        with signals_sent_to(send) as received:
            ending = _train(actors, list(arguments), cfg.launch.timeout_minutes, command)
        return replace(ending, stopped=bool(received))
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _train(actors: Sequence[Any], arguments: list[str], minutes: float, command: Command) -> Ending:
    try:
        store = ray.get(actors[0].open_store.remote(), timeout=60 * minutes)
    except GetTimeoutError:
        return Ending(STUCK, f"rank 0 has not started in launch.timeout_minutes={minutes:g}")
    except (RayActorError, RayTaskError) as error:
        return Ending(FAILED, f"rank 0 could not start: {error}")
    refs = [actor.run.remote(arguments, store, command) for actor in actors]
    running = list(refs)

    def ended() -> list[Ending]:
        done, running[:] = ray.wait(running, timeout=0.5)
        return [Ending(_status(ref, refs.index(ref))) for ref in done]

    return wait_for_ranks(len(refs), ended)


def world_size(cfg: Config, room: int, restart: int) -> int:
    """Return launch.processes, or as many as the cluster has room for. After a failure, return at
    most the latter."""
    degree = cfg.parallel.tp * cfg.parallel.pp
    processes = cfg.launch.processes
    if processes is not None and (not restart or processes <= room):
        count = processes
    else:
        count = room // degree * degree
    if count < degree or count % degree:
        raise ConfigError(
            f"is not a multiple of parallel.tp x parallel.pp = {degree}, in a Ray cluster that has "
            f"room for {room} ranks",
            key="launch.processes",
            found=count or room,
            remedy="add nodes or lower one of them",
        )
    return count


def _status(ref: Any, rank: int) -> int:
    """Return the exit status of a rank. If it has none, the reason is printed at once, as the other
    ranks may follow."""
    try:
        return int(ray.get(ref))
    except RayActorError:
        print_to_user(f"rank {rank} was lost: its process or its node is gone")
    except RayTaskError as error:
        print_to_user(f"rank {rank}: {error.cause if error.cause is not None else error}")
    return FAILED
