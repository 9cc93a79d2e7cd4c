"""A group over Ray (the extra `ray`): one actor for each rank, and a controller that is no rank.

The fields that a call reads go into Ray's object store once, as the bytes of one TensorBatch for
each replica. Pixel values are separate objects, which only the actors of the first stage fetch."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
import ray  # type: ignore
from ray.exceptions import RayActorError, RayTaskError  # type: ignore
from ray.util.placement_group import remove_placement_group  # type: ignore

from megatron_vlm.config.schema import Config
from megatron_vlm.controller.rank_worker import RankWorker, WorkerError, first_failure, with_rank
from megatron_vlm.controller.worker_group import Join, Parts, ReplicaBatch, T, WorkerGroup
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.ray_cluster import RankActor, gpus_of_rank, place_ranks
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.worker import MegatronWorker

RAY_GRACE_S = 20.0  # seconds that the other ranks have to end their call once one has failed
RAY_POLL_S = 0.2  # seconds between two checks that Ray still runs, while a result is pending


def start_ray_group(
    cfg: Config, processes: int, cpus: float = 1.0, gpus: float | None = None, training: bool = True
) -> WorkerGroup:
    """Start `processes` actors, each with these resources and a worker. Ray must be initialised.
    The TP ranks of one stage share a node. Without `gpus` each actor gets one GPU if the cluster
    has any and cfg.platform is not cpu."""
    gpus = gpus_of_rank(cfg.platform) if gpus is None else gpus
    place, options = place_ranks(processes, cfg.parallel.tp, cpus, gpus)
    make = ray.remote(WorkerActor)
    actors: list[Any] = [
        make.options(**resources).remote(rank, processes) for rank, resources in enumerate(options)
    ]
    pool = ActorPool(actors, place)
    store = pool.gather([actors[0].open_store.remote()])[0]
    pool.gather([actor.use_store.remote(store) for actor in actors])
    return WorkerGroup(RayTransport(pool, cfg, training))


def share_ray_group(group: WorkerGroup, cfg: Config, training: bool = True) -> WorkerGroup:
    """Start a second group in the processes of the first, e.g. the reference model of a policy.
    Both groups must have the same layout, and closing one ends both."""
    assert isinstance(group.ranks, RayTransport)
    return WorkerGroup(RayTransport(group.ranks.pool, cfg, training))


class WorkerActor(RankActor):
    """Actor of one rank, with its workers."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)
        self.members: list[RankWorker] = []

    def start(self, cfg: Config, training: bool) -> tuple[int, ParallelDims]:
        """Make a worker, and return its number in this process and its layout."""
        try:
            with Watchdog.watch_rank(self.rank, cfg.launch.timeout_minutes) as watchdog:
                worker = MegatronWorker(cfg, training, watchdog)
        except Exception as error:
            raise with_rank(error, self.rank) from error
        self.members.append(RankWorker(worker))
        return len(self.members) - 1, worker.dims

    def call_on_part(
        self,
        number: int,
        method: str,
        batch: np.ndarray,
        pixels: np.ndarray | None,
        first_row: int,
        *args: Any,
    ) -> Any:
        """Call a method of a RankWorker with a part of a batch, which arrives as bytes."""
        values = None if pixels is None else TensorBatch.from_bytes(pixels.data)
        part = ReplicaBatch(TensorBatch.from_bytes(batch.data), values, first_row)
        return self.call(number, method, part, *args)

    def call(self, number: int, method: str, *args: Any) -> Any:
        """Call a method of a RankWorker."""
        member = self.members[number]
        result = member.call(method, *args)
        # The other ranks of a replica have the same result, which need not be sent.
        dims = member.worker.dims
        return result if self.rank == dims.leader_of(dims.replica_of(self.rank)) else None


