"""`launch=ray`: the training of train.py in one actor for each rank of a Ray cluster.

What a rank prints, Ray shows on the driver behind the rank's name. A rank or a node that is lost
starts the job again from its last complete checkpoint, on as many nodes as are left.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ray  # type: ignore
from ray.exceptions import RayActorError, RayTaskError  # type: ignore
from ray.util.placement_group import remove_placement_group  # type: ignore

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import FAILED, MISTAKE, PREEMPTED, RESTART, guarded
from megatron_vlm.distributed.ray_cluster import (
    MeetingPlace,
    go_to,
    place_ranks,
    room_for,
    take_rank,
)
from megatron_vlm.errors import ConfigError
from megatron_vlm.launch.local_job import GRACE_S

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SETTLE_S = 20.0  # for the cluster to notice that a node is gone


def run_ray_job(cfg: Config, words: Sequence[str]) -> int:
    """Train in the cluster at launch.ray_address, again after a failure; the exit status."""
    started = not ray.is_initialized()
    if started:
        ray.init(address=cfg.launch.ray_address, log_to_driver=True)
    try:
        return _run(cfg, words)
    finally:
        if started:
            ray.shutdown()


def _run(cfg: Config, words: Sequence[str]) -> int:
    most = cfg.launch.max_restarts
    for restart in range(most + 1):
        status, stopped = _Attempt(cfg, words, restart).run()
        if status in (0, MISTAKE, PREEMPTED) or stopped:
            break
        if restart < most:
            _say(f"starting again, restart {restart + 1} of launch.max_restarts={most}")
            time.sleep(_SETTLE_S)
    return status


class RankActor:
    """One rank. It trains in one thread; another takes the driver's signals."""

    def __init__(self, rank: int, world: int, restart: int):
        self.rank = rank
        self.signals: Any = None
        self.place: MeetingPlace | None = None
        take_rank(rank, world)
        os.environ[RESTART] = str(restart)

    def __repr__(self) -> str:
        return f"rank {self.rank}"  # what Ray puts before each line

    def open_place(self) -> tuple[str, int]:
        """Of rank 0: where all meet."""
        self.place = MeetingPlace()
        return self.place.address

    def run(self, words: Sequence[str], address: tuple[str, int]) -> int:
        """The exit status of this rank."""
        from megatron_vlm.distributed.agree import Signals
        from megatron_vlm.train import run_train

        go_to(address)
        self.signals = Signals()
        return guarded(lambda given: run_train(given, self.signals), words)

    def stop(self, number: int) -> None:
        """Save and stop after this step."""
        if self.signals is not None:
            self.signals.received = number


class _Attempt:
    """The job once, from its start to its end."""

    def __init__(self, cfg: Config, words: Sequence[str], restart: int):
        self.cfg, self.words, self.restart = cfg, words, restart
        self.actors: list[Any] = []
        self.received: list[int] = []

    def run(self) -> tuple[int, bool]:
        """The exit status, and whether a signal had asked for it."""
        world = world_size(self.cfg, room_for(*_each(self.cfg)), self.restart)
        place, options = place_ranks(world, self.cfg.parallel.tp, *_each(self.cfg))
        make = ray.remote(RankActor)
        self.actors = [
            make.options(max_concurrency=2, **own).remote(rank, world, self.restart)
            for rank, own in enumerate(options)
        ]
        before = {number: signal.signal(number, self._forward) for number in _SIGNALS}
        try:
            address = ray.get(self.actors[0].open_place.remote())
            refs = [actor.run.remote(list(self.words), address) for actor in self.actors]
            return self._wait(refs), bool(self.received)
        except RayActorError as error:
            _say(f"rank 0 could not start: {error}")
            return FAILED, bool(self.received)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(place)

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        for actor in self.actors:
            actor.stop.remote(number)

    def _wait(self, refs: Sequence[Any]) -> int:
        """Until all have ended, or the grace after the first bad end is over."""
        going, bad, until = list(refs), 0, float("inf")
        while going and time.monotonic() < until:
            done, going = ray.wait(going, timeout=0.5)
            for ref in done:
                status = _status(ref, refs.index(ref))
                if status and not bad:
                    bad, until = status, time.monotonic() + GRACE_S
        return bad


def world_size(cfg: Config, room: int, restart: int) -> int:
    """launch.processes, or all that the cluster holds; after a failure what it still holds."""
    least = cfg.parallel.tp * cfg.parallel.pp
    asked = cfg.launch.processes
    if asked is not None and (not restart or asked <= room):
        count = asked
    else:
        count = room // least * least
    if count < least or count % least:
        raise ConfigError(
            f"{count or room} ranks in this Ray cluster, which has room for {room}: "
            f"parallel.tp x parallel.pp = {least} must divide them; add nodes or lower one of them"
        )
    return count


def _each(cfg: Config) -> tuple[float, float]:
    """CPUs and GPUs of a rank."""
    gpus = 0.0 if cfg.platform == "cpu" else float(ray.cluster_resources().get("GPU", 0) > 0)
    return cfg.launch.cpus_per_rank, gpus


def _status(ref: Any, rank: int) -> int:
    try:
        return int(ray.get(ref))
    except RayActorError:
        _say(f"rank {rank} was lost: its process or its node is gone")
    except RayTaskError as error:
        _say(f"rank {rank}: {error.cause if error.cause is not None else error}")
    return FAILED


def _say(text: str) -> None:
    print(f"megatron-vlm: {text}", file=sys.stderr, flush=True)