class ActorPool:
    """The actors of one set of processes."""

    def __init__(self, actors: Sequence[Any], place: Any):
        self.actors = actors
        self.place = place
        self.ended: Exception | str | None = None
        self.gathering: threading.Thread | None = None

    def promise(self, refs: Sequence[Any], join: Join[T]) -> Future[T]:
        """Return a future of the value that `join` makes from the results of all ranks."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # the ranks have started: it cannot be cancelled
        results = [ref.future() for ref in refs]
        before = self.gathering

        def finish() -> None:
            if before is not None:
                before.join()  # in order, so that the first failure is the reason of the end
            try:
                future.set_result(join(self._collect_results(results)))
            except Exception as error:
                future.set_exception(error)

        self.gathering = threading.Thread(target=finish, daemon=True)
        self.gathering.start()
        return future

    def gather(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for the results of all ranks, and return them."""
        return self._collect_results([ref.future() for ref in refs])

    def _collect_results(self, results: Sequence[Future[Any]]) -> list[Any]:
        """Return the results of all ranks. The first error is raised once all ranks have ended
        their call. If a rank has died, or others do not return in time, all processes are ended."""
        outcomes: dict[Future[Any], Any] = {}
        errors: list[Exception] = []
        pending = set(results)
        while pending:
            completed = _some_of(pending, RAY_GRACE_S if errors else None)
            if not completed:
                break
            pending -= completed
            ended = [(rank, result) for rank, result in enumerate(results) if result in completed]
            outcomes |= {result: _outcome(result, rank) for rank, result in ended}
            errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
        if not errors:
            return [outcomes[result] for result in results]
        error = first_failure(errors)
        if pending or any(isinstance(outcome, ActorDiedError) for outcome in errors):
            self.close(error)
            raise _group_ended_error(self.ended) from error
        raise error

    def close(self, why: Exception | str = "it was closed") -> None:
        """End all actors; later calls fail with the reason."""
        if self.ended is None:
            self.ended = why
            if not ray.is_initialized():
                return  # the actors ended with Ray
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self.place)


class RayTransport:
    """Transport to one worker in each process of an ActorPool."""

    def __init__(self, pool: ActorPool, cfg: Config, training: bool):
        self.pool = pool
        workers = pool.gather([actor.start.remote(cfg, training) for actor in pool.actors])
        self.number, self.dims = workers[0]

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        if parts is None:
            refs = [actor.call.remote(self.number, method, *args) for actor in self.pool.actors]
        else:
            refs = self._send(method, parts, args)
        leaders = [self.dims.leader_of(replica) for replica in range(self.dims.dp)]
        return self.pool.promise(refs, lambda results: join([results[rank] for rank in leaders]))

    def _send(self, method: str, parts: Sequence[ReplicaBatch], args: Sequence[Any]) -> list[Any]:
        stored = [(_store(part.batch), _store(part.pixels), part.first_row) for part in parts]
        refs = []
        for rank, actor in enumerate(self.pool.actors):
            batch, pixels, first_row = stored[self.dims.replica_of(rank)]
            local_pixels = pixels if self.dims.stage_of(rank) == 0 else None
            refs.append(
                actor.call_on_part.remote(
                    self.number, method, batch, local_pixels, first_row, *args
                )
            )
        return refs

    def close(self) -> None:
        self.pool.close()


def _store(batch: TensorBatch | None) -> Any:
    """Put a batch into the object store as an array, which a node reads without a copy."""
    return None if batch is None else ray.put(np.frombuffer(batch.to_bytes(), dtype=np.uint8))


def _some_of(going: set[Future[Any]], timeout: float | None) -> set[Future[Any]]:
    """Return the calls that have ended, at least one, or an empty set after `timeout` seconds.
    Ray's own functions are not called here: if another thread shuts Ray down at that time, they
    would start a new Ray."""
    started = time.monotonic()
    while timeout is None or time.monotonic() < started + timeout:
        if done := wait(going, RAY_POLL_S, FIRST_COMPLETED).done:
            return done
        if not ray.is_initialized():
            raise _group_ended_error("Ray was shut down")
    return set()


def _group_ended_error(why: Exception | str | None) -> WorkerError:
    """Return the error of a call after the end of the group."""
    fields = why.fields() if isinstance(why, MegatronVLMError) else {"problem": str(why)}
    return WorkerError(**fields).within("the group has ended")


class ActorDiedError(WorkerError):
    """An error for a rank whose process has died."""


def _outcome(result: Future[Any], rank: int) -> Any:
    """Return the result of a call that has ended, or the worker's own error."""
    try:
        return result.result()
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, Exception) else error
    except RayActorError as error:
        return ActorDiedError(f"its process has died: {error}", place=f"rank {rank}")
